"""Defines the table of methods, the only place to add a proposer. Other packages may register more methods
(custom.py)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_specplugins.config import (
    CascadeConfig,
    CustomConfig,
    EarlyExitConfig,
    GrammarConfig,
    JumpConfig,
    LookaheadConfig,
    MedusaConfig,
    PromptLookupConfig,
    RemoteConfig,
    SpecConfig,
    StageConfig,
    SuffixLookupConfig,
)
from vllm_specplugins.config.built_in import BuiltInConfig, check_built_in
from vllm_specplugins.custom import build_custom, declares, import_object
from vllm_specplugins.draft import Proposer, ProposerContext


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table.

    Args:
        proposer: "module:Class" in this package, called with (method_config, ProposerContext); None: the configuration
            names it. A module that runs the target has a function `check`, which is called with (method_config,
            target.TargetSizes) before an engine loads anything, and raises ConfigError.
        runs_target: the proposer gets `DraftBatch.target`, and K slots of the KV cache after the last token. Other
            proposers get `DraftBatch.token_ids`.
        is_lookup: it copies tokens from texts, such as the option `reference`, and can extend drafts.
        has_tenants: it drafts from earlier requests of the same tenant, or asks a server whose cache has tenants.
        is_offered: vLLM's runner makes its drafts, which come with the batch (`DraftBatch.offer`).
        stage: "module:Class" of its stage in a cascade.
        check_cascade: raises ConfigError if a cascade cannot have such a stage.
        forces_tokens: the plugin's scheduler adds its tokens after the drafts of all other stages.
        is_late: on Model Runner V2 it drafts on the host from tokens that are one or two steps old, so no step waits
            (v2/speculators/late.py). For a lookup, the device searches the request's text.
        cuts_layers: it runs some of the target's layers, or enters them (see `enters_states`).
        enters_states: whether this configuration gives the target's layers states instead of tokens.
        reads_tokens_alone: recorded tokens suffice to draft; other methods need an engine or a server.
        knows_adapters: its drafts follow a request's LoRA adapter.
        rates_drafts: even without other methods, its draft tokens have acceptance probabilities, by which vLLM trims.
        our_field: a configuration with this field selects this package's method if vLLM has a method of the same name.
    """

    config: type
    proposer: str | None
    runs_target: bool = False
    is_lookup: bool = False
    has_tenants: bool = False
    is_offered: bool = False
    stage: str = "cascade.stage:Stage"
    check_cascade: Callable[[SpecConfig], None] = lambda config: None
    forces_tokens: bool = False
    is_late: bool = False
    cuts_layers: bool = False
    enters_states: Callable[[Any], bool] = lambda method_config: False
    reads_tokens_alone: bool = True
    knows_adapters: bool = True
    rates_drafts: bool = True
    our_field: str | None = None

    @property
    def may_follow(self) -> bool:
        """Returns whether it can draft on the device after a lookup."""
        return self.runs_target or self.is_offered

    @property
    def check(self) -> str | None:
        return f"vllm_specplugins.{str(self.proposer).partition(':')[0]}:check" if self.runs_target else None

    @property
    def stage_kind(self) -> Any:
        return import_object(f"vllm_specplugins.{self.stage}")

    def build(self, *arguments: Any) -> Proposer:
        return import_object(f"vllm_specplugins.{self.proposer}")(*arguments)


