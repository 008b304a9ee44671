"""The configurations of single methods in a whole one: its own, or those of its stages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from vllm_specplugins.config.cascade import BuiltInConfig, CascadeConfig, StageConfig
from vllm_specplugins.config.whole import SpecConfig

T = TypeVar("T")


def stage_configs(config: SpecConfig, kind: type[T]) -> list[T]:
    """The configurations of one kind in a method: its own, or those of its stages."""
    found = [config.own, *(stage.own for stage in config.stages)]
    return [part for part in found if isinstance(part, kind)]


def methods_of(config: SpecConfig) -> list[str]:
    """The methods that draft: those of a cascade's stages, or the one alone."""
    return [stage.method for stage in config.stages] or [config.method]


def stage_names(methods: Sequence[str]) -> list[str]:
    """What options call each stage in the engine: its method, with its number where several have the same.

    >>> stage_names(["prompt_lookup", "early_exit", "early_exit"])
    ['prompt_lookup', '1 early_exit', '2 early_exit']
    """
    return [name if methods.count(name) == 1 else f"{index} {name}" for index, name in enumerate(methods)]


def built_in_stage(config: SpecConfig) -> StageConfig | None:
    """The stage of a cascade that is built into vLLM, if there is one."""
    return next((stage for stage in config.stages if isinstance(stage.own, BuiltInConfig)), None)


def with_stage(config: SpecConfig, stage: StageConfig, other: StageConfig) -> SpecConfig:
    """The configuration of a cascade with another stage in the place of one."""
    stages = tuple(other if its is stage else its for its in config.own.stages)
    return replace(config, own=replace(config.own, stages=stages))


def rule(config: SpecConfig) -> str | None:
    """The policy that a cascade carries out: without a gate nobody chooses; None: there is none."""
    if not isinstance(config.own, CascadeConfig):
        return None
    return "first" if (config.own.policy, config.common.gate) == ("auto", "off") else config.own.policy


def sample_methods(config: SpecConfig) -> set[str]:
    """How the drafts of a method's model proposers are drawn."""
    return {own.draft_sample_method for own in stage_configs(config, object) if hasattr(own, "draft_sample_method")}
