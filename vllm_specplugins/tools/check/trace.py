"""A recorded engine: what it served, and how a proposer's drafts would have fared.

Requests arrive, are preempted, come back and end as they did when tests/tools/record_trace.py looked on. How far each
gets in a step is up to the drafts: what the target said next is known, and a draft is accepted as far as it says so.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array
from vllm_specplugins.tools.replay.player import Player, feedback

NEWCOMER = "the-request-behind-all-others"
SHIPPED = Path(__file__).with_name("trace.npz")


@dataclass(frozen=True, slots=True)
class Trace:
    """See the module.

    Args:
        histories: of each request its prompt and all that the target said.
        prompt_lengths: of each request.
        steps: (requests that sampled a token, requests that were forgotten before), by number.
        options: of each request.
    """

    histories: list[Int32Array]
    prompt_lengths: list[int]
    steps: list[tuple[list[int], list[int]]]
    options: list[Mapping[str, Any]]
    vocab_size: int
    max_model_len: int
    max_num_draft: int


def load(path: Path = SHIPPED) -> Trace:
    """The trace in a file."""
    with np.load(path) as file:
        ends = np.cumsum(file["lengths"])
        histories = np.split(file["tokens"].astype(np.int32), ends[:-1])
        batches = np.split(file["batches"].astype(int), np.cumsum(file["batch_sizes"].astype(int))[:-1])
        gone = np.split(file["gone"].astype(int), np.cumsum(file["num_gone"].astype(int))[:-1])
        vocab_size, max_model_len, max_num_draft, _ = file["limits"].tolist()
        return Trace(
            histories=histories,
            prompt_lengths=file["prompt_lengths"].tolist(),
            steps=[(batch.tolist(), forgotten.tolist()) for batch, forgotten in zip(batches, gone, strict=True)],
            options=json.loads(str(file["options"])),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_draft=max_num_draft,
        )


class Replay:
    """One run through a trace.

    Args:
        trace: what to run through.
        propose: a fault barrier's.
        forget: a fault barrier's.
    """

    def __init__(
        self,
        trace: Trace,
        propose: Callable[[DraftBatch, Feedback], Draft],
        forget: Callable[[Sequence[str]], None],
    ):
        self._trace, self._propose = trace, propose
        self._player = Player(trace, trace.max_num_draft, trace.max_model_len, propose, forget)
        self._is_over: set[int] = set()

    def run(self, advance: Callable[[], None] = lambda: None) -> None:
        """All steps, and as many more as slow requests need."""
        for requests, forgotten in self._steps():
            advance()
            self._forget_all([number for number in forgotten if number not in self._is_over])
            running = [number for number in requests if number not in self._is_over]
            if running:
                self._player.step(running)
                self._forget_all([number for number in running if self._player.is_said(number)])
        # What is to be forgotten, a barrier tells a proposer before it next proposes.
        newcomer = replace(self._player.batch([0]), request_ids=[NEWCOMER])
        self._propose(newcomer, feedback([NEWCOMER], [0], [0]))

    def _steps(self) -> Iterator[tuple[list[int], list[int]]]:
        last = {number: step for step, (requests, _) in enumerate(self._trace.steps) for number in requests}
        for step, (requests, forgotten) in enumerate(self._trace.steps):
            # A request that the recorded drafts had brought further goes on until it is over.
            late = [number for number, end in last.items() if end < step and number not in self._is_over]
            yield (
                list(dict.fromkeys([*requests, *late])),
                [number for number in forgotten if last[number] >= step],
            )
        while late := [number for number in last if number not in self._is_over]:
            yield late, []

    def _forget_all(self, numbers: Sequence[int]) -> None:
        self._player.forget(numbers)
        self._is_over.update(number for number in numbers if self._player.is_said(number))
