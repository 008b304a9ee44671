"""The methods that a replay compares: proposers that read only token ids, with and without a gate and with each K, and
rules of other engines. A log may hold, for each number of output tokens, how many tokens of a drafter's draft the
target would have accepted. The draft then consists of that many tokens of the output, followed by wrong ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError, brief
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, Proposer, ProposerContext
from vllm_specplugins.kernels.compiled import compiled
from vllm_specplugins.methods import BUILT_IN, METHODS, behind_gate, build_proposer, drafters
from vllm_specplugins.parsing import parse_config, registered_methods
from vllm_specplugins.plan import Conditions, make_plan
from vllm_specplugins.tools.picker import Config, is_ours, pick_methods
from vllm_specplugins.tools.replay.data import Traffic, number_of

RUNNERS = V1, V2 = "v1", "v2"  # vLLM's model runners
ALWAYS, GATED, FIXED = "always", "gated", "fixed"
GATES = {ALWAYS: "off", GATED: "auto"}
LADDER = (3, 5, 8, 12, 15, 24, 31, 48, 64)  # values of K where the user names none, as long as the speed rises
NGRAM_GPU = 2, 8  # tokens of vLLM's shortest and longest n-gram, as `bench` serves it
NGRAM_GPU_LENGTHS = 5, 15, 31
LONG_MATCH = 4, 64  # tokens of a match that overrides a drafter in TensorRT-LLM, and of the longest that is counted
LOOKUP_LENGTH = 31  # K of a lookup by default
Build = Callable[[ProposerContext], Proposer]


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter with accepted lengths in logs."""

    name: str
    ms: float  # time of all its passes for a step's drafts
    token_ms: float  # time of each draft token, those of all requests counted
    num_draft: int  # K

    @classmethod
    def parse(cls, text: str) -> "Drafter":
        """Parses a drafter from NAME:MS[:MS_A_TOKEN]:K. Raises ConfigError for another form, or a number out of range.

        >>> Drafter.parse("eagle3:2.14:5")
        Drafter(name='eagle3', ms=2.14, token_ms=0.0, num_draft=5)
        """
        name, *times, num_draft = text.split(":") if text.count(":") in (2, 3) else ("", "", "")
        try:
            drafter = cls(name, float(times[0]), float(times[-1]) if times[1:] else 0.0, int(num_draft))
        except ValueError:
            drafter = cls("", 0.0, 0.0, 0)
        fits = 0 <= drafter.ms < np.inf and 0 <= drafter.token_ms < np.inf
        if not (name and fits and 1 <= drafter.num_draft <= MAX_NUM_SPECULATIVE_TOKENS):
            allowed = f"NAME:MS[:MS_A_TOKEN]:K, times of 0 or more and K from 1 to {MAX_NUM_SPECULATIVE_TOKENS}"
            raise ConfigError(f"--drafter must be {allowed}, not {brief(text)}.")
        return drafter

    @property
    def cascade(self) -> Config:
        method = self.name if self.name in BUILT_IN else "draft_model"
        stage = {"method": method, "model": "MODEL", "num_speculative_tokens": self.num_draft}
        stages = [{"method": "prompt_lookup"}, stage]
        return {"method": "cascade", "stages": stages, "num_speculative_tokens": LOOKUP_LENGTH}

    def step_ms(self, num_reqs: int, length: int) -> float:
        """ms of a step in which it drafts so many tokens; if it only reads the newest ones, those of one pass."""
        return (self.ms / self.num_draft + self.token_ms * num_reqs) * max(1, length)

    def draft(self, traffic: Traffic, request_ids: Sequence[str], texts: Sequence[Int32Array]) -> Int32Array:
        """[num_reqs, K]: for each text the tokens that the target would accept, followed by wrong ones."""
        token_ids = np.full((len(texts), self.num_draft), traffic.vocab_size - 1, np.int32)
        for row, number, text in zip(token_ids, map(number_of, request_ids), texts, strict=True):
            lengths, place = traffic.accepted[number][self.name], len(text) - traffic.prompt_lengths[number]
            count = min(self.num_draft, int(lengths[place])) if place < len(lengths) else 0
            right = traffic.histories[number][len(text) : len(text) + count]
            row[: len(right)] = right
        return token_ids


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    method: str
    policy: str  # ALWAYS, or GATED: a gate chooses its lengths; FIXED for a method of others
    num_draft: int  # K
    build: Build
    config: Config | None = None  # its whole --speculative-config; None for a method of others
    drafter: Drafter | None = None
    waits: bool = False  # its drafting waits for the device
    on_device: bool = False  # Model Runner V2 chooses its lengths (on_device.py)

    @classmethod
    def ours(
        cls, method: str, policy: str, config: Config, drafter: Drafter | None = None, runner: str = V2
    ) -> "Candidate":
        parsed, num_draft = parse_config(config), int(config["num_speculative_tokens"])
        is_v2 = runner == V2
        plan = make_plan(parsed, Conditions(use_v2_model_runner=is_v2, async_scheduling=is_v2))
        on_device = plan.on_device and plan.scheduler_chooses and plan.trims
        build = partial(build_proposer, parsed.parts[0] if on_device else behind_gate(parsed))
        return cls(method, policy, num_draft, build, config, drafter, not plan.on_device, on_device)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.method, self.policy, self.num_draft

    @property
    def facts(self) -> dict[str, Any]:
        drafter = asdict(self.drafter) if self.drafter else None
        return {"method": self.method, "policy": self.policy, "config": self.config, "drafter": drafter}


