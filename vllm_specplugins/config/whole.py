"""The whole of a `speculative_config`: what all methods share, and the method's own part or those of its stages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import product
from typing import Any, Self, TypeVar

from vllm_specplugins.config.fields import ConfigError, brief, check_fields, check_names, choice, integer, is_integer
from vllm_specplugins.config.proposers import (
    NOT_WITH_TREE,
    BuiltInConfig,
    CascadeConfig,
    EarlyExitConfig,
    StageConfig,
)

MAX_NUM_SPECULATIVE_TOKENS = 64
# K where the configuration has none: what is copied costs nothing to draft, and is right all along or not at all.
LONG, SHORT = 31, 5
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """The fields of every method.

    Args:
        num_speculative_tokens: Limits a request's draft in one step (K). Defaults: 31 for lookups and cascades that
            begin with one (5 on a hybrid target or with a "probabilistic" stage); for `medusa` all heads.
        time_budget_ms: Limits the time of a proposer on the host per step. A late draft is dropped.
        verification: "fused" verifies and samples with kernels/rejection: exact for every sampling parameter, with
            random numbers that depend on neither drafts nor batch; "vllm" leaves both to vLLM.
        gate: "auto" chooses the draft's length by request and step, down to none; "off" drafts all.
    """

    num_speculative_tokens: int = integer(SHORT, 1, MAX_NUM_SPECULATIVE_TOKENS)
    time_budget_ms: int = integer(1000, 1, 60_000)
    verification: str = choice("fused", "vllm")
    gate: str = choice("auto", "off")

    def __post_init__(self) -> None:
        check_fields(self, "speculative_config")


def chain_length(num_nodes: int) -> int:
    """Tokens of the chain in a tree of so many nodes: a third, about.

    >>> [chain_length(num_nodes) for num_nodes in (1, 4, 7, 15, 31)]
    [1, 2, 3, 6, 11]
    """
    return (num_nodes + 3) // 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """One parsed `speculative_config`: the method's name, what all methods share, and the method's own part.

    `says_length`: whether it holds K, which is a default otherwise.
    """

    method: str
    common: CommonConfig
    method_config: Any
    says_length: bool = field(default=True, compare=False)

    @property
    def length(self) -> int:
        """K."""
        return self.common.num_speculative_tokens

    @property
    def tree(self) -> int:
        """How many tokens are drafted as a tree; 0: a draft is a chain."""
        return getattr(self.method_config, "tree", None) or 0

    @property
    def longest_chain(self) -> int:
        """Of how many tokens a draft is, where it may be a tree and is none; else 0."""
        return chain_length(self.tree) if self.tree else 0

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """Of a cascade; of other methods none."""
        return self.method_config.stages if isinstance(self.method_config, CascadeConfig) else ()

    @property
    def parts(self) -> "tuple[StageConfig | Self, ...]":
        """What drafts: the stages of a cascade, or the one method."""
        return self.stages or (self,)

    def with_length(self, length: int) -> Self:
        """The same with another K, which nobody asked for."""
        return replace(self, common=replace(self.common, num_speculative_tokens=length), says_length=False)

    def with_stages(self, stages: Iterable[StageConfig]) -> Self:
        """The same with other stages."""
        return replace(self, method_config=replace(self.method_config, stages=tuple(stages)))

    @classmethod
    def parse(cls, method: str, own_type: type, raw: Mapping[str, Any]) -> Self:
        """Builds the configuration of `method` from the user's dictionary (without its "method" key).

        Raises:
            ConfigError: unknown key, wrong type, value out of range, or values that contradict each other.
        """
        own_names, common_names = ([entry.name for entry in fields(kind)] for kind in (own_type, CommonConfig))
        check_names(raw, own_names + common_names, method)
        for entry in fields(own_type):
            if entry.name not in raw and entry.default is MISSING and entry.default_factory is MISSING:
                words = entry.metadata.get("allowed")
                needs = f"it must be {words}" if words else "it has no default"
                raise ConfigError(f"{method}: {entry.name} is missing; {needs}.")
        common = CommonConfig(**{key: value for key, value in raw.items() if key in common_names})
        try:  # the class may be another package's
            own = own_type(**{key: value for key, value in raw.items() if key in own_names})
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{method}: its configuration is refused ({type(error).__name__}: {error}).") from error
        check_fields(own, method)
        return cls(method=method, common=common, method_config=own)


def stage_configs(config: SpecConfig, kind: type[T]) -> list[T]:
    """The configurations of one kind in a method: its own, or those of its stages."""
    return [part.method_config for part in config.parts if isinstance(part.method_config, kind)]


def methods_of(config: SpecConfig) -> list[str]:
    """The methods that draft: those of a cascade's stages, or the one alone."""
    return [part.method for part in config.parts]


