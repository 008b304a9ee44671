"""One frozen dataclass per method; a whole configuration checks its fields (whole.py)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Self
from urllib.parse import urlsplit

from vllm_specplugins.config.fields import (
    ConfigError,
    brief,
    check_fields,
    checked,
    choice,
    did_you_mean,
    integer,
    number,
    optional_integer,
    optional_path,
    optional_redis_url,
    path,
)
from vllm_specplugins.config.learn import LEARN

MAX_NGRAM, MAX_STAGES, MAX_TREE = 16, 8, 31


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupConfig:
    """`prompt_lookup`: copy what followed an earlier occurrence of the newest tokens.

    Args:
        max_ngram: longest match that counts: among those as long, the nearest to where copying would go on is copied.
        min_ngram: shortest match that is drafted from; where copying would go on, one token is enough.
        max_index_bytes: most memory of references on the device (Model Runner V2), 4 bytes a token.
    """

    max_ngram: int = integer(8, 1, MAX_NGRAM)
    min_ngram: int = integer(1, 1, MAX_NGRAM)
    max_index_bytes: int = integer(1 << 26, 1 << 20, 1 << 40)

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
        store_bytes: memory of the store of earlier outputs, 80 bytes a token, taken at the start; the oldest go that
            were not drafted from, those of tenants with little last.
        store_path: file that the store is loaded from, and that each output is added to; null: none. Data-parallel
            engines but the first add ".dp1" and so on.
        save_every_s: seconds from an output to when it is on the disk; a power cut costs what came since.
        shared: Redis or Valkey server through which engines with the same tokenizer share outputs, by tenant. vLLM
            logs it: name one with a password as env:VARIABLE.
        shared_keep_s: seconds that the server keeps an output.
        min_confidence: a draft ends before a token whose acceptance probability is less.
    """

    store_bytes: int = integer(1 << 27, 1 << 20, 1 << 36)
    store_path: str | None = optional_path()
    save_every_s: int = integer(300, 1, 1_000_000)
    shared: str | None = optional_redis_url()
    shared_keep_s: int = integer(604_800, 1, 100_000_000)
    min_confidence: float = number(0.1, 0, 1)

    def __post_init__(self) -> None:
        check_fields(self, "suffix_lookup")
        if self.shared is not None and find_spec("redis") is None:
            raise ConfigError("suffix_lookup: shared needs the package redis: pip install 'vllm-specplugins[shared]'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitConfig:
    """`early_exit`: the target's first layers, its final norm and its head draft.

    Args:
        exit_layer: how many layers draft, from the first one on; at most as many as the target has.
        draft_sample_method: "greedy" drafts the likeliest token; "probabilistic" a sample of q, accepted more often at
            high temperatures; "coupled" what q gives with the noise of verification: nearly as often accepted, and
            outputs by seed do not depend on it.
        exit_head: folder of a head trained for that layer (`train-exit-head`); null: the target's norm and head.
        learn: whether the trained part goes on learning from what the target verifies, or how (see below).
        look_ahead: folder of trained embeddings (`train-look-ahead`) that stand for draft tokens not yet known: one
            pass drafts all; null: a pass for each token.
        tree: verify so many tokens, which num_speculative_tokens then is, as a tree: beside each token of a draft those
            that may stand in its place. For 1 to 4 requests; Model Runner V2 only.
    """

    exit_layer: int = integer(1, 1, 10_000)
    draft_sample_method: str = choice("coupled", "greedy", "probabilistic")
    exit_head: str | None = optional_path()
    learn: Any = field(default=None, metadata=LEARN)
    look_ahead: str | None = optional_path()
    tree: int | None = optional_integer(1, MAX_TREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpConfig:
    """`jump`: a trained part predicts the target's state before its norm and head from the newest token's embedding
    and the last hidden state, and the head decodes it; or the state before the last layers, which then run.

    Args:
        head: folder of the trained part (`python -m vllm_specplugins train-jump`), which says what runs.
        draft_sample_method: as of `early_exit`.
        learn: as of `early_exit`.
        tree: as of `early_exit`.
    """

    head: str = path()
    draft_sample_method: str = choice("coupled", "greedy", "probabilistic")
    learn: Any = field(default=None, metadata=LEARN)
    tree: int | None = optional_integer(1, MAX_TREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """`medusa`: trained heads on the target's last hidden state draft a token each, in one pass and without layers.

    Args:
        heads: folder of the heads, in the format of FasterDecoding or of vLLM; at least num_speculative_tokens, of a
            tree a third; as many as there are where a stage does not say it. (`model` in its place asks for vLLM's own
            method, where that still exists.)
        draft_sample_method: as of `early_exit`.
        learn: as of `early_exit`; of the heads' layers.
        tree: as of `early_exit`.
    """

    heads: str = path()
    draft_sample_method: str = choice("coupled", "greedy", "probabilistic")
    learn: Any = field(default=None, metadata=LEARN)
    tree: int | None = optional_integer(1, MAX_TREE)


def _names_class(value: Any) -> bool:
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))


def _is_http_url(value: Any) -> bool:
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        has_port = parts.port is None or parts.port > 0
    except ValueError:  # a port that is none
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port and "@" not in parts.netloc


def _is_set(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in os.environ.copy())  # a copy: it looks up any text


def _is_keyed(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """`grammar`: where a request's grammar, of xgrammar or guidance, allows one text only, as keys of a schema, that
    text; as a stage it goes on where the others' drafts end, wherever it stands among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """`remote`: a model behind another server drafts, asked ahead and never waited for.

    Args:
        url: of an OpenAI-compatible server: http://HOST:PORT/v1.
        model: what it calls the drafter.
        tokenizer: "same" as the target's: token ids are asked and answered, as vLLM does; "other": text.
        max_prompt_tokens: of the target's, that a question holds, the newest; fewer where the drafter takes fewer.
        api_key_env: the environment variable that holds its key; null: it wants none.
    """

    url: str = checked("an http:// or https:// address without user and password", _is_http_url)
    model: str = checked("a non-empty string", lambda value: isinstance(value, str) and bool(value))
    tokenizer: str = choice("same", "other")
    max_prompt_tokens: int = integer(4096, 64, 8192)
    api_key_env: str | None = checked("the name of an environment variable that is set, or null", _is_set, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomConfig:
    """`custom`: a proposer of the user's own.

    Args:
        proposer: "package.module:Class"; the class is called with (options, context) and follows
            `draft.Proposer`.
        options: handed to the class unchanged; an instance of its `Config` where another package registers it.
    """

    proposer: str = checked("a string like 'package.module:Class'", _names_class)
    options: Any = field(default_factory=dict, metadata={"allowed": "a dictionary with string keys", "fits": _is_keyed})


def _are_stages(value: Any) -> bool:
    return isinstance(value, list | tuple) and 0 < len(value) <= MAX_STAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeConfig:
    """`cascade`: a proposer that holds proposers.

    Args:
        stages: the configurations of proposers, or their methods' names, cheapest first. A stage may have a
            num_speculative_tokens of its own, at most the cascade's.
        policy: "auto": by request and step what the gate expects to gain most: one stage, or one after the other
            (without a gate the first stage that has something); "verify": each stage's tokens are checked, corrected
            and extended by the next one, which runs the target.
        tree: as of `early_exit`, which, or `jump` or `medusa`, is then the second of two stages; what the first one,
            `prompt_lookup`, finds is merged into it.
    """

    stages: tuple["StageConfig", ...] = checked(f"a list of 1 to {MAX_STAGES} dictionaries or names", _are_stages)
    policy: str = choice("auto", "verify")
    tree: int | None = optional_integer(1, MAX_TREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One stage: the method's name, its own part, and the most tokens that it drafts; None: as many as the cascade."""

    method: str
    method_config: Any
    num_speculative_tokens: int | None = None


# Keys of vLLM's own speculative_config that a proposer built into vLLM may have as a stage; vLLM checks their values.
BUILT_IN_SETTINGS = (
    "attention_backend",
    "code_revision",
    "disable_lookahead_block_hashes",  # from vLLM 0.33 on, as draft_lm_head_quantization
    "draft_lm_head_quantization",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "dspark_draft_topk",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
    "parallel_drafting",
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

    model: str | None = None
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
                    f"cascade: stages[{index}]: {brief(key)} is not a field; the fields are model and settings of "
                    f"vLLM's that docs/configuration.md lists{did_you_mean(key, ('model', *BUILT_IN_SETTINGS))}"
                )
        model = raw.get("model")
        if not (isinstance(model, str) and model) and (model is not None or method != "mtp"):
            raise ConfigError(
                f"cascade: stages[{index}]: model must be a non-empty string for {method}, not {brief(model)}."
            )
        return cls(model=model, settings={key: raw[key] for key in raw if key != "model"})
