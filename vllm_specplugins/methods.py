"""The literal table of methods: the one place to add a proposer. Other packages may register more (registered.py)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

from vllm_specplugins.config import (
    MAX_STAGES,
    BuiltInConfig,
    CascadeConfig,
    CommonConfig,
    ConfigError,
    CustomConfig,
    EarlyExitConfig,
    JumpConfig,
    MedusaConfig,
    PromptLookupConfig,
    RegisteredConfig,
    SpecConfig,
    StageConfig,
    SuffixLookupConfig,
    TokenRecyclingConfig,
    meant,
    parts,
    said,
    sample_methods,
    shown,
)
from vllm_specplugins.draft import PROTOCOL_VERSION, Proposer, ProposerContext
from vllm_specplugins.proposers.guard import shown as shown_error
from vllm_specplugins.registered import Registered, usable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table: the class of the method's own configuration, and "module:Class" of its proposer.

    The proposer is called with (own configuration, ProposerContext). None: the configuration names it.
    A method that runs the target gets `DraftBatch.target`, and K slots of the KV cache past the last token; one that
    reads histories gets `DraftBatch.token_ids`. Where vLLM has a method of the same name, ours is the one whose
    dictionary has `own_field`. One that is `on_device` drafts there on Model Runner V2, without the host
    (engine/v2/lookup.py, engine/v2/on_device.py); the class of one that reads histories is then V1's. One that
    `reads_likeliest` gets `DraftBatch.likeliest`.
    """

    config: type
    proposer: str | None
    runs_target: bool = False
    reads_history: bool = True
    own_field: str | None = None
    on_device: bool = False
    reads_likeliest: bool = False


METHODS: Mapping[str, Method] = {
    "prompt_lookup": Method(
        PromptLookupConfig, "vllm_specplugins.proposers.prompt_lookup:PromptLookup", on_device=True
    ),
    "suffix_lookup": Method(SuffixLookupConfig, "vllm_specplugins.proposers.suffix_lookup:SuffixLookup"),
    "token_recycling": Method(
        TokenRecyclingConfig, "vllm_specplugins.proposers.token_recycling:TokenRecycling", reads_likeliest=True
    ),
    "early_exit": Method(
        EarlyExitConfig,
        "vllm_specplugins.proposers.early_exit:EarlyExit",
        runs_target=True,
        reads_history=False,
        on_device=True,
    ),
    "jump": Method(JumpConfig, "vllm_specplugins.proposers.jump:Jump", runs_target=True, reads_history=False),
    "medusa": Method(
        MedusaConfig,
        "vllm_specplugins.proposers.medusa:Medusa",
        runs_target=True,
        reads_history=False,
        own_field="heads",
    ),
    "cascade": Method(CascadeConfig, "vllm_specplugins.proposers.cascade:Cascade"),
    "custom": Method(CustomConfig, None),
}

# Proposers built into vLLM that can be a stage of a cascade; alone, vLLM serves them itself.
BUILT_IN: Mapping[str, Method] = dict.fromkeys(
    ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"),
    Method(BuiltInConfig, "vllm_specplugins.proposers.built_in:BuiltIn", reads_history=False),
)

# K of methods that say nothing: what is copied costs nothing to draft, and is right all along or not at all.
LOOKUPS, LONG, SHORT = ("prompt_lookup", "suffix_lookup"), 31, 5

# Methods that a gate holds back on the host where they are alone, too.
GATED_ALONE = "prompt_lookup", "suffix_lookup", "token_recycling", "early_exit", "jump"
# The stages of a cascade that drafts on the device.
DEVICE_CASCADE = ("prompt_lookup", "early_exit")


def registered_methods() -> Mapping[str, Registered]:
    """The methods of other packages that can be asked for, by name."""
    return usable((*METHODS, *BUILT_IN))


def parse_config(raw: Mapping[str, Any]) -> SpecConfig:
    """The checked configuration for a user's dictionary, whose "method" is one of METHODS, or registered.

    Raises:
        ConfigError: see SpecConfig.parse; a proposer class that cannot be imported; stages that do not fit.
    """
    own = {key: value for key, value in raw.items() if key != "method"}
    if raw["method"] not in METHODS:
        return _parse_registered(registered_methods()[raw["method"]], own)
    stages = own.get("stages")
    if raw["method"] == "cascade" and isinstance(stages, list | tuple) and len(stages) <= MAX_STAGES:
        names = [name for name in (*METHODS, *BUILT_IN, *registered_methods()) if name not in ("cascade", "medusa")]
        own["stages"] = tuple(_parse_stage(index, stage, names) for index, stage in enumerate(stages))
    config = SpecConfig.parse(raw["method"], METHODS[raw["method"]].config, own)
    if "num_speculative_tokens" not in own:
        config = _with_default_length(config)
    option_checks(config)
    if isinstance(config.own, CascadeConfig):
        _check_stages(config.own, config.length)
    if "coupled" in sample_methods(config) and config.common.verification != "fused":
        raise ConfigError(
            f"{config.method}: draft_sample_method must be 'greedy' or 'probabilistic' where verification is "
            f"{config.common.verification!r}, whose noise nobody else knows, not 'coupled'."
        )
    if reads_likeliest(config) and config.common.verification != "fused":
        raise ConfigError(
            f"{config.method}: verification must be 'fused' for token_recycling, which learns from what that reads, "
            f"not {config.common.verification!r}."
        )
    return config


