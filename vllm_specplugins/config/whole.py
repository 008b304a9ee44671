"""The whole of a `speculative_config`: what all methods share, and the method's own part."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self

from vllm_specplugins.config.cascade import CascadeConfig, StageConfig
from vllm_specplugins.config.checks import ConfigError, brief, check_fields, check_value, choice, did_you_mean, integer

MAX_NUM_SPECULATIVE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """What every method takes beside its own fields.

    Args:
        num_speculative_tokens: K, the most draft tokens a request gets in one step. Default of lookups and cascades
            that begin with one: 31 (5 on a hybrid target, or where a stage is "probabilistic"); of `medusa` its heads.
        time_budget_ms: longest that a proposer on the host, or a stage, may take for a step, or else it loses its
            drafts.
        verification: "fused" verifies and samples with kernels/rejection: exact for every sampling parameter, and a
            seeded request's output depends on neither drafts nor batch; "vllm" leaves both to vLLM.
        gate: "auto" chooses by request and step how many tokens are drafted, down to none; "off" drafts all.
        rejection: "token" accepts draft tokens one by one; "block" decides on a whole draft, which keeps more of
            sampled ones (draft_sample_method "probabilistic").
    """

    num_speculative_tokens: int = integer(5, 1, MAX_NUM_SPECULATIVE_TOKENS)
    time_budget_ms: int = integer(1000, 1, 60_000)
    verification: str = choice("fused", "vllm")
    gate: str = choice("auto", "off")
    rejection: str = choice("token", "block")

    def __post_init__(self) -> None:
        check_fields(self, "speculative_config")
        if self.verification == "vllm" and self.rejection != "token":
            raise ConfigError(
                f"speculative_config: rejection must be 'token' where verification is 'vllm', not {self.rejection!r}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """One parsed `speculative_config`: the method's name, what all methods share, and the method's own part.

    `says_length`: whether it holds K, which is a default otherwise.
    """

    method: str
    common: CommonConfig
    own: Any
    says_length: bool = field(default=True, compare=False)

    @property
    def length(self) -> int:
        """K."""
        return self.common.num_speculative_tokens

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """Of a cascade; of other methods none."""
        return self.own.stages if isinstance(self.own, CascadeConfig) else ()

    def with_length(self, length: int) -> Self:
        """The same with another K, which nobody asked for."""
        return replace(self, common=replace(self.common, num_speculative_tokens=length), says_length=False)

    @classmethod
    def parse(cls, method: str, own_type: type, raw: Mapping[str, Any]) -> Self:
        """Builds the configuration of `method` from the user's dictionary (without its "method" key).

        Raises:
            ConfigError: unknown key, wrong type, value out of range, or values that contradict each other.
        """
        common_names = [entry.name for entry in fields(CommonConfig)]
        own_names = [entry.name for entry in fields(own_type)]
        for key in raw:
            if key not in common_names and key not in own_names:
                names = own_names + common_names
                allowed = ", ".join(names) + did_you_mean(key, names)
                raise ConfigError(f"{method}: {brief(key)} is not a field; the fields are {allowed}")
        for entry in fields(own_type):
            if entry.name not in raw and entry.default is MISSING and entry.default_factory is MISSING:
                allowed = (
                    f"it must be {check_value(entry, None)[1]}" if "kind" in entry.metadata else "it has no default"
                )
                raise ConfigError(f"{method}: {entry.name} is missing; {allowed}.")
        common = CommonConfig(**{key: value for key, value in raw.items() if key in common_names})
        own = _made(own_type, method, {key: value for key, value in raw.items() if key in own_names})
        return cls(method=method, common=common, own=own)


def _made(own_type: type, method: str, values: Mapping[str, Any]) -> Any:
    """A configuration, checked; the class may be another package's."""
    try:
        own = own_type(**values)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{method}: its configuration is refused ({type(error).__name__}: {error}).") from error
    check_fields(own, method)
    return own
