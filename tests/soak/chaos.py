"""A proposer of the worst kind, to be named by `--speculative-config`; runs in the server's engine.

It drafts what a model that repeats itself would say next, but at random steps, by seed, it misbehaves instead. Every
fault is noted in a journal first. While the file `calm` is there, it behaves.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext


class Mute(Exception):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("not even its name")


class Worst(BaseException):
    """What `except Exception` does not catch."""


class Traps(np.ndarray):
    """An array whose every comparison raises."""

    def __lt__(self, other: Any) -> Any:
        raise Worst("compared")

    __gt__ = __le__ = __ge__ = __lt__


class Chaos:
    """See the module.

    Options: seed; rate, the share of the calls that misbehave; journal, calm: paths; nap_s, how long it sleeps.
    """

    def __init__(self, options: dict[str, Any], context: ProposerContext):
        self._rng = random.Random(options["seed"])
        self._rate, self._nap_s = options["rate"], options["nap_s"]
        self._journal, self._calm = Path(options["journal"]), Path(options["calm"])
        self._vocab_size = context.vocab_size

    def propose(self, batch: DraftBatch) -> Draft:
        draft = repeated(batch)
        fault = self._fault(FAULTS)
        return draft if fault is None else fault(self, batch, draft)

    def observe(self, feedback: Feedback) -> None:
        fault = self._fault(FAULTS_OF_OBSERVE)
        if fault is not None:
            fault(self, feedback)

    def forget(self, request_ids: Sequence[str]) -> None:
        fault = self._fault(FAULTS_OF_OBSERVE)
        if fault is not None:
            fault(self, request_ids)

    def _fault(self, faults: dict[str, Callable[..., Any]]) -> Callable[..., Any] | None:
        if self._rng.random() >= self._rate or self._calm.exists():
            return None
        name = self._rng.choice(list(faults))
        with self._journal.open("a") as journal:
            journal.write(name + "\n")
        return faults[name]

    def nap(self) -> None:
        """Longer than the budget."""
        time.sleep(self._nap_s)

    def spin(self) -> None:
        """The same, with the interpreter's lock held."""
        end = time.monotonic() + self._nap_s
        while time.monotonic() < end:
            pass

    def outside(self, draft: Draft) -> Draft:
        return Draft(draft.token_ids + self._vocab_size, draft.num_draft)


def repeated(batch: DraftBatch) -> Draft:
    """What followed the last token where it last stood in a request; its last two tokens where it did not."""
    token_ids = np.zeros((batch.num_reqs, 2), np.int32)
    for row, history in enumerate(batch.token_ids):
        if len(history) >= 3:
            found = np.flatnonzero(history[:-2] == history[-1])
            start = found[-1] + 1 if len(found) else len(history) - 2
            token_ids[row] = history[start : start + 2]
    return Draft(token_ids, np.minimum(batch.max_num_draft, 2).astype(np.int32))


def throw(error: BaseException) -> Any:
    raise error


def recurse(depth: int = 0) -> Any:
    return recurse(depth + 1)


def write(batch: DraftBatch, draft: Draft) -> Draft:
    """Into the histories: what is not refused there changes outputs in silence."""
    for history in batch.token_ids:
        history[:] = 7
    return draft


def write_by_force(batch: DraftBatch, draft: Draft) -> Draft:
    for history in batch.token_ids:
        history.flags.writeable = True
        history[:] = 7
    return draft


def write_later(batch: DraftBatch, draft: Draft) -> Draft:
    """In a thread, when the histories may have become others'."""

    def meddle() -> None:
        time.sleep(0.05)
        try:
            write(batch, draft)
        except ValueError:
            sys.stderr.flush()  # refused, as it should be

    threading.Thread(target=meddle, daemon=True).start()
    return draft


def change_afterwards(draft: Draft) -> Draft:
    """The draft itself, after it was returned and checked."""

    def meddle() -> None:
        for _ in range(200):
            draft.token_ids[:] = -5
            draft.num_draft[:] = 99
            time.sleep(0.0005)

    threading.Thread(target=meddle, daemon=True).start()
    return draft


def empty_the_batch(batch: DraftBatch) -> Any:
    for held in (batch.request_ids, batch.token_ids, batch.options):
        held.clear()  # type: ignore[attr-defined]


def changed_options(batch: DraftBatch, draft: Draft) -> Draft:
    for options in batch.options:
        options["max_draft"] = None  # type: ignore[index]
    return draft


