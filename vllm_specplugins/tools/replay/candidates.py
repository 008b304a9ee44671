"""Lists the methods that a replay compares: proposers that read only token ids, with and without a gate and with each
K, and rules of other engines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import types

from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import Draft, DraftBatch, Proposer, ProposerContext
from vllm_specplugins.kernels.compiled import compiled
from vllm_specplugins.methods import METHODS, behind_gate, build_proposer, drafters
from vllm_specplugins.parsing import parse_config, registered_methods
from vllm_specplugins.plan import Conditions, make_plan
from vllm_specplugins.tools.picker import Config, is_ours, pick
from vllm_specplugins.tools.replay.drafter import Drafter
from vllm_specplugins.tools.replay.on_device import DeviceLengths, PlannedLengths

RUNNERS = V1, V2 = "v1", "v2"  # vLLM's model runners
ALWAYS, GATED, FIXED = "always", "gated", "fixed"
GATES = {ALWAYS: "off", GATED: "auto"}
LADDER = (3, 5, 8, 12, 15, 24, 31, 48, 64)  # values of K if the user gives none, while the speed rises
NGRAM_GPU = 2, 8  # tokens of vLLM's shortest and longest n-gram, as `bench` serves it
NGRAM_GPU_LENGTHS = 5, 15, 31
LONG_MATCH = 4, 64  # tokens of a match that overrides a drafter in TensorRT-LLM, and of the longest match
Build = Callable[[ProposerContext], Proposer]


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    method: str
    policy: str  # ALWAYS, or GATED: a gate chooses its lengths; FIXED for a method of others
    num_draft: int  # K
    build: Build
    config: Config | None = None  # the --speculative-config; None for other engines' rules
    drafter: Drafter | None = None
    waits: bool = False  # whether drafting waits for the device
    lengths: type[DeviceLengths] | None = None  # Model Runner V2's choice of lengths; None: a gate on the host
    is_late: bool = False  # whether Model Runner V2 drafts with it in a thread

    @classmethod
    def ours(
        cls, method: str, policy: str, config: Config, drafter: Drafter | None = None, runner: str = V2
    ) -> "Candidate":
        parsed, num_draft = parse_config(config), int(config["num_speculative_tokens"])
        is_v2 = runner == V2
        plan = make_plan(parsed, Conditions(use_v2_model_runner=is_v2, async_scheduling=is_v2))
        lengths = None
        if plan.on_device and not plan.is_late:
            lengths = DeviceLengths if plan.scheduler_chooses else PlannedLengths
        build = partial(build_proposer, parsed.parts[0] if lengths else behind_gate(parsed))
        return cls(method, policy, num_draft, build, config, drafter, not plan.on_device, lengths, plan.is_late)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.method, self.policy, self.num_draft

    @property
    def facts(self) -> dict[str, Any]:
        drafter = asdict(self.drafter) if self.drafter else None
        return {"method": self.method, "policy": self.policy, "config": self.config, "drafter": drafter}


def candidates(wanted: Sequence[str], num_drafts: Sequence[int], runner: str = V2) -> list[Candidate]:
    """Returns candidates by method, policy and K; without names, all methods that read only token ids. The `gate` and
    K of a user's configuration replace the policies and `num_drafts`. Raises ConfigError for other methods."""
    named = {name: [(name, {"method": name})] for name in _default()}
    picked = pick(wanted or list(named), "--methods", named)
    for name, config in picked.items():
        if not _reads_tokens_alone(config):
            raise ConfigError(
                f"--methods must be proposers that read only token ids, as prompt_lookup does, not {name}."
            )
    return [
        Candidate.ours(name, policy, {**config, "gate": gate, "num_speculative_tokens": num_draft}, runner=runner)
        for name, config in picked.items()
        for policy, gate in GATES.items() if config.get("gate", gate) == gate
        for num_draft in ([config["num_speculative_tokens"]] if "num_speculative_tokens" in config else num_drafts)
    ]  # fmt: skip


def beside(drafter: Drafter, runner: str = V2) -> Candidate:
    """Returns the cascade of a lookup and a recorded drafter, with the defaults of serving."""
    return Candidate.ours("cascade", GATED, drafter.cascade, drafter, runner)


def rivals(drafter: Drafter | None) -> list[Candidate]:
    """Returns vLLM's n-gram with each K. With a drafter, it also returns the drafter alone, and TensorRT-LLM's rule for
    both."""
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
    """Drafts K tokens in every step: the tokens after the latest of the longest matches of allowed length, otherwise
    the drafter's tokens. It is vLLM's `ngram_gpu` on Model Runner V2, or, with a drafter that always runs,
    TensorRT-LLM's rule."""

    def __init__(self, min_ngram: int, max_ngram: int, context: ProposerContext):
        self._ngrams, self._width = (min_ngram, max_ngram), context.max_num_draft

    def propose(self, batch: DraftBatch) -> Draft:
        token_ids = np.zeros((batch.num_reqs, self._width), np.int32)
        if batch.offer is not None:
            token_ids[:] = batch.offer.draft.token_ids
        for row, tokens in zip(token_ids, batch.token_ids, strict=True):
            if self._ngrams[1] and (end := match_end(tokens, *self._ngrams)):
                copied = tokens[end : end + self._width]
                row[: len(copied)], row[len(copied) :] = copied, tokens[-1]
        return Draft(token_ids, batch.max_num_draft)


@compiled(types.int64(types.Array(types.int32, 1, "C", readonly=True), types.int64, types.int64))
def match_end(tokens: Any, min_ngram: int, max_ngram: int) -> int:
    """Returns the place after the latest of the longest earlier matches of the newest tokens; 0 if there is none.

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