def _with_default_length(config: SpecConfig) -> SpecConfig:
    """K, and that of a cascade's stages, where the dictionary does not say it; the target may have it changed."""
    stages = getattr(config.own, "stages", ())
    first = stages[0].method if stages else config.method
    # Drawn drafts keep the logits of each place, K rows of the vocabulary for each request.
    if first not in LOOKUPS or "probabilistic" in sample_methods(config):
        return config.with_length(SHORT)
    if stages:
        config = replace(config, own=replace(config.own, stages=tuple(map(_with_own_length, stages))))
    return config.with_length(LONG)


def _with_own_length(stage: StageConfig) -> StageConfig:
    """Beside a lookup; of `mtp` the model says it."""
    if stage.num_speculative_tokens is not None or stage.method in (*LOOKUPS, "mtp"):
        return stage
    return replace(stage, num_speculative_tokens=SHORT)


def _parse_registered(registered: Registered, raw: Mapping[str, Any]) -> SpecConfig:
    """Its class may bring a dataclass `Config`, whose fields stand in the dictionary; otherwise it takes `options`."""
    name, path = registered.name, registered.proposer
    _check_of(path, name)
    own_type = _attribute(import_object(path, name), "Config", name)
    if own_type is None:
        if "proposer" in raw:
            raise ConfigError(f"{name}: 'proposer' is not a field; it is {path}, which the package registers.")
        return SpecConfig.parse(name, CustomConfig, {**raw, "proposer": path})
    if not (isinstance(own_type, type) and is_dataclass(own_type)):
        raise ConfigError(f"{name}: Config of {path} must be a dataclass, not {shown(own_type)}.")
    config = SpecConfig.parse(name, own_type, raw)
    return replace(config, own=RegisteredConfig(proposer=path, settings=config.own))


def _check_stages(config: CascadeConfig, num_speculative_tokens: int) -> None:
    """Raises ConfigError for stages that do not fit each other, the policy or the cascade's K."""
    for index, stage in enumerate(config.stages):
        most = stage.num_speculative_tokens
        if most is not None and (type(most) is not int or not 1 <= most <= num_speculative_tokens):
            raise ConfigError(
                f"cascade: stages[{index}]: num_speculative_tokens must be an integer from 1 to "
                f"{num_speculative_tokens}, the cascade's, not {shown(most)}."
            )
    if config.policy == "verify":
        for index, stage in enumerate(config.stages[1:], start=1):
            if not isinstance(stage.own, EarlyExitConfig):
                raise ConfigError(
                    f"cascade: stages[{index}] must be early_exit where policy is 'verify', not {stage.method!r}."
                )
    if {"prompt_lookup", "suffix_lookup"} <= {stage.method for stage in config.stages}:
        raise ConfigError(
            "cascade: stages must not hold prompt_lookup beside suffix_lookup, which does what it does, and more."
        )
    built_in = [stage.method for stage in config.stages if isinstance(stage.own, BuiltInConfig)]
    if len(built_in) > 1:
        raise ConfigError(
            f"cascade: stages must not hold more than one proposer built into vLLM, like {' and '.join(built_in)}."
        )
    if built_in and any(isinstance(stage.own, EarlyExitConfig) and stage.own.is_chosen for stage in config.stages):
        raise ConfigError(f"cascade: exit_layer must be an integer in stages beside {built_in[0]}, not a choice.")
    samples = any(getattr(stage.own, "draft_sample_method", None) == "probabilistic" for stage in config.stages)
    if built_in and samples:
        raise ConfigError(
            f"cascade: draft_sample_method must be 'greedy' or 'coupled' in all stages beside {built_in[0]}, not "
            f"'probabilistic'."
        )


def _parse_stage(index: int, raw: Any, names: Sequence[str]) -> StageConfig:
    if not isinstance(raw, dict) or raw.get("method") not in names:
        found = raw.get("method") if isinstance(raw, dict) else raw
        allowed = f"a dictionary whose method is one of {', '.join(names)}"
        raise ConfigError(f"cascade: stages[{index}] must be {allowed}, not {shown(found)}{meant(found, names)}")
    own = {key: value for key, value in raw.items() if key != "num_speculative_tokens"}
    most = raw.get("num_speculative_tokens")
    for entry in fields(CommonConfig):
        if entry.name in own:
            raise ConfigError(f"cascade: stages[{index}] must not hold {entry.name}, which the whole cascade shares.")
    if raw["method"] in BUILT_IN:
        settings = {key: value for key, value in own.items() if key != "method"}
        built_in = BuiltInConfig.parse(index, raw["method"], settings)
        return StageConfig(method=raw["method"], own=built_in, num_speculative_tokens=most)
    config = parse_config(own)
    return StageConfig(method=config.method, own=config.own, num_speculative_tokens=most)