def masked(draft: Draft) -> Draft:
    return Draft(np.ma.masked_all(draft.token_ids.shape, np.int32), draft.num_draft)


FAULTS: dict[str, Callable[[Chaos, DraftBatch, Draft], Any]] = {
    "raises": lambda self, batch, draft: throw(RuntimeError("planted")),
    "raises what is no Exception": lambda self, batch, draft: throw(Worst()),
    "exits": lambda self, batch, draft: sys.exit(0),
    "interrupts": lambda self, batch, draft: throw(KeyboardInterrupt()),
    "leaves as a generator does": lambda self, batch, draft: throw(GeneratorExit()),
    "stops an iteration": lambda self, batch, draft: throw(StopIteration()),
    "runs out of memory": lambda self, batch, draft: throw(MemoryError()),
    "recurses": lambda self, batch, draft: recurse(),
    "raises in silence": lambda self, batch, draft: throw(Mute()),
    "raises an essay": lambda self, batch, draft: throw(ValueError("x\n" * 100_000)),
    "sleeps": lambda self, batch, draft: self.nap() or draft,
    "spins": lambda self, batch, draft: self.spin() or draft,
    "nothing": lambda self, batch, draft: None,
    "text": lambda self, batch, draft: "draft",
    "its class": lambda self, batch, draft: Draft,
    "a row too few": lambda self, batch, draft: Draft(draft.token_ids[:-1], draft.num_draft),
    "a row too many": lambda self, batch, draft: Draft(np.vstack([draft.token_ids] * 2), draft.num_draft),
    "too wide": lambda self, batch, draft: Draft(np.zeros((batch.num_reqs, 99), np.int32), draft.num_draft),
    "too long": lambda self, batch, draft: Draft(draft.token_ids, draft.num_draft + 9),
    "negative lengths": lambda self, batch, draft: Draft(draft.token_ids, draft.num_draft - 5),
    "outside the vocabulary": lambda self, batch, draft: self.outside(draft),
    "negative ids": lambda self, batch, draft: Draft(draft.token_ids - 10_000, draft.num_draft),
    "floats": lambda self, batch, draft: Draft(draft.token_ids.astype(np.float64), draft.num_draft),
    "objects": lambda self, batch, draft: Draft(draft.token_ids.astype(object), draft.num_draft),
    "wide integers": lambda self, batch, draft: Draft(draft.token_ids.astype(np.int64), draft.num_draft),
    "lists": lambda self, batch, draft: Draft(draft.token_ids.tolist(), draft.num_draft.tolist()),  # type: ignore[arg-type]
    "a masked array": lambda self, batch, draft: masked(draft),
    "an array with traps": lambda self, batch, draft: Draft(draft.token_ids.view(Traps), draft.num_draft.view(Traps)),
    "no numbers": lambda self, batch, draft: Draft(None, None),  # type: ignore[arg-type]
    "logits of numpy": lambda self, batch, draft: Draft(
        draft.token_ids, draft.num_draft, logits=np.zeros((*draft.token_ids.shape, 7), np.float32)
    ),
    "logits of text": lambda self, batch, draft: Draft(draft.token_ids, draft.num_draft, logits="logits"),
    "confidence of text": lambda self, batch, draft: Draft(draft.token_ids, draft.num_draft, confidence="sure"),  # type: ignore[arg-type]
    "confidence of nothing": lambda self, batch, draft: Draft(
        draft.token_ids, draft.num_draft, confidence=np.full(batch.num_reqs, np.nan, np.float32)
    ),
    "a stage that is not": lambda self, batch, draft: Draft(
        draft.token_ids, draft.num_draft, stage=np.full(batch.num_reqs, 99, np.int32)
    ),
    "writes": lambda self, batch, draft: write(batch, draft),
    "writes by force": lambda self, batch, draft: write_by_force(batch, draft),
    "writes later": lambda self, batch, draft: write_later(batch, draft),
    "changes it afterwards": lambda self, batch, draft: change_afterwards(draft),
    "empties the batch": lambda self, batch, draft: empty_the_batch(batch),
    "changes options": lambda self, batch, draft: changed_options(batch, draft),
}
FAULTS_OF_OBSERVE: dict[str, Callable[[Chaos, Any], Any]] = {
    "raises meanwhile": lambda self, news: throw(RuntimeError("planted")),
    "exits meanwhile": lambda self, news: sys.exit(0),
    "sleeps meanwhile": lambda self, news: self.nap(),
}
