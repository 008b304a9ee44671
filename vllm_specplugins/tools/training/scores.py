"""Computes the tokens per step of a trained part's drafts, on text that the model writes after held-out prompts. Each
step of an engine begins after the tokens that the last step accepted. On text of another source, or if a step began at
each token, the acceptance would differ. The steps therefore walk over text that the model continues with verification's
noise of (seed, position): given that the model emits a token, a step continues with the probability that the draft's
token is accepted. N: drafts of a row, K: draft tokens, V: vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample
from vllm_specplugins.proposers.learning.distillation import Guesser, walk
from vllm_specplugins.tools.base_model import BaseModel, overlap

PROMPT_SHARE = 4  # 1 / share of the tokens that are the prompt
METHODS = ("greedy", "coupled", "probabilistic")  # draft_sample_method
NAMES = ("overlap", *METHODS)


@dataclass(frozen=True, slots=True)
class Text:
    """A row that the model generated from token `begin` on, at a temperature and with the noise of a seed."""

    row: list[int]
    begin: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of each of the K draft tokens after correct tokens, and of whole steps."""

    match: list[float]  # [K] share of greedy tokens that are the model's
    overlap: list[float]  # [K] mean sum of min(p, q), the share that is accepted at temperature 1 if "probabilistic"
    length: float  # mean tokens of a step at temperature 0, as an engine's acceptance length
    sampled_lengths: dict[str, float]  # at temperature 1, by draft_sample_method


@torch.no_grad()
def write_texts(
    base: BaseModel, rows: Sequence[Sequence[int]], temperature: float, begin: int = 0, end: int = 0
) -> list[Text]:
    """Returns the model's continuations of rows from token `begin` on (0: a quarter of the longest row; shorter rows
    are omitted), up to `end` tokens (0: the length of the longest row) or an end token."""
    longest = max(map(len, rows))
    begin, end = begin or max(1, longest // PROMPT_SHARE), end or longest
    prompts = torch.tensor([row[:begin] for row in rows if len(row) >= begin], device=base.model.device)
    seeds = torch.arange(len(prompts), device=prompts.device)
    sampling = Sampling(torch.full(seeds.shape, temperature, device=seeds.device), seeds)

    def choose(logits: torch.Tensor, position: int) -> torch.Tensor:
        return coupled_sample(logits, torch.full_like(seeds, position), sampling)

    texts = base.generate(prompts, end, choose)
    return [Text(row, begin, temperature, seed) for seed, row in enumerate(texts)]


@torch.no_grad()
def scores(
    base: BaseModel, greedy: Sequence[Text], sampled: Sequence[Text], guesser: Guesser, num_draft: int
) -> Scores:
    """Returns the scores of a part on texts at temperature 0 and at temperature 1."""
    figures = []
    for texts in (greedy, sampled):
        probs = [accept_probs(base, text, guesser, num_draft) for text in texts]
        figures.append({name: [torch.zeros(num_draft, 0), *(its[name] for its in probs)] for name in NAMES})
    cold, warm = figures
    match, shared = (torch.cat(probs, dim=1) for probs in (cold["greedy"], warm["overlap"]))
    right, accepted = ((probs.sum(1) / max(1, probs.shape[1])).tolist() for probs in (match, shared))
    lengths = {method: mean_length(warm[method]) for method in METHODS}
    return Scores(right, accepted, mean_length(cold["greedy"]), lengths)


def mean_length(probs: Sequence[torch.Tensor]) -> float:
    """Returns the mean acceptance length on texts, from the [K, N] acceptance probabilities of the draft tokens."""
    tokens, steps = map(sum, zip(*map(walk, probs), strict=True))
    return tokens / steps if steps else 1.0


def accept_probs(base: BaseModel, text: Text, guesser: Guesser, num_draft: int) -> dict[str, torch.Tensor]:
    """Returns the overlap, and by draft_sample_method the acceptance probability of each draft token, [K, N] each."""
    [states] = base.hidden_states([text.row])
    guesses, full = list(guesser(states, num_draft)), base.logits(states[-1])
    if len(guesses) < num_draft:  # a text of a few tokens
        return dict.fromkeys(NAMES, torch.zeros(num_draft, 0))
    # The newest token of the first step is the first generated token; the last draft ends with the text.
    first, end = text.begin - guesses[0].start, len(text.row) - 1 - guesses[-1].start
    figures: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
    for guess in guesses:
        logits, model = guess.logits[first:end], guess.of(full)[first:end]
        places = torch.arange(len(logits), device=logits.device) + guess.start + first + 1
        emitted = torch.tensor(text.row, device=logits.device)[places]
        sampling = Sampling(torch.full(places.shape, text.temperature, device=places.device), places * 0 + text.seed)
        q, p = (values.log_softmax(-1).gather(-1, emitted[:, None])[:, 0] for values in (logits, model))
        figures["overlap"].append(overlap(model, logits))
        figures["greedy"].append((logits.argmax(-1) == emitted).float())
        # Whether the draft's logits yield the token that the model drew with the same noise.
        figures["coupled"].append((coupled_sample(logits, places, sampling) == emitted).float())
        # min(1, q / p): of the emitted tokens, max(p - q, 0) were not drafted.
        figures["probabilistic"].append((q - p).exp().clamp(max=1.0))
    return {name: torch.stack(values).cpu() for name, values in figures.items()}
