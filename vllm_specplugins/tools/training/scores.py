"""How often a part's drafts are right, on text that it was not trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_specplugins.tools.base_model import BaseModel, overlap
from vllm_specplugins.tools.training.parts import Part


@dataclass(frozen=True, slots=True)
class Scores:
    """Over all drafts of held-out rows, for each of K draft tokens, if those before it are the text's.

    Args:
        match: [K] share of tokens that are the model's own, greedily.
        overlap: [K] mean sum of min(p, q), the share that is accepted at temperature 1.
        length: mean tokens of a step at temperature 0, the model's own included: the first wrong token ends a draft.
        sampled_length: that at temperature 1.
    """

    match: list[float]
    overlap: list[float]
    length: float
    sampled_length: float


@torch.no_grad()
def scores(base: BaseModel, rows: Sequence[Sequence[int]], part: Part, num_draft: int) -> Scores:
    """How well a part agrees with the full model."""
    shares, kept, num_drafts = torch.zeros(2, num_draft), torch.zeros(2), torch.zeros(num_draft)
    for row in rows:
        [states] = base.hidden_states([row])
        full = base.logits(states[-1])
        chain = torch.ones(2, len(row), device=full.device)
        for place, guess in enumerate(part.guesses(base, states, num_draft)):
            said = guess.of(full)
            match = (guess.logits.argmax(-1) == said.argmax(-1)).float()
            right = torch.stack((match, overlap(said, guess.logits)))
            shares[:, place] += right.sum(1).cpu()
            num_drafts[place] += len(match)
            chain = chain[:, : len(match)] * right
            # A row's last drafts are shorter: theirs would be missing in the deeper places.
            kept += (chain.mean(1) * len(row)).cpu()
    means = (shares / num_drafts.clamp_min(1)).tolist()
    length, sampled = (1 + kept / sum(map(len, rows))).tolist()
    return Scores(means[0], means[1], length, sampled)