def candidates(wanted: Sequence[str], num_drafts: Sequence[int], runner: str = V2) -> list[Candidate]:
    """Our methods, by method, policy and K; without names, all that read only token ids. Raises ConfigError for an
    unknown method, or one that reads more."""
    picked = {name: config for name, config in pick_methods(wanted or list(_default())).items() if config}
    for name, config in picked.items():
        if not _reads_tokens_alone(config):
            raise ConfigError(
                f"--methods must be proposers that read only token ids, as prompt_lookup does, not {name}."
            )
    return [
        Candidate.ours(name, policy, {**config, "gate": gate, "num_speculative_tokens": num_draft}, runner=runner)
        for name, config in picked.items() for policy, gate in GATES.items() for num_draft in num_drafts
    ]  # fmt: skip


def beside(drafter: Drafter, runner: str = V2) -> Candidate:
    """The cascade of a lookup and a recorded drafter, with the defaults of serving."""
    return Candidate.ours("cascade", GATED, drafter.cascade, drafter, runner)


def rivals(drafter: Drafter | None) -> list[Candidate]:
    """vLLM's n-gram with each K. With a drafter, also the drafter alone, and TensorRT-LLM's rule for both."""
    rules = [Candidate("ngram_gpu", FIXED, num_draft, partial(Fixed, *NGRAM_GPU)) for num_draft in NGRAM_GPU_LENGTHS]
    if drafter is not None:
        fixed = {drafter.name: partial(Fixed, 0, 0), "match of 4 first": partial(Fixed, *LONG_MATCH)}
        rules += [Candidate(name, FIXED, drafter.num_draft, build, None, drafter) for name, build in fixed.items()]
    return rules


def _default() -> Iterator[str]:
    for name, method in METHODS.items():
        if not method.runs_target and method.reads_tokens_alone and name not in ("cascade", "custom"):
            yield name
    yield from registered_methods()


def _reads_tokens_alone(config: Config) -> bool:
    if not is_ours(config):
        return False
    parsed = parse_config(config)
    return all(row.reads_tokens_alone and not (row.runs_target or row.is_offered) for row, _ in drafters(parsed))


class Fixed(Proposer):
    """Drafts K tokens in every step: those after the latest of the longest matches of allowed length, otherwise the
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
    """The place after the latest of the longest earlier matches of the newest tokens; 0 if there is none.

    >>> match_end(np.frombuffer(np.array([1, 2, 9, 1, 2, 8, 1, 2], np.int32).tobytes(), np.int32), 2, 8)
    5
    """
    last, longest, place = len(tokens) - 1, min_ngram - 1, 0
    for end in range(last, 0, -1):
        length = 0
        while length < min(max_ngram, end) and tokens[end - 1 - length] == tokens[last - length]:
            length += 1
        if length > longest:
            longest, place = length, end
        if longest == max_ngram:
            break
    return place
