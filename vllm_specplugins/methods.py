"""The literal table of methods: the one place to add a proposer. Other packages may register more (custom.py), and
parsing.py makes configurations of what users write."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_specplugins.config import (
    BuiltInConfig,
    CascadeConfig,
    CustomConfig,
    EarlyExitConfig,
    GrammarConfig,
    JumpConfig,
    MedusaConfig,
    PromptLookupConfig,
    RemoteConfig,
    SpecConfig,
    StageConfig,
    SuffixLookupConfig,
)
from vllm_specplugins.custom import build_custom, import_object, may_be_late
from vllm_specplugins.draft import Proposer, ProposerContext


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table: all that anybody asks of a method.

    Args:
        config: the class of the method's own configuration.
        proposer: "module:Class", called with (own configuration, ProposerContext); None: the configuration names it.
            One that runs the target has a function `check` beside it, called with (own configuration,
            target.TargetSizes) before an engine loads anything; it raises ConfigError.
        runs_target: gets `DraftBatch.target`, and K slots of the KV cache past the last token; others get
            `DraftBatch.token_ids`.
        is_lookup: copies what stands in texts, the option `reference` among them, and continues drafts.
        has_tenants: keeps what requests emitted for later ones of the same tenant.
        is_late: drafts on the host of Model Runner V2 from tokens that are a step or two old, so that no step waits
            (v2/speculators/late.py). The device searches a request's text for a lookup.
        cuts_layers: runs some of the target's layers, or enters them (see `enters_states`).
        enters_states: whether an own configuration hands the target's layers states in place of tokens.
        reads_tokens_alone: drafts from them, so that what was recorded can be played to it; else from what an engine or
            a server has.
        knows_adapters: drafts as a request's adapter does.
        rates_drafts: gives its draft tokens acceptance probabilities where it is alone, by which vLLM can trim them.
        own_field: where vLLM has a method of the same name, ours is the one whose dictionary has this field.
    """

    config: type
    proposer: str | None
    runs_target: bool = False
    is_lookup: bool = False
    has_tenants: bool = False
    is_late: bool = False
    cuts_layers: bool = False
    enters_states: Callable[[Any], bool] = lambda own: False
    reads_tokens_alone: bool = True
    knows_adapters: bool = True
    rates_drafts: bool = True
    own_field: str | None = None

    @property
    def check(self) -> str | None:
        """Where the function is that holds a configuration against a target."""
        return self.proposer.partition(":")[0] + ":check" if self.proposer and self.runs_target else None


METHODS: Mapping[str, Method] = {
    "prompt_lookup": Method(
        PromptLookupConfig,
        "vllm_specplugins.proposers.prompt_lookup:PromptLookup",
        is_lookup=True,
    ),
    "suffix_lookup": Method(
        SuffixLookupConfig,
        "vllm_specplugins.proposers.suffix_lookup:SuffixLookup",
        is_lookup=True,
        has_tenants=True,
        is_late=True,
    ),
    "early_exit": Method(
        EarlyExitConfig,
        "vllm_specplugins.proposers.early_exit:EarlyExit",
        runs_target=True,
        cuts_layers=True,
        enters_states=lambda own: own.one_pass,
    ),
    "jump": Method(
        JumpConfig,
        "vllm_specplugins.proposers.jump:Jump",
        runs_target=True,
        cuts_layers=True,
        enters_states=lambda own: True,
        rates_drafts=False,
    ),
    "medusa": Method(
        MedusaConfig,
        "vllm_specplugins.proposers.medusa:Medusa",
        runs_target=True,
        knows_adapters=False,
        rates_drafts=False,
        own_field="heads",
    ),
    "grammar": Method(GrammarConfig, "vllm_specplugins.proposers.grammar:Grammar", reads_tokens_alone=False),
    "remote": Method(
        RemoteConfig, "vllm_specplugins.proposers.remote.proposer:Remote", reads_tokens_alone=False, is_late=True
    ),
    "cascade": Method(CascadeConfig, "vllm_specplugins.cascade.cascade:Cascade"),
    "custom": Method(CustomConfig, None),
}

# Proposers built into vLLM that can be a stage of a cascade; alone, vLLM serves them itself.
BUILT_IN: Mapping[str, Method] = dict.fromkeys(
    ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"),
    Method(BuiltInConfig, "vllm_specplugins.cascade.built_in:BuiltIn"),
)

LOOKUPS = tuple(name for name, row in METHODS.items() if row.is_lookup)


def method_of(name: str) -> Method:
    """The row of a name; a registered method is a custom one."""
    return METHODS.get(name) or BUILT_IN.get(name) or METHODS["custom"]


def drafters(config: SpecConfig) -> list[tuple[Method, Any]]:
    """The row and the own configuration of each method that drafts: of a cascade's stages, or of the one alone."""
    return [(method_of(part.method), part.method_config) for part in config.parts]


def runs_target(config: SpecConfig) -> bool:
    """Whether the method, or a stage of it, runs layers of the target, and so writes to its KV cache."""
    return any(row.runs_target for row, _ in drafters(config))


def reads_history(config: SpecConfig) -> bool:
    """Whether the method, or a stage of it, needs the tokens on the host."""
    return bool(config.stages) or not runs_target(config)  # a cascade's gate does


def enters_states(config: SpecConfig) -> bool:
    """Whether the method, or a stage of it, hands the target's layers states in place of tokens."""
    return any(row.enters_states(own) for row, own in drafters(config))


def has_tenants(config: SpecConfig) -> bool:
    """Whether the method, or a stage of it, keeps what requests emitted, by tenant."""
    return any(row.has_tenants for row, _ in drafters(config)) or learns(config)


def learns(config: SpecConfig) -> bool:
    """Whether the method, or a stage of it, goes on learning while it serves."""
    return any(getattr(own, "learn", None) is not None for row, own in drafters(config) if row.runs_target)


def drafts_late(config: SpecConfig) -> bool:
    """Whether the first of its methods may draft on the host on Model Runner V2 without a wait."""
    return method_of(config.parts[0].method).is_late or (not config.stages and may_be_late(config))


def behind_gate(config: SpecConfig) -> SpecConfig:
    """A method that is alone, as the one stage of a cascade; the same configuration where nothing holds it back."""
    if config.common.gate == "off" or config.stages:
        return config
    return replace(
        config,
        method_config=CascadeConfig(stages=(StageConfig(method=config.method, method_config=config.method_config),)),
    )


def build_proposer(config: SpecConfig | StageConfig, context: ProposerContext) -> Proposer:
    """The proposer that `config` names, ready to propose."""
    own = config.method_config
    if isinstance(own, CustomConfig):
        return build_custom(config.method, own, context)
    row = METHODS["cascade"] if isinstance(own, CascadeConfig) else method_of(config.method)
    build = import_object(str(row.proposer))
    proposer: Proposer
    if isinstance(own, CascadeConfig):
        proposer = build(config, context, [build_proposer(stage, context) for stage in own.stages])
    else:
        proposer = build(own, context)
    return proposer
