"""Tokens per step that a trained part's drafts bring, on text that the model writes after held-out prompts.

What an engine measures is a walk: a step begins after what the last one accepted. On other text than the model's own,
or with each place counted once, as if every token began a step, drafts are right more or less often than they will be.
So the model goes on with each beginning here, with the noise of (seed, position) that verification draws with, and the
walk is taken over that text: the chance of each token to be accepted, given that the model says it, is that of a step
to end there. N: drafts of a row, K: draft tokens, V: vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample
from vllm_specplugins.tools.base_model import BaseModel, overlap
from vllm_specplugins.tools.training.parts import Guess, Part

PROMPT_SHARE = 4  # one token of so many is the prompt's
DRAWN = ("greedy", "coupled", "probabilistic")  # draft_sample_method


@dataclass(frozen=True, slots=True)
class Text:
    """A row that the model wrote from token `begin` on, at a temperature, with the noise of a seed."""

    row: list[int]
    begin: int
    temperature: float
    seed: int

    def sampling(self, count: int, device: torch.device) -> Sampling:
        """Of so many of its tokens."""
        heat = torch.full((count,), self.temperature, device=device)
        return Sampling(heat, torch.full((count,), self.seed, device=device))


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
def own_texts(
    base: BaseModel,
    rows: Sequence[Sequence[int]],
    temperature: float,
    advance: Callable[[int, int], None] = lambda done, all: None,
) -> list[Text]:
    """What the model says after the first quarter of rows, up to the longest one's length or to its own end.

    Args:
        advance: called for each token of a row with how many there are, and how many there will be at most.
    """
    longest = max(map(len, rows))
    begin = max(1, longest // PROMPT_SHARE)
    prompts = torch.tensor([row[:begin] for row in rows if len(row) >= begin], device=base.model.device)
    seeds = torch.arange(len(prompts), device=prompts.device)
    sampling = Sampling(torch.full(seeds.shape, temperature, device=seeds.device), seeds)

    def choose(logits: torch.Tensor, place: int) -> torch.Tensor:
        advance(place + 1 - begin, longest - begin)
        return coupled_sample(logits, torch.full_like(seeds, place), sampling)

    texts = base.go_on(prompts, longest, choose)
    return [Text(row, begin, temperature, seed) for seed, row in enumerate(texts)]


@torch.no_grad()
def scores(
    base: BaseModel,
    greedy: Sequence[Text],
    sampled: Sequence[Text],
    part: Part,
    num_draft: int,
    advance: Callable[[], None] = lambda: None,
) -> Scores:
    """How a part does on texts of temperature 0 and of temperature 1; `advance` is called after each text."""
    cold, warm = (_Tally(num_draft, methods) for methods in (DRAWN[:1], DRAWN))
    for tally, texts in ((cold, greedy), (warm, sampled)):
        for text in texts:
            [states] = base.hidden_states([text.row])
            tally.add(text, list(part.guesses(base, states, num_draft)), base.logits(states[-1]))
            advance()
    lengths = warm.lengths()
    return Scores(cold.means(cold.match), warm.means(warm.overlap), cold.lengths()["greedy"], lengths)


class _Tally:
    """Sums over texts."""

    def __init__(self, num_draft: int, methods: Sequence[str]):
        self.match, self.overlap = torch.zeros(2, num_draft)
        self._num_drafts = 0
        self._walked = {method: (0.0, 0.0) for method in methods}  # tokens, steps

    def add(self, text: Text, guesses: Sequence[Guess], full: torch.Tensor) -> None:
        """A text, a part's guesses in it, and what the model says in it, [T, V]."""
        if len(guesses) < len(self.match):
            return  # a text of a few tokens
        # The first step's newest token is the first one that the model wrote; in the last ones a draft would end behind
        # the text.
        first, end = text.begin - guesses[0].start, len(text.row) - 1 - guesses[-1].start
        chances: dict[str, list[torch.Tensor]] = {method: [] for method in self._walked}
        for place, guess in enumerate(guesses):
            logits, model = guess.logits[first:end], guess.of(full)[first:end]
            begin = guess.start + first + 1
            said = torch.tensor(text.row[begin : begin + len(logits)], device=logits.device)
            match = logits.argmax(-1) == said
            self.match[place] += match.sum().cpu()
            self.overlap[place] += overlap(model, logits).sum().cpu()
            for method, found in chances.items():
                found.append(
                    match.float() if method == "greedy" else _CHANCES[method](text, begin, said, logits, model)
                )
        self._num_drafts += max(0, end - first)
        for method, found in chances.items():
            tokens, steps = walk(torch.stack(found))
            self._walked[method] = self._walked[method][0] + tokens, self._walked[method][1] + steps

    def means(self, sums: torch.Tensor) -> list[float]:
        """[K] by draft."""
        shares: list[float] = (sums / max(1, self._num_drafts)).tolist()
        return shares

    def lengths(self) -> dict[str, float]:
        """Tokens by step."""
        return {method: tokens / steps if steps else 1.0 for method, (tokens, steps) in self._walked.items()}


def walk(
    chances: torch.Tensor,  # [K, N] that each draft token is accepted, if those before it are
) -> tuple[float, float]:
    """Expected tokens and steps of an engine that begins with the first draft, and then after what it has emitted.

    >>> walk(torch.tensor([[1.0, 0.0, 1.0, 0.0]]))  # two tokens, two tokens
    (4.0, 2.0)
    """
    kept = chances.double().cumprod(0)
    accepted = torch.cat((torch.ones_like(kept[:1]), kept))
    ends = (accepted - torch.cat((kept, torch.zeros_like(kept[:1])))).T.tolist()  # [N, K + 1] accepted tokens
    emitted = accepted.sum(0).tolist()
    begun = [1.0] + [0.0] * (len(ends) + len(chances))  # chance that a step begins there
    for place, own in enumerate(ends):
        for count, chance in enumerate(own):
            begun[place + 1 + count] += begun[place] * chance
    return sum(map(float.__mul__, begun, emitted)), sum(begun[: len(ends)])


def _coupled(text: Text, begin: int, said: torch.Tensor, logits: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """[N] whether the drafts' logits win the race that the text's tokens have won."""
    places = torch.arange(begin, begin + len(said), device=said.device)
    return (coupled_sample(logits, places, text.sampling(len(said), said.device)) == said).float()


def _probabilistic(
    text: Text, begin: int, said: torch.Tensor, logits: torch.Tensor, model: torch.Tensor
) -> torch.Tensor:
    """[N] min(1, q / p) of the text's tokens: of what is emitted, max(p - q, 0) was not drafted."""
    q, p = (found.log_softmax(-1).gather(-1, said[:, None])[:, 0] for found in (logits, model))
    return (q - p).exp().clamp(max=1.0)


_CHANCES = {"coupled": _coupled, "probabilistic": _probabilistic}
