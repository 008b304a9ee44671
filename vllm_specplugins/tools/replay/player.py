"""Plays recorded texts to a proposer: how far each gets in a step is up to the drafts.

What the target emitted next is known, and a draft is accepted as far as it agrees. Who takes part in a step is the
caller's to decide: a recorded engine (check/trace.py) or one that is simulated (simulate.py).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array
from vllm_specplugins.request_options import draft_limit


class Fate(NamedTuple):
    """What became of a request in a step: draft tokens verified and accepted, tokens that it got; none at its first."""

    drafted: int
    accepted: int
    emitted: int


class Player:
    """See the module.

    Args:
        recorded: `histories`, `prompt_lengths` and `options` of requests, by number: of each its prompt and all that
            the target emitted, how much of that is prompt, its options.
        max_num_draft: K.
        max_model_len: most tokens that a request can have.
        propose: a fault barrier's.
        forget: a fault barrier's.
    """

    def __init__(
        self,
        recorded: Any,
        max_num_draft: int,
        max_model_len: int,
        propose: Callable[[DraftBatch, Feedback], Draft],
        forget: Callable[[Sequence[str]], None],
    ):
        self._histories: Sequence[Int32Array] = recorded.histories
        self._recorded, self._max_num_draft, self._max_model_len = recorded, max_num_draft, max_model_len
        self._propose, self._forget = propose, forget
        # What a request that arrives has: its prompt, and the token that its prefill gave.
        self.lengths: list[int] = [length + 1 for length in recorded.prompt_lengths]
        self._drafts: dict[int, list[int]] = {}  # to be verified
        self._has_arrived: set[int] = set()

    def num_drafted(self, number: int) -> int:
        """Tokens that wait to be verified."""
        return len(self._drafts.get(number, ()))

    def is_new(self, number: int) -> bool:
        """Whether the request had no step yet."""
        return number not in self._has_arrived

    def has_ended(self, number: int) -> bool:
        """Whether all that the target emitted is there."""
        return self.lengths[number] >= len(self._histories[number])

    def step(self, running: Sequence[int], step_ms: float | None = None) -> list[Fate]:
        """Verifies the last drafts of these requests, and has them drafted for.

        Args:
            step_ms: for the feedback.
        """
        fates = [self._verify(number) for number in running]
        self._has_arrived.update(running)
        batch = self.batch(running)
        drafted, accepted, _ = zip(*fates, strict=True)
        proposed = self._propose(batch, feedback(batch.request_ids, drafted, accepted, step_ms))
        for number, tokens, count in zip(running, proposed.token_ids, proposed.num_draft, strict=True):
            self._drafts[number] = tokens[:count].tolist()
        return fates

    def forget(self, numbers: Iterable[int]) -> None:
        """These requests are over, or preempted: their drafts are lost."""
        for number in numbers:
            self._drafts.pop(number, None)
            self._forget([name_of(number)])

    def batch(self, running: Sequence[int]) -> DraftBatch:
        """What the proposer is shown of these requests."""
        recorded, lengths = self._recorded, self.lengths
        limits = [
            draft_limit(recorded.options[number], lengths[number], self._max_num_draft, self._max_model_len)
            for number in running
        ]
        return DraftBatch(
            request_ids=[name_of(number) for number in running],
            token_ids=[self._histories[number][: lengths[number]] for number in running],
            max_num_draft=np.array(limits, np.int32),
            options=[recorded.options[number] for number in running],
        )

    def _verify(self, number: int) -> Fate:
        """How much of a draft is accepted; the target emits one token more."""
        draft = self._drafts.pop(number, [])
        if self.is_new(number):
            return Fate(0, 0, 0)
        history, length = self._histories[number], self.lengths[number]
        truth = history[length : length + len(draft)]
        accepted = int(np.cumprod(np.equal(draft[: len(truth)], truth)).sum())
        self.lengths[number] = min(length + accepted + 1, len(history))
        return Fate(len(draft), accepted, self.lengths[number] - length)


def name_of(number: int) -> str:
    return f"request-{number}"


def number_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def feedback(
    request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int], step_ms: float | None = None
) -> Feedback:
    """What a proposer is told of a step."""
    return Feedback(request_ids, np.array(drafted, np.int32), np.array(accepted, np.int32), step_ms)
