"""Tokens per step that a trained part's drafts bring, on text that the model writes after held-out prompts.

What an engine measures is a walk: a step begins after what the last one accepted. On other text than the model's own,
or with each place counted once, as if every token began a step, drafts are right more or less often than they will be.
So the model goes on with each beginning here, with the noise of (seed, position) that verification draws with, and the
walk is taken over that text: the probability that a token is accepted, given that the model emits it, is that of a step
to go on there. N: drafts of a row, K: draft tokens, V: vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample
from vllm_specplugins.proposers.heads.distillation import Guesser, walk
from vllm_specplugins.tools.base_model import BaseModel, overlap

PROMPT_SHARE = 4  # one token of so many is the prompt's
DRAWN = ("greedy", "coupled", "probabilistic")  # draft_sample_method


@dataclass(frozen=True, slots=True)
class Text:
    """A row that the model wrote from token `begin` on, at a temperature, with the noise of a seed."""

    row: list[int]
    begin: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each of K draft tokens, those before it being the text's; and of whole steps.

    Args:
        match: [K] share of tokens that are the model's own, greedily.
        overlap: [K] mean sum of min(p, q), the share that is accepted at temperature 1 if drafts are "probabilistic".
        length: mean tokens of a step at temperature 0, the model's own included: an engine's acceptance length.
        sampled_lengths: at temperature 1, by draft_sample_method.
    """

    match: list[float]
    overlap: list[float]
    length: float
    sampled_lengths: dict[str, float]


@torch.no_grad()
def own_texts(base: BaseModel, rows: Sequence[Sequence[int]], temperature: float) -> list[Text]:
    """What the model writes after the first quarter of rows, up to the longest one's length or to its own end."""
    longest = max(map(len, rows))
    begin = max(1, longest // PROMPT_SHARE)
    prompts = torch.tensor([row[:begin] for row in rows if len(row) >= begin], device=base.model.device)
    seeds = torch.arange(len(prompts), device=prompts.device)
    sampling = Sampling(torch.full(seeds.shape, temperature, device=seeds.device), seeds)

    def choose(logits: torch.Tensor, place: int) -> torch.Tensor:
        return coupled_sample(logits, torch.full_like(seeds, place), sampling)

    texts = base.go_on(prompts, longest, choose)
    return [Text(row, begin, temperature, seed) for seed, row in enumerate(texts)]


@torch.no_grad()
def scores(
    base: BaseModel, greedy: Sequence[Text], sampled: Sequence[Text], guesser: Guesser, num_draft: int
) -> Scores:
    """How a part does on texts of temperature 0 and of temperature 1."""
    nothing = torch.zeros(num_draft, 0)
    found = []
    for texts in (greedy, sampled):
        figures: dict[str, list[torch.Tensor]] = {name: [nothing] for name in ("overlap", *DRAWN)}
        for text in texts:
            for name, own in _of_text(base, text, guesser, num_draft).items():
                figures[name].append(own.cpu())
        found.append(figures)
    cold, warm = found
    match, shared = (torch.cat(own, dim=1) for own in (cold["greedy"], warm["overlap"]))
    right, kept = ((own.sum(1) / max(1, own.shape[1])).tolist() for own in (match, shared))
    return Scores(right, kept, _length(cold["greedy"]), {method: _length(warm[method]) for method in DRAWN})


def _of_text(base: BaseModel, text: Text, guesser: Guesser, num_draft: int) -> dict[str, torch.Tensor]:
    """[K, N] each: the overlap, and by draft_sample_method the probability that a draft token is accepted."""
    [states] = base.hidden_states([text.row])
    guesses, full = list(guesser(states, num_draft)), base.logits(states[-1])
    if len(guesses) < num_draft:
        return {}  # a text of a few tokens
    # The first step's newest token is the first one that the model wrote; the last draft ends with the text.
    first, end = text.begin - guesses[0].start, len(text.row) - 1 - guesses[-1].start
    figures: dict[str, list[torch.Tensor]] = {name: [] for name in ("overlap", *DRAWN)}
    for guess in guesses:
        logits, model = guess.logits[first:end], guess.of(full)[first:end]
        places = torch.arange(len(logits), device=logits.device) + guess.start + first + 1
        emitted = torch.tensor(text.row, device=logits.device)[places]
        sampling = Sampling(torch.full(places.shape, text.temperature, device=places.device), places * 0 + text.seed)
        q, p = (own.log_softmax(-1).gather(-1, emitted[:, None])[:, 0] for own in (logits, model))
        figures["overlap"].append(overlap(model, logits))
        figures["greedy"].append((logits.argmax(-1) == emitted).float())
        # Whether the drafts' logits win the race that the text's tokens have won.
        figures["coupled"].append((coupled_sample(logits, places, sampling) == emitted).float())
        # min(1, q / p): of what is emitted, max(p - q, 0) was not drafted.
        figures["probabilistic"].append((q - p).exp().clamp(max=1.0))
    return {name: torch.stack(own) for name, own in figures.items()}


def _length(probs: Sequence[torch.Tensor]) -> float:
    """Tokens by step, of texts."""
    tokens, steps = map(sum, zip(*map(walk, probs), strict=True))
    return tokens / steps if steps else 1.0
