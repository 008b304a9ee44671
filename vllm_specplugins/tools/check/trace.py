"""A recorded engine: what it served, and how a proposer's drafts would have fared.

Requests arrive, are preempted, come back and end as they did when tests/tools/record_trace.py of commit 5d3e21a looked
on. How far each gets in a step is up to the drafts: what the target emitted next is known, and a draft is accepted as
far as it agrees.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array
from vllm_specplugins.tools.replay.player import Player, feedback

NEWCOMER = "the-request-after-all-others"
SHIPPED = Path(__file__).with_name("trace.npz")


@dataclass(frozen=True, slots=True)
class Trace:
    """See the module.

    Args:
        histories: of each request its prompt and all that the target emitted.
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


def play(
    trace: Trace,
    propose: Callable[[DraftBatch, Feedback], Draft],
    forget: Callable[[Sequence[str]], None],
    advance: Callable[[], None] = lambda: None,
) -> None:
    """One run through a trace with a fault barrier's functions: all steps, and as many more as slow requests need."""
    player = Player(trace, trace.max_num_draft, trace.max_model_len, propose, forget)
    last = {number: step for step, (requests, _) in enumerate(trace.steps) for number in requests}
    over: set[int] = set()

    def forget_all(numbers: Sequence[int]) -> None:
        player.forget(numbers)
        over.update(filter(player.has_ended, numbers))

    for step in count():
        requests, forgotten = trace.steps[step] if step < len(trace.steps) else ([], [])
        advance()
        forget_all([number for number in forgotten if number not in over and last[number] >= step])
        # A request that the recorded drafts had brought further goes on until it is over.
        late = [number for number, end in last.items() if end < step]
        running = [number for number in dict.fromkeys([*requests, *late]) if number not in over]
        if running:
            player.step(running)
            forget_all(list(filter(player.has_ended, running)))
        elif step >= len(trace.steps):
            break
    # What is to be forgotten, a barrier tells a proposer before it next proposes.
    propose(replace(player.batch([0]), request_ids=[NEWCOMER]), feedback([NEWCOMER], [0], [0]))