def stage_names(methods: Sequence[str]) -> list[str]:
    """What options call each stage in the engine: its method, with its number where several have the same.

    >>> stage_names(["prompt_lookup", "early_exit", "early_exit"])
    ['prompt_lookup', '1 early_exit', '2 early_exit']
    """
    return [name if methods.count(name) == 1 else f"{index} {name}" for index, name in enumerate(methods)]


def built_in_stage(config: SpecConfig) -> StageConfig | None:
    """The stage of a cascade that is built into vLLM, if there is one."""
    return next((stage for stage in config.stages if isinstance(stage.method_config, BuiltInConfig)), None)


def rule(config: SpecConfig) -> str | None:
    """The policy that a cascade carries out: without a gate nobody chooses; None: there is none."""
    if not isinstance(config.method_config, CascadeConfig):
        return None
    return (
        "first" if (config.method_config.policy, config.common.gate) == ("auto", "off") else config.method_config.policy
    )


def sample_methods(config: SpecConfig) -> set[str]:
    """How the drafts of a method's model proposers are drawn."""
    return {
        part.method_config.draft_sample_method
        for part in config.parts
        if hasattr(part.method_config, "draft_sample_method")
    }


def with_default_length(config: SpecConfig, lookups: Collection[str]) -> SpecConfig:
    """K, and that of a cascade's stages, where the dictionary does not say it; the target may have it changed."""
    # Drawn drafts keep the logits of each place, K rows of the vocabulary for each request.
    if config.parts[0].method not in lookups or "probabilistic" in sample_methods(config):
        return config.with_length(SHORT)
    if config.stages:
        config = config.with_stages(
            [
                replace(stage, num_speculative_tokens=SHORT)
                if stage.num_speculative_tokens is None and stage.method not in (*lookups, "mtp", "medusa")
                else stage
                for stage in config.stages
            ]
        )
    return config.with_length(LONG)


def with_tree(config: SpecConfig) -> SpecConfig:
    """K is a tree's size, and a stage beside a lookup drafts its chain. ConfigError for what does not go with one."""
    method, common, tree = config.method, config.common, config.tree
    if config.length != tree:
        raise ConfigError(
            f"{method}: num_speculative_tokens must be {tree}, the tree's, or left out, not {config.length}."
        )
    if common.verification != "fused":
        raise ConfigError(f"{method}: verification must be 'fused' with tree, not {common.verification!r}.")
    if "probabilistic" in sample_methods(config):
        raise ConfigError(
            f"{method}: draft_sample_method must be 'coupled' or 'greedy' with tree, whose tokens are certain, not "
            "'probabilistic'."
        )
    for part, name in product(config.parts, NOT_WITH_TREE):
        if getattr(part.method_config, name, None):
            raise ConfigError(f"{method}: {name} must be left out with tree, which was never tried with it.")
    if stages := config.stages:
        fits = methods_of(config) in [["prompt_lookup", own] for own in ("early_exit", "jump", "medusa")]
        if not fits or stages[1].num_speculative_tokens is not None or rule(config) == "verify":
            raise ConfigError(
                "cascade: stages must be prompt_lookup and one of early_exit, jump and medusa without "
                "num_speculative_tokens, and policy 'auto', with tree."
            )
        config = config.with_stages((stages[0], replace(stages[1], num_speculative_tokens=chain_length(tree))))
    return replace(config, says_length=True)


def check_stages(config: SpecConfig) -> None:
    """Raises ConfigError for stages that do not fit each other, the policy or the cascade's K."""
    stages = config.stages
    for index, stage in enumerate(stages):
        if getattr(stage.method_config, "tree", None):
            raise ConfigError(
                f"cascade: stages[{index}] must not hold tree, which the cascade has, or a method that is alone."
            )
        num = stage.num_speculative_tokens
        if num is not None and not is_integer(num, 1, config.length):
            raise ConfigError(
                f"cascade: stages[{index}]: num_speculative_tokens must be an integer from 1 to {config.length}, the "
                f"cascade's, not {brief(num)}."
            )
        if index and rule(config) == "verify" and not isinstance(stage.method_config, EarlyExitConfig):
            raise ConfigError(
                f"cascade: stages[{index}] must be early_exit where policy is 'verify', not {stage.method!r}."
            )
    if {"prompt_lookup", "suffix_lookup"} <= set(methods_of(config)):
        raise ConfigError(
            "cascade: stages must not hold prompt_lookup beside suffix_lookup, which does what it does, and more."
        )
    if methods_of(config).count("grammar") > 1:
        raise ConfigError("cascade: stages must hold grammar once, not more often: it goes on where all others end.")
    built_in = [stage.method for stage in stages if isinstance(stage.method_config, BuiltInConfig)]
    if len(built_in) > 1:
        raise ConfigError(
            f"cascade: stages must not hold more than one proposer built into vLLM, like {' and '.join(built_in)}."
        )
    if built_in and "probabilistic" in sample_methods(config):
        raise ConfigError(
            f"cascade: draft_sample_method must be 'greedy' or 'coupled' in all stages beside {built_in[0]}, not "
            f"'probabilistic'."
        )
