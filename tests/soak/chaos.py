"""A proposer to be named by `--speculative-config`, which runs in the server's engine and turns on it at random steps.

Its misdeeds are those of tests/isolation/hostile.py, and some of its own. Each is noted in a journal before it is done;
by seed they are dealt like cards, so that all have their turn, over restarts, too. While the file `calm` is there, it
behaves, and drafts what followed the last token before.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hostile import HANG_S, HOSTILE

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext


def throw(error: BaseException) -> None:
    raise error


# What `observe` and `forget` do once.
MEANWHILE: dict[str, Callable[[], Any]] = {
    "raises in observe or forget": lambda: throw(RuntimeError("planted")),
    "exits in observe or forget": lambda: sys.exit(1),
    "sleeps in observe or forget": lambda: time.sleep(HANG_S),
}


class Chaos:
    """See the module. Options: seed; rate, the share of the steps that turn out badly; folder, for journal and calm;
    index and count: it is this one of so many, each with misdeeds of its own.
    """

    def __init__(self, options: dict[str, Any], context: ProposerContext):
        index, self._rate, folder = options["index"], options["rate"], Path(options["folder"])
        self._journal, self._calm = folder / f"journal.{index}", folder / "calm"
        self._deck = sorted([*HOSTILE, *MEANWHILE])[index :: options["count"]]
        random.Random(options["seed"]).shuffle(self._deck)
        self._num_dealt = len(self._journal.read_text().splitlines()) if self._journal.exists() else 0
        self._rng = random.Random(f"{options['seed']} {self._num_dealt}")
        self._meanwhile: Callable[[], Any] | None = None

    def propose(self, batch: DraftBatch) -> Any:
        good = repeated(batch)
        if not batch.num_reqs or self._rng.random() >= self._rate or self._calm.exists():
            return good
        name = self._deck[self._num_dealt % len(self._deck)]
        self._num_dealt += 1
        with self._journal.open("a") as journal:
            journal.write(name + "\n")
        if name in MEANWHILE:
            self._meanwhile = MEANWHILE[name]
            return good
        return HOSTILE[name][0](batch, good)

    def observe(self, feedback: Feedback) -> None:
        self._news()

    def forget(self, request_ids: Sequence[str]) -> None:
        self._news()

    def _news(self) -> None:
        misdeed, self._meanwhile = self._meanwhile, None
        if misdeed is not None:
            misdeed()


def repeated(batch: DraftBatch) -> Draft:
    """The two tokens that followed the last token where it last stood; the last token twice where it did not."""
    token_ids = np.zeros((batch.num_reqs, 2), np.int32)
    for row, history in enumerate(batch.token_ids):
        found = np.flatnonzero(history[:-2] == history[-1])
        token_ids[row] = history[found[-1] + 1 : found[-1] + 3] if len(found) else history[-1]
    return Draft(token_ids, np.minimum(batch.max_num_draft, 2).astype(np.int32))
