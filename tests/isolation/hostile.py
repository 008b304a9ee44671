"""Proposers that break the rules in different ways; their drafts are `good`, unless the draft is the fault.

`HOSTILE` maps a name to what `propose` does, which is given (batch, a good draft) and K, and the kind of fault that it
must be counted as: None where it does no harm.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from system_acts import ACTS

from vllm_specplugins.draft import Draft, DraftBatch, Feedback

HANG_S = 3.0  # longer than the budgets of the tests
K, VOCAB_SIZE = 4, 3072  # of the demo model
Act = Callable[[DraftBatch, Draft], Any]
RAISED, NONSENSE, HANGS = "raised", "returned nonsense", "hangs"
HOSTILE: dict[str, tuple[Act, str | None]] = {}


def good_draft(batch: DraftBatch) -> Draft:
    """The newest token again, twice."""
    last = np.array([tokens[-1] for tokens in batch.token_ids], np.int32)
    return Draft(np.stack([last, last], axis=1), np.minimum(batch.max_num_draft, 2).astype(np.int32))


class EvilText(BaseException):
    def __str__(self) -> str:
        sys.exit("no text")


class SlowText(Exception):
    def __str__(self) -> str:
        time.sleep(HANG_S)
        return "late"


class OtherDraft(Draft):
    __slots__ = ()


def hostile(name: str, kind: str | None) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        HOSTILE[name] = act, kind
        return act

    return add


def raises(error: Callable[[], BaseException]) -> Act:
    def act(batch: DraftBatch, good: Draft) -> Any:
        raise error()

    return act


def returns(**fields: Callable[[Any], Any]) -> Act:
    """The good draft with these fields made otherwise."""
    return lambda batch, good: replace(good, **{name: make(good) for name, make in fields.items()})


def in_place(array: np.ndarray, value: Any) -> None:
    array.flags.writeable = True
    array[...] = value


RAISES: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("planted"),
    "sys.exit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "MemoryError": MemoryError,
    "TimeoutError": lambda: TimeoutError("mine, not the barrier's"),
    "text that exits": EvilText,
    "a megabyte of text": lambda: ValueError("x" * (1 << 20)),
}
for _name, _error in RAISES.items():
    HOSTILE[f"raises {_name}"] = raises(_error), RAISED

RETURNS: dict[str, Act] = {
    "None": lambda batch, good: None,
    "a list": lambda batch, good: good.token_ids.tolist(),
    "a draft without fields": lambda batch, good: object.__new__(Draft),
    "a subclass": lambda batch, good: OtherDraft(good.token_ids, good.num_draft),
    "rows missing": returns(token_ids=lambda good: good.token_ids[:-1]),
    "rows too many": returns(token_ids=lambda good: np.concatenate([good.token_ids] * 2)),
    "lengths missing": returns(num_draft=lambda good: good.num_draft[:-1]),
    "too wide": returns(token_ids=lambda good: np.zeros((len(good.num_draft), K + 1), np.int32)),
    "a million columns": returns(token_ids=lambda good: np.zeros((len(good.num_draft), 1 << 20), np.int32)),
    "one dimension": returns(token_ids=lambda good: good.token_ids[:, 0]),
    "int64 ids": returns(token_ids=lambda good: good.token_ids.astype(np.int64)),
    "float ids": returns(token_ids=lambda good: good.token_ids.astype(np.float32)),
    "float lengths": returns(num_draft=lambda good: good.num_draft.astype(np.float64)),
    "other byte order": returns(token_ids=lambda good: good.token_ids.astype(">i4")),
    "lengths too long": returns(num_draft=lambda good: good.num_draft + K + 1),
    "lengths past the columns": returns(
        token_ids=lambda good: good.token_ids[:, :0], num_draft=lambda good: np.ones_like(good.num_draft)
    ),
    "negative lengths": returns(num_draft=lambda good: good.num_draft - K - 1),
    "ids behind the vocabulary": returns(token_ids=lambda good: good.token_ids + VOCAB_SIZE),
    "negative ids": returns(token_ids=lambda good: -1 - good.token_ids),
    "a masked array": returns(token_ids=lambda good: np.ma.masked_array(good.token_ids, mask=True)),
    "a tensor": returns(token_ids=lambda good: torch.from_numpy(good.token_ids)),
    "a tensor of lengths": returns(num_draft=lambda good: torch.from_numpy(good.num_draft)),
    "logits": returns(logits=lambda good: torch.zeros(*good.token_ids.shape, VOCAB_SIZE)),
    "logits of a wrong shape": returns(logits=lambda good: torch.zeros(1)),
    "confidence of float64": returns(confidence=lambda good: np.ones(len(good.num_draft))),
    "confidence NaN": returns(confidence=lambda good: np.full(len(good.num_draft), np.nan, np.float32)),
    "confidence infinite": returns(confidence=lambda good: np.full(len(good.num_draft), np.inf, np.float32)),
    "confidence of a wrong length": returns(confidence=lambda good: np.ones(99, np.float32)),
    "confidence a number": returns(confidence=lambda good: 1.0),
}
for _name, _act in RETURNS.items():
    HOSTILE[f"returns {_name}"] = _act, NONSENSE

WRITES: dict[str, Act] = {
    "a history": lambda batch, good: batch.token_ids[0].__setitem__(0, 1),
    "a history made writable": lambda batch, good: in_place(batch.token_ids[0], 1),
    "the array below a history": lambda batch, good: in_place(batch.token_ids[0].base, 1),  # type: ignore[arg-type]
    "a history by out": lambda batch, good: np.add(batch.token_ids[0], 1, out=batch.token_ids[0]),
    "a history by sort": lambda batch, good: batch.token_ids[0][::-1].sort(),
    "request ids": lambda batch, good: batch.request_ids.pop(),  # type: ignore[attr-defined]
    "the list of histories": lambda batch, good: batch.token_ids.clear(),  # type: ignore[attr-defined]
    "options": lambda batch, good: batch.options[0].__setitem__("max_draft", None),  # type: ignore[index]
    "the limits": lambda batch, good: in_place(batch.max_num_draft, 99),
    "a field": lambda batch, good: setattr(batch, "request_ids", ()),
}
for _name, _act in WRITES.items():
    HOSTILE[f"writes to {_name}"] = _act, RAISED

# NumPy's flag stops none of these; test_histories.py has more ways.
THROUGH: dict[str, Act] = {
    "torch": lambda batch, good: [torch.from_numpy(tokens).clamp_(max=9) for tokens in batch.token_ids],
    "ufunc.at": lambda batch, good: [np.add.at(tokens, -1, 5) for tokens in batch.token_ids],
    "the buffer's owner": lambda batch, good: [tokens.base.base.obj.fill(9) for tokens in batch.token_ids],
}
for _name, _act in THROUGH.items():
    HOSTILE[f"writes through {_name}"] = lambda batch, good, act=_act: (act(batch, good), good)[1], None


TO_ITS_PROCESS = {"fork": None, "Popen": None, "files": RAISED, "an exception in the drafting thread": RAISED}
for _name, _kind in TO_ITS_PROCESS.items():
    HOSTILE[f"system: {_name}"] = lambda batch, good, name=_name: (ACTS[name](), good)[1], _kind


@hostile("replaces the fields of its batch", None)
def _replaces(batch: DraftBatch, good: Draft) -> Any:
    """Bypasses the frozen dataclass, since the batch belongs to the proposer."""
    for name in DraftBatch.__slots__:
        object.__setattr__(batch, name, None)
    return good


@hostile("asks for more room than it has", NONSENSE)
def _more_room(batch: DraftBatch, good: Draft) -> Any:
    object.__setattr__(batch, "max_num_draft", np.full(len(good.num_draft), 99, np.int32))
    return replace(good, token_ids=np.zeros((len(good.num_draft), 99), np.int32), num_draft=good.num_draft + 90)


@hostile("turns itself into a target", NONSENSE)
def _target(batch: DraftBatch, good: Draft) -> Any:
    """Only with a target may tokens be tensors, and logits be."""
    object.__setattr__(batch, "target", replace)
    return replace(good, token_ids=torch.from_numpy(good.token_ids))


@hostile("writes to its draft later", None)
def _late(batch: DraftBatch, good: Draft) -> Any:
    def write() -> None:
        for _ in range(50):
            good.token_ids[...], good.num_draft[...] = 1 << 30, 99
            time.sleep(0.002)

    threading.Timer(0.1, write).start()  # late enough for a busy machine, too
    return good


@hostile("returns the batch's own arrays", None)
def _aliases(batch: DraftBatch, good: Draft) -> Any:
    tokens = np.zeros((batch.num_reqs, int(batch.max_num_draft.max())), np.int32)
    return replace(good, token_ids=tokens, num_draft=batch.max_num_draft)


@hostile("returns strides that go backwards", None)
def _backwards(batch: DraftBatch, good: Draft) -> Any:
    token_ids = np.asfortranarray(good.token_ids[::-1])[::-1]
    return replace(good, token_ids=token_ids, num_draft=np.repeat(good.num_draft, 3)[::3])


@hostile("sleeps", HANGS)
def _sleeps(batch: DraftBatch, good: Draft) -> Any:
    time.sleep(HANG_S)
    return good


@hostile("counts for ever", HANGS)
def _spins(batch: DraftBatch, good: Draft) -> Any:
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        pass
    return good


@hostile("raises a text that sleeps", HANGS)
def _slow_text(batch: DraftBatch, good: Draft) -> Any:
    raise SlowText


@hostile("recurses", RAISED)
def _recurses(batch: DraftBatch, good: Draft) -> Any:
    return _recurses(batch, good)


@hostile("draws from the global generators", None)
def _draws(batch: DraftBatch, good: Draft) -> Any:
    np.random.seed(0)
    np.random.rand(5)
    torch.manual_seed(0)
    random.random()
    return good


@hostile("is a generator", NONSENSE)
def _yields(batch: DraftBatch, good: Draft) -> Iterator[Any]:
    yield good


class HostileProposer:
    """Good for `start` steps, then hostile as `act` is at every step."""

    def __init__(self, act: Act, start: int = 0):
        self.act, self.start, self.step = act, start, 0

    def propose(self, batch: DraftBatch) -> Any:
        self.step += 1
        good = good_draft(batch)
        return good if self.step <= self.start else self.act(batch, good)

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Any) -> None: ...


def custom(options: dict[str, Any], context: Any) -> HostileProposer:
    """What a method `custom` names; a test may give it another `act` later."""
    return HostileProposer(HOSTILE[options["act"]][0], options.get("start", 3))
