"""One frozen dataclass per method, checked field by field.

Knows nothing of vLLM. Everything that it refuses, it refuses with one sentence that names the field, the value
and what is allowed.
"""

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

MAX_NUM_SPECULATIVE_TOKENS = 64
MAX_NGRAM = 16


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence for the user."""


def integer(default: int, low: int, high: int) -> Any:
    """A dataclass field that holds an integer in [low, high]."""
    return field(default=default, metadata={"kind": int, "low": low, "high": high})


def number(default: float, low: float, high: float) -> Any:
    """A dataclass field that holds a number in [low, high]."""
    return field(default=default, metadata={"kind": float, "low": low, "high": high})


def text(default: Any = MISSING) -> Any:
    """A dataclass field that holds a non-empty string."""
    return field(default=default, metadata={"kind": str})


def optional_text() -> Any:
    """A dataclass field that holds a non-empty string or None."""
    return field(default=None, metadata={"kind": None})


def choice(default: str, *others: str) -> Any:
    """A dataclass field that holds one of some words."""
    return field(default=default, metadata={"kind": tuple, "words": (default, *others)})


# A client's value may be large: no more of it is written out than may be shown.
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 8
_BRIEF.maxdict = _BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxset = 60
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 200


def shown(value: object) -> str:
    """`value` as an error message quotes it: at most 60 characters of its repr."""
    words = " ".join(_BRIEF.repr(value).split())
    return words if len(words) <= 60 else words[:57] + "..."


def meant(name: object, names: Iterable[str]) -> str:
    """How the refusal of an unknown name ends.

    >>> meant("max_ngrams", ["max_ngram", "min_ngram"]), meant(5, ["max_ngram"])
    ("; did you mean 'max_ngram'?", '.')
    """
    near = difflib.get_close_matches(shown(name), list(names), 1)
    return f"; did you mean {near[0]!r}?" if near else "."


def said(error: BaseException) -> str:
    """What an error says, as another message quotes it: on one line, at most 120 characters, all of which can be sent;
    its type where it says nothing or cannot."""
    try:
        words = " ".join(str(error).split()) or type(error).__name__
    except Exception:
        words = type(error).__name__
    words = words.rstrip(".").encode(errors="backslashreplace").decode()
    return words if len(words) <= 120 else words[:117] + "..."


def _check(entry: Any, value: object) -> tuple[bool, str]:
    """Whether the metadata of a dataclass field allows a value, and what it allows."""
    kind = entry.metadata["kind"]
    is_text = isinstance(value, str) and bool(value)
    if kind is int:
        low, high = entry.metadata["low"], entry.metadata["high"]
        fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return fits, f"an integer from {low} to {high}"
    if kind is float:
        low, high = entry.metadata["low"], entry.metadata["high"]
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        return fits, f"a number from {low:g} to {high:g}"
    if kind is str:
        return is_text, "a non-empty string"
    if kind is None:
        return value is None or is_text, "a non-empty string or null"
    if kind is tuple:
        words = entry.metadata["words"]
        return isinstance(value, str) and value in words, f"one of {', '.join(map(repr, words))}"
    if kind is list:
        return isinstance(value, list | tuple) and bool(value), "a list of dictionaries, at least one"
    return isinstance(value, dict) and all(isinstance(key, str) for key in value), "a dictionary with string keys"


def check_fields(config: Any, method: str) -> None:
    """Raises ConfigError for the first field of a dataclass whose value its metadata does not allow."""
    for entry in fields(config):
        if "kind" not in entry.metadata:  # of a class of the user's own
            continue
        value = getattr(config, entry.name)
        fits, allowed = _check(entry, value)
        if not fits:
            raise ConfigError(f"{method}: {entry.name} must be {allowed}, not {shown(value)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupConfig:
    """`prompt_lookup`: copy what followed the last occurrence of the current n-gram.

    Args:
        max_ngram: longest n-gram, in tokens, that is looked up (tried first).
        min_ngram: shortest n-gram whose match is still drafted from.
        max_index_bytes: most memory of all requests' indexes together, 8 to 25 bytes a token; requests that find it
            full are not drafted for. On Model Runner V2: of all references, 4 bytes a token, and at most 64 MiB.
    """

    max_ngram: int = integer(8, 1, MAX_NGRAM)
    min_ngram: int = integer(2, 1, MAX_NGRAM)
    max_index_bytes: int = integer(1 << 29, 1 << 20, 1 << 40)

    def __post_init__(self) -> None:
        check_fields(self, "prompt_lookup")
        if self.min_ngram > self.max_ngram:
            raise ConfigError(
                f"prompt_lookup: min_ngram must be at most max_ngram, which is {self.max_ngram}, not {self.min_ngram}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixLookupConfig:
    """`suffix_lookup`: what most often followed the longest match, in the request's own text and in earlier outputs.

    Args:
        max_index_bytes: memory of all requests' own texts, 80 bytes a token, for a quarter more than each has and
            512 tokens, taken at the start; requests that find it full are drafted for from the store alone.
        store_bytes: memory of the store of earlier outputs, as much a token, taken at the start; where it is full,
            those used longest ago go.
        store_path: file that the store is loaded from at the start, and saved to; null: it is lost with the process.
        save_every_s: seconds from one save to the next.
        min_confidence: a draft ends before a token whose chance, by what was accepted before, is less.
    """

    max_index_bytes: int = integer(1 << 27, 1 << 20, 1 << 36)
    store_bytes: int = integer(1 << 27, 1 << 20, 1 << 36)
    store_path: str | None = optional_text()
    save_every_s: int = integer(300, 1, 1_000_000)
    min_confidence: float = number(0.1, 0, 1)

    def __post_init__(self) -> None:
        check_fields(self, "suffix_lookup")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecyclingConfig:
    """`token_recycling`: what the target last found likeliest behind each token, token after token.

    Args:
        max_table_bytes: most memory of all tenants' tables together, 5 bytes for each token of the vocabulary and each
            tenant (`cache_salt`); where there is no more, the tenant that asked longest ago loses its own.
    """

    max_table_bytes: int = integer(1 << 25, 1 << 16, 1 << 36)

    def __post_init__(self) -> None:
        check_fields(self, "token_recycling")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitConfig:
    """`early_exit`: the target's first layers, its final norm and its head draft.

    Args:
        exit_layer: how many layers draft, from the first one on; at most as many as the target has.
        draft_sample_method: "greedy" drafts the likeliest token (q is one-hot); "probabilistic" samples from the
            exit at the request's temperature, and is accepted more often where that is high; "coupled" lets the exit
            run the race that verification will run, with the same noise and the request's temperature, top-k, top-p
            and min-p: nearly as often accepted, q is one-hot, and a seeded request says the same whatever is drafted.
        exit_head: folder of a trained head (see proposers/exit_head.py); None is the target's own norm and head.
        look_ahead: folder of trained embeddings (`python -m vllm_specplugins train-look-ahead`) that stand for draft
            tokens not yet known, so that one pass through the layers drafts all; None: a pass for each token.
    """

    exit_layer: int = integer(1, 1, 10_000)
    draft_sample_method: str = choice("greedy", "probabilistic", "coupled")
    exit_head: str | None = optional_text()
    look_ahead: str | None = optional_text()

    def __post_init__(self) -> None:
        check_fields(self, "early_exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpConfig:
    """`jump`: a trained part guesses the state in front of the target's last layers from its embedding of the newest
    token and its last hidden state; these layers run on the target's own KV cache, and its norm and head draft.

    Args:
        head: folder of the trained part (`python -m vllm_specplugins train-jump`), which says what runs.
        draft_sample_method: as of `early_exit`.
    """

    head: str = text()
    draft_sample_method: str = choice("greedy", "probabilistic", "coupled")

    def __post_init__(self) -> None:
        check_fields(self, "jump")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """`medusa`: trained heads on the target's last hidden state draft a token each, in one pass and without layers.

    Args:
        heads: folder of the heads, in the format of FasterDecoding or of vLLM; as many as num_speculative_tokens, at
            least. (A dictionary with `model` in its place asks for vLLM's own method, where that still exists.)
        draft_sample_method: as of `early_exit`.
    """

    heads: str = text()
    draft_sample_method: str = choice("greedy", "probabilistic", "coupled")

    def __post_init__(self) -> None:
        check_fields(self, "medusa")


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeConfig:
    """`cascade`: a proposer that holds proposers.

    Args:
        stages: the configurations of proposers, cheapest first; one alone is that method behind a gate. Of the fields
            that all methods share, a stage may hold num_speculative_tokens: the most that it drafts, at most the
            cascade's.
        policy: "auto": by request and step what the gate expects to gain most: one stage, or one behind the other;
            "verify": each stage's tokens are checked, corrected and extended by the next one, which runs the target;
            "first": the first stage that has something drafts; "extend": each stage continues where the one before it
            ends. Without a gate "auto" is "first".
        gate: "auto" chooses by request and step how many tokens are drafted, down to none; "off" drafts all.
        cost_table: file that the gate's costs are taken from at the start, and saved to while it serves, so that a
            restart need not learn them again; one of another model, device, version or cascade is not used. null:
            they are lost with the process.
    """

    stages: tuple["StageConfig", ...] = field(metadata={"kind": list})
    policy: str = choice("auto", "verify", "first", "extend")
    gate: str = choice("auto", "off")
    cost_table: str | None = optional_text()

    def __post_init__(self) -> None:
        check_fields(self, "cascade")

    @property
    def rule(self) -> str:
        """The policy that is carried out: without a gate nobody chooses."""
        return "first" if (self.policy, self.gate) == ("auto", "off") else self.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One stage: the method's name, its own part, and the most tokens that it drafts; None: as many as the cascade."""

    method: str
    own: Any
    num_speculative_tokens: int | None = None


# Keys of vLLM's own speculative_config that a proposer built into vLLM may have as a stage; vLLM checks their values.
BUILT_IN_SETTINGS = (
    "attention_backend",
    "code_revision",
    "disable_lookahead_block_hashes",  # from vLLM 0.33 on, as draft_lm_head_quantization
    "draft_lm_head_quantization",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
    "quantization",
    "revision",
    "use_local_argmax_reduction",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInConfig:
    """`draft_model`, `eagle`, `eagle3`, `mtp`, `dflash`, `dspark`: a proposer built into vLLM, as a stage of a cascade.

    Args:
        model: the draft model; None is the target itself, whose checkpoint holds the layers of `mtp`.
        settings: what vLLM's own speculative_config shall hold beside it, of BUILT_IN_SETTINGS.
    """

    model: str | None = optional_text()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, index: int, method: str, raw: Mapping[str, Any]) -> Self:
        """Builds the configuration of stages[index] from the user's dictionary (without its "method" key).

        Raises:
            ConfigError: unknown key, or no model.
        """
        for key in raw:
            if key != "model" and key not in BUILT_IN_SETTINGS:
                raise ConfigError(
                    f"cascade: stages[{index}]: {shown(key)} is not a field; the fields are model and settings of "
                    f"vLLM's that docs/configuration.md lists{meant(key, ('model', *BUILT_IN_SETTINGS))}"
                )
        model = raw.get("model")
        if not (isinstance(model, str) and model) and (model is not None or method != "mtp"):
            raise ConfigError(
                f"cascade: stages[{index}]: model must be a non-empty string for {method}, not {shown(model)}."
            )
        return cls(model=model, settings={key: raw[key] for key in raw if key != "model"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomConfig:
    """`custom`: a proposer of the user's own.

    Args:
        proposer: "package.module:Class"; the class is called with (options, context) and follows
            `draft.Proposer`.
        options: handed to the class unchanged.
    """

    proposer: str = text()
    options: dict[str, Any] = field(default_factory=dict, metadata={"kind": dict})

    def __post_init__(self) -> None:
        check_fields(self, "custom")
        module, colon, name = self.proposer.partition(":")
        dotted = [*module.split("."), name]
        if not colon or not all(part.isidentifier() for part in dotted):
            raise ConfigError(f"custom: proposer must be written 'package.module:Class', not {shown(self.proposer)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredConfig(CustomConfig):
    """A method that another package registers, whose class has a `Config` dataclass.

    Args:
        settings: an instance of that, handed to the class instead of options.
    """

    settings: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """What every method takes beside its own fields.

    Args:
        num_speculative_tokens: K, the most draft tokens a request gets in one step.
        time_budget_ms: longest that a proposer that runs on the host, or a stage of a cascade, may take for one step;
            one that takes longer loses that step's drafts.
        verification: "fused" verifies, and samples, with kernels/rejection: exact for every sampling parameter, and a
            seeded request's output depends on neither drafts nor batch; "vllm" leaves both to vLLM.
        rejection: "token" accepts draft tokens one by one, "block" looks at a whole draft before it decides, which
            keeps more of drafts that are sampled (draft_sample_method "probabilistic").
    """

    num_speculative_tokens: int = integer(5, 1, MAX_NUM_SPECULATIVE_TOKENS)
    time_budget_ms: int = integer(1000, 1, 60_000)
    verification: str = choice("fused", "vllm")
    rejection: str = choice("token", "block")

    def __post_init__(self) -> None:
        check_fields(self, "speculative_config")
        if self.verification == "vllm" and self.rejection != "token":
            raise ConfigError(
                f"speculative_config: rejection must be 'token' where verification is 'vllm', not {self.rejection!r}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """One parsed `speculative_config`: the method's name, what all methods share, and the method's own part."""

    method: str
    common: CommonConfig
    own: Any

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
                allowed = ", ".join(names) + meant(key, names)
                raise ConfigError(f"{method}: {shown(key)} is not a field; the fields are {allowed}")
        for entry in fields(own_type):
            if entry.name not in raw and entry.default is MISSING and entry.default_factory is MISSING:
                allowed = f"it must be {_check(entry, None)[1]}" if "kind" in entry.metadata else "it has no default"
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
