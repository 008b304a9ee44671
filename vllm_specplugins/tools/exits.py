"""Which exits of a model are worth an engine, for `calibrate`: from the model's own outputs, one pass for each.

An exit is asked, token by token, whether it would have drafted what the model did. Drafts are only verified where all
earlier ones of the same step were right, so these bits tell exactly how many are accepted. What they cost is guessed: a
draft token takes its share of the layers of a step, and verification takes nothing. K: num_draft.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_specplugins.tools.base_model import BaseModel, overlap
from vllm_specplugins.tools.training.scores import walk

Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ExitRow:
    """How an exit does on the model's own outputs.

    Args:
        match_rate: share of the tokens that it would have drafted at temperature 0.
        overlap: mean sum of min(p, q): share of its samples that is accepted at temperature 1.
        num_draft: K with which it is guessed to be fastest.
        tokens_per_step: that K emits.
        guess: how many times as fast as no speculation.
    """

    exit_layer: int
    match_rate: float
    overlap: float
    num_draft: int
    tokens_per_step: float
    guess: float

    @property
    def name(self) -> str:
        return f"exit {self.exit_layer}"

    def speculative_config(self) -> dict[str, Any]:
        """The value for vLLM's `--speculative-config`."""
        return {"method": "early_exit", "exit_layer": self.exit_layer, "num_speculative_tokens": self.num_draft}


def exit_rows(
    base: BaseModel,
    layers: Sequence[int],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    max_draft: int,
) -> Iterator[ExitRow]:
    """A row for each exit, with the best K up to max_draft."""
    for layer, (match, shared) in zip(layers, agreements(base, layers, prompts, outputs), strict=True):
        tokens = {k: tokens_per_step(match, k) for k in range(1, max_draft + 1)}
        gains = {k: emitted / (1 + k * layer / base.num_layers) for k, emitted in tokens.items()}
        best = max(gains, key=lambda k: gains[k])
        rate = sum(int(bits.sum()) for bits in match) / sum(map(len, match))
        yield ExitRow(layer, rate, shared, best, tokens[best], gains[best])


@torch.no_grad()
def agreements(
    base: BaseModel, layers: Sequence[int], prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[tuple[list[Bits], float]]:
    """Of each exit: for each output, [num_tokens - 1] whether its greedy token is the output's; and the mean overlap.

    The first token of an output comes from the prompt and is never drafted.
    """
    found: list[tuple[list[Bits], list[torch.Tensor]]] = [([], []) for _ in layers]
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = torch.tensor(output[1:], device=base.model.device)
        [states] = base.hidden_states([[*prompt, *output[:-1]]])
        states = [state[len(prompt) :] for state in states]
        full = base.logits(states[-1])
        for layer, (match, overlaps) in zip(layers, found, strict=True):
            logits = base.logits(base.model.base_model.norm(states[layer]))
            match.append((logits.argmax(-1) == wanted).cpu().numpy())
            overlaps.append(overlap(full, logits).cpu())
    return [(match, torch.cat(overlaps).mean().item()) for match, overlaps in found]


def tokens_per_step(match: Sequence[Bits], num_draft: int) -> float:
    """Mean tokens that a step emits, replayed over outputs; nan if no output is longer than K.

    A step whose draft would pass the end of what is known is not counted.

    >>> tokens_per_step([np.array([True, True, False, True, False, True])], 2)
    2.5
    """
    drafts = [np.lib.stride_tricks.sliding_window_view(bits, num_draft) for bits in match if len(bits) >= num_draft]
    walks = [walk(torch.from_numpy(own.T.astype(float))) for own in drafts]
    return sum(tokens for tokens, _ in walks) / sum(steps for _, steps in walks) if walks else float("nan")
