"""Speculation that a replay plays beside ours: vLLM's n-gram, a drafter, a fixed rule for both, and an oracle.

A log holds, by position of an output, how many tokens of a drafter's draft the target would have accepted. The draft is
then that many tokens of the output, followed by wrong ones. Nothing here has a gate or learns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError, PromptLookupConfig, brief
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, Proposer, ProposerContext
from vllm_specplugins.kernels.compiled import compiled
from vllm_specplugins.methods import BUILT_IN
from vllm_specplugins.proposers.prompt_lookup import PromptLookup
from vllm_specplugins.structures.arrays import NO_COUNTS, NO_TOKENS, DraftArrays, Ints, of_stage
from vllm_specplugins.tools.picker import Config
from vllm_specplugins.tools.replay.data import Traffic
from vllm_specplugins.tools.replay.player import number_of

NGRAM_GPU_LENGTHS = 5, 15, 31
NGRAM_GPU = 2, 8  # tokens of vLLM's shortest and longest n-gram, as `bench` serves it
LONG_MATCH = 4, 64  # tokens of a match that overrides a drafter in TensorRT-LLM, and of the longest that is counted
LOOKUP_LENGTH = 31  # K of a lookup by default
FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter that logs hold the accepted lengths of.

    Args:
        ms: time of all its passes for a step's drafts.
        token_ms: time that each token adds which it drafts, those of all requests counted.
        num_draft: K.
    """

    name: str
    ms: float
    token_ms: float
    num_draft: int

    @classmethod
    def parse(cls, text: str) -> "Drafter":
        """The drafter that NAME:MS[:MS_A_TOKEN]:K stands for.

        Raises:
            ConfigError: the text has another form, or a number is out of range.

        >>> Drafter.parse("eagle3:2.14:5")
        Drafter(name='eagle3', ms=2.14, token_ms=0.0, num_draft=5)
        """
        name, *times, num_draft = text.split(":") if text.count(":") in (2, 3) else ("", "", "")
        try:
            ms, token_ms, most = float(times[0]), float(times[-1]) if times[1:] else 0.0, int(num_draft)
            if name and 0 <= ms < np.inf and 0 <= token_ms < np.inf and 1 <= most <= MAX_NUM_SPECULATIVE_TOKENS:
                return cls(name, ms, token_ms, most)
        except ValueError:
            pass
        allowed = f"NAME:MS[:MS_A_TOKEN]:K, times of 0 or more and K from 1 to {MAX_NUM_SPECULATIVE_TOKENS}"
        raise ConfigError(f"--drafter must be {allowed}, not {brief(text)}.")

    @property
    def cascade(self) -> Config:
        """The configuration of a lookup beside it."""
        method = self.name if self.name in BUILT_IN else "draft_model"
        stages = [{"method": "prompt_lookup"}, {"method": method, "model": "MODEL"}]
        stages[1] |= {"num_speculative_tokens": self.num_draft}  # type: ignore[dict-item]
        return {"method": "cascade", "stages": stages, "num_speculative_tokens": LOOKUP_LENGTH}

    def step_ms(self, num_reqs: int, is_needed: bool) -> float:
        """The time of a step; without need of its drafts it takes in the newest tokens, which is one of K passes."""
        return (self.ms + self.token_ms * self.num_draft * num_reqs) / (1 if is_needed else self.num_draft)

    def draft(self, traffic: Traffic, request_ids: Sequence[str], texts: Sequence[Int32Array]) -> Int32Array:
        """[num_reqs, K]: after each text the tokens that the target would accept, and then wrong ones."""
        token_ids = np.full((len(texts), self.num_draft), traffic.vocab_size - 1, np.int32)
        for row, number, text in zip(token_ids, map(number_of, request_ids), texts, strict=True):
            lengths, place = traffic.accepted[number][self.name], len(text) - traffic.prompt_lengths[number]
            count = min(self.num_draft, int(lengths[place])) if place < len(lengths) else 0
            right = traffic.histories[number][len(text) : len(text) + count]
            row[: len(right)] = right
        return token_ids


@dataclass(frozen=True, slots=True, eq=False)
class Rival:
    """A method that is played beside ours; its members are those of a Candidate."""

    method: str
    num_draft: int
    build: Callable[[ProposerContext], Proposer]
    drafter: Drafter | None = None
    policy: str = FIXED
    waits: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        """The method, its policy and K, which its rows name."""
        return self.method, self.policy, self.num_draft


def rivals(drafter: Drafter | None) -> list[Rival]:
    """vLLM's n-gram with each K; with a drafter that one alone, and TensorRT-LLM's rule for both."""
    own = [Rival("ngram_gpu", num_draft, partial(Fixed, *NGRAM_GPU)) for num_draft in NGRAM_GPU_LENGTHS]
    if drafter is None:
        return own
    fixed = {drafter.name: partial(Fixed, 0, 0), "match of 4 first": partial(Fixed, *LONG_MATCH)}
    return own + [Rival(name, drafter.num_draft, build, drafter) for name, build in fixed.items()]


