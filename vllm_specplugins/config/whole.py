"""Parses a whole `speculative_config`: the common fields, and the fields of the method or of its stages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self, TypeVar

from vllm_specplugins.config.fields import ConfigError, brief, check_fields, check_names, choice, integer, is_integer
from vllm_specplugins.config.proposers import CascadeConfig, EarlyExitConfig, StageConfig

MAX_NUM_SPECULATIVE_TOKENS = 64
SHORT = 5  # default of K for a method that needs a model's pass for a token
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """The fields of every method.

    Args:
        num_speculative_tokens: The longest draft of a request in one step (K). Lookups, and cascades that begin with
            one, default to 31 (5 for a hybrid target or with a "probabilistic" stage), and `medusa` to the number of
            heads.
        time_budget_ms: The time limit of a proposer on the host per step, in ms. A late draft is dropped.
        gate: "auto" chooses draft lengths in each step, down to 0: per request on Model Runner V1 and for drafts on the
            host; on V2 one length for all requests, of which the device verifies the tokens that pay. "off" verifies
            every draft as a whole.
    """

    num_speculative_tokens: int = integer(SHORT, 1, MAX_NUM_SPECULATIVE_TOKENS)
    time_budget_ms: int = integer(1000, 1, 60_000)
    gate: str = choice("auto", "off")

    def __post_init__(self) -> None:
        check_fields(self, "speculative_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """A parsed `speculative_config`.

    Args:
        common: the fields of every method.
        method_config: the fields of this method.
        says_length: whether the user chose K.
        longest_chain: 0, or for trees the length of the longest draft that does not branch.
    """

    method: str
    common: CommonConfig
    method_config: Any
    says_length: bool = field(default=True, compare=False)
    longest_chain: int = 0

    @property
    def length(self) -> int:
        """K."""
        return self.common.num_speculative_tokens

    @property
    def longest_path(self) -> int:
        """Returns the largest number of a draft's tokens that may all be accepted: fewer than K if drafts branch."""
        return self.longest_chain or self.length

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """Returns the stages of a cascade."""
        return self.method_config.stages if isinstance(self.method_config, CascadeConfig) else ()

    @property
    def parts(self) -> "tuple[StageConfig | Self, ...]":
        """Returns the stages of a cascade, or the single method."""
        return self.stages or (self,)

    def with_length(self, length: int) -> Self:
        """Returns a copy with this default of K."""
        return replace(self, common=replace(self.common, num_speculative_tokens=length), says_length=False)

    def with_stages(self, stages: Iterable[StageConfig]) -> Self:
        return replace(self, method_config=replace(self.method_config, stages=tuple(stages)))

    @classmethod
    def parse(cls, method: str, kind: type, raw: Mapping[str, Any]) -> Self:
        """Builds the configuration of `method` from the user's dictionary (without its "method" key).

        Args:
            kind: the class of the method's configuration.

        Raises:
            ConfigError: unknown key, wrong type, value out of range, or values that contradict each other.
        """
        names, common_names = ([entry.name for entry in fields(each)] for each in (kind, CommonConfig))
        check_names(raw, names + common_names, method)
        for entry in fields(kind):
            if entry.name not in raw and entry.default is MISSING and entry.default_factory is MISSING:
                allowed = entry.metadata.get("allowed")
                needs = f"it must be {allowed}" if allowed else "it has no default"
                raise ConfigError(f"{method}: {entry.name} is missing; {needs}.")
        common = CommonConfig(**{key: value for key, value in raw.items() if key in common_names})
        try:  # the class may be another package's
            method_config = kind(**{key: value for key, value in raw.items() if key in names})
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{method}: invalid configuration ({type(error).__name__}: {error}).") from error
        check_fields(method_config, method)
        return cls(method=method, common=common, method_config=method_config)


def stage_configs(config: SpecConfig, kind: type[T]) -> list[T]:
    """Returns the configurations of this kind among the method and its stages."""
    return [part.method_config for part in config.parts if isinstance(part.method_config, kind)]


def methods_of(config: SpecConfig) -> list[str]:
    """Returns the methods of a cascade's stages, or the single method."""
    return [part.method for part in config.parts]


def stage_names(methods: Sequence[str]) -> list[str]:
    """Returns the names of stages in options: the method, with the stage's index if several stages have the same
    method.

    >>> stage_names(["prompt_lookup", "early_exit", "early_exit"])
    ['prompt_lookup', '1 early_exit', '2 early_exit']
    """
    return [name if methods.count(name) == 1 else f"{index} {name}" for index, name in enumerate(methods)]


def rule(config: SpecConfig) -> str | None:
    """Returns the policy of a cascade, "first" without a gate; None for other methods."""
    if not isinstance(config.method_config, CascadeConfig):
        return None
    policy = config.method_config.policy
    return "first" if policy == "auto" and config.common.gate == "off" else policy


def sample_methods(config: SpecConfig) -> set[str]:
    """Returns each `draft_sample_method` in the method or its stages."""
    methods = [getattr(part.method_config, "draft_sample_method", None) for part in config.parts]
    return {method for method in methods if method is not None}


def check_stages(config: SpecConfig) -> None:
    """Raises ConfigError for stages that are incompatible with each other, the policy or the cascade's K."""
    for index, stage in enumerate(config.stages):
        num = stage.num_speculative_tokens
        if num is not None and not is_integer(num, 1, config.length):
            raise ConfigError(
                f"cascade: stages[{index}]: num_speculative_tokens must be an integer from 1 to {config.length}, the "
                f"cascade's K, not {brief(num)}."
            )
        if index and rule(config) == "verify" and not isinstance(stage.method_config, EarlyExitConfig):
            raise ConfigError(
                f"cascade: stages[{index}] must be early_exit with policy 'verify', not {stage.method!r}."
            )
    methods = methods_of(config)
    if {"prompt_lookup", "suffix_lookup"} <= set(methods):
        raise ConfigError("cascade: remove prompt_lookup from stages: suffix_lookup includes it.")