def _method(name: str) -> Method:
    """The row of a name; a registered method is a custom one."""
    return METHODS.get(name) or BUILT_IN.get(name) or METHODS["custom"]


def runs_target(config: SpecConfig) -> bool:
    """Whether the method, or a stage of it, runs layers of the target, and so writes to its KV cache."""
    return any(_method(name).runs_target for name in _names(config))


def reads_history(config: SpecConfig) -> bool:
    """Whether the method, or a stage of it, needs the tokens on the host."""
    return any(_method(name).reads_history for name in _names(config))


def reads_likeliest(config: SpecConfig) -> bool:
    """Whether the method, or a stage of it, learns what the target found likeliest."""
    return any(_method(name).reads_likeliest for name in _names(config))


def drafts_on_device(config: SpecConfig) -> bool:
    """Whether the method, on Model Runner V2, drafts without the host, and reads tokens where they lie if it does."""
    if any(part.look_ahead for part in parts(config, EarlyExitConfig)):
        return False  # its graphs are of single tokens
    stages = tuple(stage.method for stage in getattr(config.own, "stages", ()))
    return _method(config.method).on_device or stages == DEVICE_CASCADE


def _names(config: SpecConfig) -> list[str]:
    return [config.method, *(stage.method for stage in getattr(config.own, "stages", ()))]


def behind_gate(config: SpecConfig) -> SpecConfig:
    """A method that is alone, as the one stage of a cascade; the same configuration where nothing holds it back."""
    if config.common.gate == "off" or config.method not in GATED_ALONE:
        return config
    return replace(config, own=CascadeConfig(stages=(StageConfig(method=config.method, own=config.own),)))


def build_proposer(config: SpecConfig, context: ProposerContext) -> Proposer:
    """The proposer that `config` names, ready to propose."""
    if isinstance(config.own, CascadeConfig):
        stages = [_build(stage, context) for stage in config.own.stages]
        proposer: Proposer = import_object(_path("cascade"))(config, context, stages)
        return proposer
    return _build(config, context)


def _build(config: SpecConfig | StageConfig, context: ProposerContext) -> Proposer:
    if isinstance(config.own, CustomConfig):
        return _build_custom(config.method, config.own, context)
    proposer: Proposer = import_object(_path(config.method))(config.own, context)
    return proposer


def _path(name: str) -> str:
    path = _method(name).proposer
    assert path is not None
    return path


def _build_custom(method: str, config: CustomConfig, context: ProposerContext) -> Proposer:
    """A proposer of the user's own, which has no part in what ranks tell each other."""
    build = import_object(config.proposer, method)
    options = getattr(config, "settings", config.options)
    try:
        proposer: Proposer = build(options, replace(context, num_ranks=1, rank=0, agreed=lambda value: value))
        missing = [name for name in ("propose", "observe", "forget") if not callable(getattr(proposer, name, None))]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{method}: proposer {config.proposer!r} cannot be built ({shown_error(error)}).") from error
    if missing:
        raise ConfigError(f"{method}: proposer {config.proposer!r} has no method {', '.join(missing)}.")
    return proposer


def option_checks(config: SpecConfig) -> list[Callable[[Mapping[str, Any]], None]]:
    """`check_options` of the user's own proposers in a method: it raises ValueError for options that it refuses."""
    found = [_check_of(part.proposer, config.method) for part in parts(config, CustomConfig)]
    return [check for check in found if check is not None]


def _check_of(path: str, method: str) -> Callable[[Mapping[str, Any]], None] | None:
    check: Callable[[Mapping[str, Any]], None] | None
    check = _attribute(import_object(path, method), "check_options", method)
    if check is not None and not callable(check):
        raise ConfigError(f"{method}: check_options of {path} must be a function, not {shown(check)}.")
    return check


def _attribute(found: Any, name: str, method: str, default: Any = None) -> Any:
    """An attribute of a class of the user's own, whose metaclass may raise anything."""
    try:
        return getattr(found, name, default)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{method}: {name} of the proposer cannot be read ({said(error)}).") from error


def import_object(path: str, method: str = "custom") -> Callable[..., Any]:
    """The class or function at "package.module:name", for this method.

    Raises:
        ConfigError: it is not there, its module raises or exits, or it cannot be called or follows another protocol.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the module does, SystemExit included
        cause = f"{type(error).__name__}: {said(error)}"
        hint = "; PYTHONPATH=. lets it be found in the current folder" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{method}: proposer {shown(path)} cannot be imported ({cause}{hint}).") from error
    if not callable(found):
        raise ConfigError(f"{method}: proposer must name a class, or a function that makes one, not {shown(found)}.")
    version = _attribute(found, "protocol_version", method, PROTOCOL_VERSION)
    if version != PROTOCOL_VERSION:
        raise ConfigError(
            f"{method}: protocol_version of {path} must be {PROTOCOL_VERSION}, that of vllm_specplugins.draft here, "
            f"not {shown(version)}."
        )
    return found  # type: ignore[no-any-return]
