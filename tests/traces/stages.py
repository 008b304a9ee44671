"""Recorded texts with what the target's exits say behind every token of them; a cascade can be played to them.

`tests/bench/record_stages.py` of commit 5d3e21a made the trace. What an exit drafts is a function of the tokens before
it, so that what it says behind a text that goes on as recorded, and behind drafts of its own, is known; elsewhere it
says anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Offer
from vllm_specplugins.target import Sampling, Target
from vllm_specplugins.tools.replay.data import Traffic

FILE = Path(__file__).parent / "stages.npz"
LAYERS = 1, 5  # after which there are exits, of 8
LOOP = 8  # a text that says so many tokens again loops


@dataclass(frozen=True, slots=True)
class Request:
    """A text, how much of it is prompt, and by length of the history what each exit drafts behind it."""

    text: list[int]
    num_prompt: int
    said: Sequence[Any]  # [num_layers, K] each, from the first token behind the prompt on

    def drafted(self, layer: int, length: int) -> list[int]:
        """What an exit drafts behind so many tokens; nothing where that was not recorded."""
        place = length - self.num_prompt - 1
        return self.said[place][layer] if 0 <= place < len(self.said) else []

    def next(self, layer: int, length: int, behind: Sequence[int]) -> int:
        """What an exit says behind so many tokens of the text and some others; -1 where that was not recorded."""
        right = 0
        for right in range(len(behind) + 1):
            drafted, rest = self.drafted(layer, length + right), list(behind[right:])
            if drafted[: len(rest)] == rest and len(drafted) > len(rest):
                return drafted[len(rest)]
            if right == len(behind) or self.text[length + right : length + right + 1] != [behind[right]]:
                return -1
        return -1


def loops_at(output: Sequence[int]) -> int:
    """Where an output begins to say LOOP tokens again, or its length."""
    seen = set()
    for end in range(LOOP, len(output) + 1):
        gram = tuple(output[end - LOOP : end])
        if gram in seen:
            return end - LOOP
        seen.add(gram)
    return len(output)


def load(path: Path = FILE) -> dict[tuple[str, float], list[Request]]:
    """Requests by kind and temperature."""
    held = np.load(path)
    found: dict[tuple[str, float], list[Request]] = {}
    tokens, said = held["tokens"].tolist(), held["said"].tolist()
    for kind, temperature, length, num_prompt in zip(
        *(held[name].tolist() for name in ("kinds", "temperatures", "lengths", "prompt_lengths")), strict=True
    ):
        text, tokens = tokens[:length], tokens[length:]
        own, said = said[: length - num_prompt], said[length - num_prompt :]
        found.setdefault((kind, temperature), []).append(Request(text, num_prompt, own))
    return found


def traffic_of(requests: Sequence[Request]) -> Traffic:
    traffic = Traffic()
    for request in requests:
        traffic.add(request.text[: request.num_prompt], request.text[request.num_prompt :])
    return traffic


class Layers:
    """The target's layers for the requests of a batch; `passes`: how many tokens each of their passes was fed."""

    def __init__(self, requests: Sequence[Request], lengths: Sequence[int]):
        self._rows = [(request, length, dict[int, int]()) for request, length in zip(requests, lengths, strict=True)]
        self.passes: list[int] = []

    def hidden_states(self, end_layer: int, token_ids: Any, positions: Any, normed: bool = True) -> Any:
        says = []
        fed, places = (part.reshape(len(self._rows), -1).tolist() for part in (token_ids, positions))
        for (request, length, behind), own_fed, own_places in zip(self._rows, fed, places, strict=True):
            for place, token in zip(own_places, own_fed, strict=True):
                behind[place] = token
                says.append(
                    request.next(
                        LAYERS.index(end_layer), length, [behind.get(at, -1) for at in range(length, place + 1)]
                    )
                )
        self.passes.append(len(says))
        return torch.tensor(says, dtype=torch.int32).clamp_(min=0).view(*token_ids.shape, 1)

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[:, 0]


class Played:
    """A cascade that is shown such layers; its requests are named by `tools/replay`.

    Args:
        proposer: the cascade.
        num_offered: tokens of the last exit that are offered at each step, as by a stage that is built into the engine.
        requests: by number, and then from the first one on again.
    """

    def __init__(self, proposer: Any, requests: Sequence[Request], num_offered: int = 0):
        self.proposer, self._requests, self._num_offered = proposer, requests, num_offered
        self.passes: list[int] = []  # of the last step: how many tokens each was fed

    def propose(self, batch: DraftBatch) -> Draft:
        requests = [self._requests[int(name.rpartition("-")[2]) % len(self._requests)] for name in batch.request_ids]
        lengths = [len(history) for history in batch.token_ids]
        layers = Layers(requests, lengths)
        last = torch.tensor([int(history[-1]) for history in batch.token_ids], dtype=torch.int32)
        num_reqs = len(requests)
        sampling = Sampling(torch.zeros(num_reqs), torch.zeros(num_reqs, dtype=torch.int64))
        target = Target(layers, last, torch.tensor(lengths), None, sampling)  # type: ignore[arg-type]
        offer = None
        if self._num_offered:
            rows = [
                request.drafted(1, length)[: self._num_offered]
                for request, length in zip(requests, lengths, strict=True)
            ]
            offer = Offer(Draft.whole(np.array([row or [0] * self._num_offered for row in rows], np.int32)), 0.0)
        draft: Draft = self.proposer.propose(replace(batch, target=target, offer=offer))
        self.passes = layers.passes + [num_reqs] * self._num_offered
        return draft

    def observe(self, feedback: Feedback) -> None:
        self.proposer.observe(feedback)

    def forget(self, request_ids: Sequence[str]) -> None:
        self.proposer.forget(request_ids)