def oracle(drafter: Drafter, traffic: Traffic, tokens_per_ms: float) -> Rival:
    """The oracle at a rate that is known by playing it before."""
    build = partial(Oracle, drafter, traffic, tokens_per_ms)
    return Rival("oracle of both", LOOKUP_LENGTH, build, drafter)


class Fixed(Proposer):
    """Drafts K tokens in every step: those that followed the latest of the longest matches of so many tokens, else the
    drafter's. It is vLLM's `ngram_gpu` on Model Runner V2, or, with a drafter that always runs, TensorRT-LLM's rule."""

    def __init__(self, min_ngram: int, max_ngram: int, context: ProposerContext):
        self._ngrams, self._width = (min_ngram, max_ngram), context.max_num_draft

    def propose(self, batch: DraftBatch) -> Draft:
        token_ids = np.zeros((batch.num_reqs, self._width), np.int32)
        if batch.offer is not None:
            token_ids[:] = batch.offer.token_ids
        for row, tokens in zip(token_ids, batch.token_ids, strict=True):
            if self._ngrams[1] and (end := match_end(tokens, *self._ngrams)):
                copied = tokens[end : end + self._width]
                row[: len(copied)], row[len(copied) :] = copied, tokens[-1]
        return Draft(token_ids, batch.max_num_draft)


@compiled(types.int64(types.Array(types.int32, 1, "C", readonly=True), types.int64, types.int64))
def match_end(tokens: Any, min_ngram: int, max_ngram: int) -> int:
    """The place after the latest of the longest earlier matches of the newest tokens; 0 without one.

    >>> match_end(np.frombuffer(np.array([1, 2, 9, 1, 2, 8, 1, 2], np.int32).tobytes(), np.int32), 2, 8)
    5
    """
    last, best, found = len(tokens) - 1, min_ngram - 1, 0
    for end in range(last, 0, -1):
        length = 0
        while length < min(max_ngram, end) and tokens[end - 1 - length] == tokens[last - length]:
            length += 1
        if length > best:
            best, found = length, end
        if best == max_ngram:
            break
    return found


class Oracle(Proposer):
    """Drafts as many tokens as will be accepted: a lookup's, or the drafter's and those that a lookup continues them
    with. The drafter runs where its tokens bring more than the engine emits in its time.

    Args:
        tokens_per_ms: the rate of the engine.
    """

    def __init__(self, drafter: Drafter, traffic: Traffic, tokens_per_ms: float, context: ProposerContext):
        self._drafter, self._traffic, self._rate = drafter, traffic, tokens_per_ms
        self._lookup, self._width = PromptLookup(PromptLookupConfig(), context), context.max_num_draft
        self.asked = False  # whether the drafter runs in this step

    def propose(self, batch: DraftBatch) -> Draft:
        assert batch.offer is not None
        most, truth = batch.max_num_draft.astype(np.int64), np.full((batch.num_reqs, self._width), -1, np.int32)
        for row, name, text in zip(truth, batch.request_ids, batch.token_ids, strict=True):
            rest = self._traffic.histories[number_of(name)][len(text) : len(text) + self._width]
            row[: len(rest)] = rest
        rest_of_k = (0, 0), (0, self._width - self._drafter.num_draft)
        offered = of_stage(1, np.pad(batch.offer.token_ids, rest_of_k), most * 0 + self._drafter.num_draft, most)
        looked_up = np.minimum(_right(self._found(batch, NO_TOKENS, NO_COUNTS, most), truth), most)
        begun = np.minimum(_right(offered, truth), most)
        offered = offered._replace(num_draft=begun)
        both = offered.followed_by(self._found(batch, offered.token_ids, begun, most - begun))
        best = np.maximum(looked_up, np.minimum(_right(both, truth), most))
        saved_ms = self._drafter.step_ms(batch.num_reqs, True) - self._drafter.step_ms(batch.num_reqs, False)
        self.asked = bool((best - looked_up).sum() > self._rate * saved_ms)
        return Draft(np.maximum(truth, 0), (best if self.asked else looked_up).astype(np.int32))

    def _found(self, batch: DraftBatch, prefix: Int32Array, num_begun: Ints, most: Ints) -> DraftArrays:
        return of_stage(0, *self._lookup.continue_drafts(batch, prefix, num_begun, most))

    def forget(self, request_ids: Sequence[str]) -> None:
        self._lookup.forget(request_ids)


def _right(drafts: DraftArrays, truth: Int32Array) -> Ints:
    """[num_reqs]: how many tokens of each draft are the output's."""
    right: Ints = ((drafts.token_ids == truth) & drafts.is_drafted).cumprod(axis=1).sum(axis=1)
    return right
