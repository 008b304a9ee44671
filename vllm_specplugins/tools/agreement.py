"""How often an exit would have drafted what the model itself said, for `calibrate`: no engine, one pass a text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_specplugins.engine.measure.engine import Served
from vllm_specplugins.tools.base_model import BaseModel, Exit, overlap
from vllm_specplugins.tools.speedup import Bits


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an exit does on the model's own outputs.

    Args:
        match: for each output, [num_tokens] whether the exit's greedy token is the output's.
        overlap: mean sum of min(p, q).
    """

    match: list[Bits]
    overlap: float

    @property
    def match_rate(self) -> float:
        return sum(int(bits.sum()) for bits in self.match) / sum(map(len, self.match))


def agreements(
    base: BaseModel, exits: Sequence[Exit], prompts: Sequence[Sequence[int]], plain: Sequence[Served]
) -> list[Agreement]:
    """Asks each exit for every token of the outputs but the first, given all tokens before it."""
    match: list[list[Bits]] = [[] for _ in exits]
    overlaps: list[list[torch.Tensor]] = [[] for _ in exits]
    for prompt, served in zip(prompts, plain, strict=True):
        # The first token of an output comes from the prompt and is never drafted.
        row, start = [*prompt, *served.token_ids[:-1]], len(prompt)
        wanted = torch.tensor(served.token_ids[1:], device=base.model.device)
        [states] = base.hidden_states([row])
        states = [state[start:] for state in states]
        full = base.logits(states[-1])
        for place, bits, shares in zip(exits, match, overlaps, strict=True):
            logits = place.logits(base, states)
            bits.append((logits.argmax(-1) == wanted).cpu().numpy())
            shares.append(overlap(full, logits).cpu())
    return [Agreement(bits, torch.cat(shares).mean().item()) for bits, shares in zip(match, overlaps, strict=True)]
