"""The literal table of methods: the one place to add a proposer."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm_specplugins.config import ConfigError, CustomConfig, EarlyExitConfig, PromptLookupConfig, SpecConfig
from vllm_specplugins.draft import Proposer, ProposerContext


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table: the class of the method's own configuration, and "module:Class" of its proposer.

    The proposer is called with (own configuration, ProposerContext). None: the configuration names it.
    A method that runs the target gets `DraftBatch.target`, and K slots of the KV cache past the last token.
    """

    config: type
    proposer: str | None
    runs_target: bool = False


METHODS: Mapping[str, Method] = {
    "prompt_lookup": Method(PromptLookupConfig, "vllm_specplugins.proposers.prompt_lookup:PromptLookup"),
    "early_exit": Method(EarlyExitConfig, "vllm_specplugins.proposers.early_exit:EarlyExit", runs_target=True),
    "custom": Method(CustomConfig, None),
}


def parse_config(raw: Mapping[str, Any]) -> SpecConfig:
    """The checked configuration for a user's dictionary, whose "method" is one of METHODS.

    Raises:
        ConfigError: see SpecConfig.parse; or a proposer class that cannot be imported.
    """
    own = {key: value for key, value in raw.items() if key != "method"}
    config = SpecConfig.parse(raw["method"], METHODS[raw["method"]].config, own)
    if isinstance(config.own, CustomConfig):
        import_object(config.own.proposer)
    return config


def build_proposer(config: SpecConfig, context: ProposerContext) -> Proposer:
    """The proposer that `config` names, ready to propose."""
    if isinstance(config.own, CustomConfig):
        build, argument = import_object(config.own.proposer), config.own.options
    else:
        path = METHODS[config.method].proposer
        assert path is not None
        build, argument = import_object(path), config.own
    proposer: Proposer = build(argument, context)
    return proposer


def import_object(path: str) -> Any:
    """The object at "package.module:name".

    Raises:
        ConfigError: it is not there.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"custom: proposer {path!r} cannot be imported ({error}).") from error