METHODS: Mapping[str, Method] = {
    "prompt_lookup": Method(PromptLookupConfig, "proposers.prompt_lookup:PromptLookup", is_lookup=True),
    "suffix_lookup": Method(
        SuffixLookupConfig, "proposers.suffix_lookup:SuffixLookup", is_lookup=True, has_tenants=True, is_late=True
    ),
    "early_exit": Method(
        EarlyExitConfig,
        "proposers.early_exit:EarlyExit",
        runs_target=True,
        cuts_layers=True,
        enters_states=lambda method_config: method_config.one_pass,
    ),
    "jump": Method(
        JumpConfig,
        "proposers.jump:Jump",
        runs_target=True,
        cuts_layers=True,
        enters_states=lambda method_config: True,
        rates_drafts=False,
    ),
    "medusa": Method(
        MedusaConfig,
        "proposers.medusa:Medusa",
        runs_target=True,
        knows_adapters=False,
        rates_drafts=False,
        our_field="heads",
    ),
    "lookahead": Method(LookaheadConfig, "proposers.lookahead:Lookahead", reads_tokens_alone=False, rates_drafts=False),
    "grammar": Method(GrammarConfig, "proposers.grammar:Grammar", forces_tokens=True, reads_tokens_alone=False),
    "remote": Method(
        RemoteConfig, "proposers.remote.proposer:Remote", has_tenants=True, reads_tokens_alone=False, is_late=True
    ),
    "cascade": Method(CascadeConfig, "cascade.cascade:Cascade"),
    "custom": Method(CustomConfig, None, has_tenants=True),
}

# Proposers built into vLLM that can be a stage of a cascade; alone, vLLM serves them itself.
BUILT_IN: Mapping[str, Method] = dict.fromkeys(
    ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"),
    Method(
        BuiltInConfig,
        "cascade.built_in:BuiltIn",
        is_offered=True,
        stage="cascade.built_in:OfferedStage",
        check_cascade=check_built_in,
    ),
)


def method_of(name: str) -> Method:
    """Returns the row of a method; a registered method has the row of `custom`."""
    return METHODS.get(name) or BUILT_IN.get(name) or METHODS["custom"]


def drafters(config: SpecConfig) -> list[tuple[Method, Any]]:
    """Returns the row and the configuration of each stage, or of the single method."""
    return [(method_of(part.method), part.method_config) for part in config.parts]


def runs_target(config: SpecConfig) -> bool:
    return any(row.runs_target for row, _ in drafters(config))


def reads_history(config: SpecConfig) -> bool:
    """Returns whether a method or stage reads the requests' tokens, as a cascade's gate does."""
    return bool(config.stages) or not runs_target(config)


def forces_tokens(config: SpecConfig) -> list[bool]:
    """Returns, for each method or stage, whether the plugin's scheduler adds its tokens."""
    return [row.forces_tokens for row, _ in drafters(config)]


def enters_states(config: SpecConfig) -> bool:
    return any(row.enters_states(method_config) for row, method_config in drafters(config))


def has_tenants(config: SpecConfig) -> bool:
    """Returns whether a method or stage drafts from, or learns from, earlier requests of a tenant."""
    return any(row.has_tenants or getattr(part, "is_trained", False) for row, part in drafters(config))


def drafts_late(config: SpecConfig) -> bool:
    """Returns whether the method, or its first stage, can draft on the host on Model Runner V2 while no step waits."""
    return method_of(config.parts[0].method).is_late or (not config.stages and declares(config, "may_be_late"))


def is_custom_on_device(config: SpecConfig) -> bool:
    """Returns whether the method is a `device.DeviceProposer` of another package, without other stages."""
    return not config.stages and declares(config, "drafts_on_device")


def behind_gate(config: SpecConfig) -> SpecConfig:
    """Makes a single method the only stage of a cascade with a gate. If `gate` is "off", the configuration stays
    unchanged."""
    if config.common.gate == "off" or config.stages:
        return config
    stage = StageConfig(method=config.method, method_config=config.method_config)
    return replace(config, method_config=CascadeConfig(stages=(stage,)))


def build_proposer(config: SpecConfig | StageConfig, context: ProposerContext) -> Proposer:
    method_config = config.method_config
    if isinstance(method_config, CustomConfig):
        return build_custom(config.method, method_config, context)
    if isinstance(method_config, CascadeConfig):  # also of a single method with a gate
        stages = [build_proposer(stage, context) for stage in method_config.stages]
        return METHODS["cascade"].build(config, context, stages)
    return method_of(config.method).build(method_config, context)
