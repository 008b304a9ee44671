"""Turns users' dictionaries into checked configurations, for methods of this package and of others."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from vllm_specplugins.config import (
    MAX_STAGES,
    CommonConfig,
    ConfigError,
    CustomConfig,
    SpecConfig,
    StageConfig,
    brief,
    check_stages,
    did_you_mean,
    methods_of,
)
from vllm_specplugins.config.aliases import with_our_names
from vllm_specplugins.config.lengths import with_default_length
from vllm_specplugins.config.trees import with_tree
from vllm_specplugins.custom import Registered, import_object, option_checks, registrations
from vllm_specplugins.methods import BUILT_IN, METHODS, drafters, forces_tokens


def registered_methods() -> Mapping[str, Registered]:
    """Returns the available methods of other packages, by name."""
    return {entry.name: entry for entry in registrations((*METHODS, *BUILT_IN)) if entry.refusal is None}


def parse_config(raw: Mapping[str, Any], greedy: bool = False) -> SpecConfig:
    """Returns the checked configuration of a user's dictionary, in which "method" is one of METHODS or registered. With
    `greedy`, `draft_sample_method` is "greedy" by default, as vLLM's verification requires.

    Raises:
        ConfigError: in the cases of SpecConfig.parse, for a proposer class that cannot be imported, and for stages that
            cannot be combined.
    """
    values = with_our_names(raw["method"], {key: value for key, value in raw.items() if key != "method"})
    method = raw["method"]
    row, stages = METHODS.get(method), values.get("stages")
    if greedy and hasattr(row and row.config, "draft_sample_method"):
        values.setdefault("draft_sample_method", "greedy")
    if method == "cascade" and isinstance(stages, list | tuple) and len(stages) <= MAX_STAGES:
        names = [name for name in (*METHODS, *BUILT_IN, *registered_methods()) if name != "cascade"]
        values["stages"] = tuple(_parse_stage(index, stage, names, greedy) for index, stage in enumerate(stages))
    if row:
        config = SpecConfig.parse(method, row.config, values)
    else:
        config = _parse_registered(registered_methods()[method], values)
    says_length = "num_speculative_tokens" in values
    config = with_tree(config, says_length)
    if not (says_length or config.longest_chain):
        long = [name for name, row in METHODS.items() if row.is_lookup or row.forces_tokens]
        config = with_default_length(config, long)
    option_checks(config)
    check_stages(config)
    for row, _ in drafters(config):
        row.check_cascade(config)
    forcing = [name for name, forces in zip(methods_of(config), forces_tokens(config), strict=True) if forces]
    if len(forcing) > 1:
        raise ConfigError(f"cascade: keep only one {forcing[0]} in stages: it extends the drafts of all other stages.")
    return config


def _parse_registered(registered: Registered, raw: Mapping[str, Any]) -> SpecConfig:
    """Parses the fields of the class's dataclass `Config`; a class without one takes `options`."""
    name, path = registered.name, registered.proposer
    kind = getattr(import_object(path, name), "Config", None)
    if kind is None:
        if "proposer" in raw:
            raise ConfigError(f"{name}: 'proposer' is not a field: the package sets it to {path}.")
        return SpecConfig.parse(name, CustomConfig, {**raw, "proposer": path})
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ConfigError(f"{name}: Config of {path} must be a dataclass, not {brief(kind)}.")
    config = SpecConfig.parse(name, kind, raw)
    return replace(config, method_config=CustomConfig(proposer=path, options=config.method_config))


def _parse_stage(index: int, raw: Any, names: Sequence[str], greedy: bool) -> StageConfig:
    if isinstance(raw, str) and raw in names:
        raw = {"method": raw}
    if not isinstance(raw, dict) or raw.get("method") not in names:
        method = raw.get("method") if isinstance(raw, dict) else raw
        allowed = f"a dictionary whose method is one of {', '.join(names)}, or its name"
        hint = did_you_mean(method, names)
        raise ConfigError(f"cascade: stages[{index}] must be {allowed}, not {brief(method)}{hint}")
    method = raw["method"]
    if method not in BUILT_IN:
        raw = with_our_names(method, raw)
    values = {key: value for key, value in raw.items() if key != "num_speculative_tokens"}
    for entry in fields(CommonConfig):
        if entry.name in values:
            raise ConfigError(f"cascade: set {entry.name} for the whole cascade, not in stages[{index}].")
    if method in BUILT_IN:
        kind: Any = BUILT_IN[method].config
        parsed = kind.parse(index, method, {key: values[key] for key in values if key != "method"})
    else:
        parsed = parse_config(values, greedy).method_config
    return StageConfig(method=method, method_config=parsed, num_speculative_tokens=raw.get("num_speculative_tokens"))
