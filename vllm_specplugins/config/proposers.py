"""Defines a frozen dataclass for each method; whole.py checks the fields of a whole configuration."""

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from vllm_specplugins.config.fields import (
    ConfigError,
    check_fields,
    checked,
    choice,
    integer,
    is_integer,
    optional,
    path,
)
from vllm_specplugins.config.learn import LEARN

MAX_NGRAM, MAX_STAGES, MAX_TREE, MAX_LAYERS = 16, 8, 31, 10_000
NOT_WITH_TREE = ("learn", "look_ahead")  # fields that cannot be combined with `tree`


def redis_url(value: str) -> str:
    """Returns the address in a field, or in the variable that "env:NAME" names; "" if that variable is not set."""
    return os.environ.get(value[4:], "") if value.startswith("env:") else value


def _is_redis_url(value: Any) -> bool:
    try:
        parts = urlsplit(redis_url(value) if isinstance(value, str) else "")
        has_place = parts.path if parts.scheme == "unix" else parts.hostname and (parts.port or 6379)
    except ValueError:  # the port is not a number
        return False
    return parts.scheme in ("redis", "rediss", "unix") and bool(has_place)


def _is_http_url(value: Any) -> bool:
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port and "@" not in parts.netloc


def _names_class(value: Any) -> bool:
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))


def _is_keyed(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupConfig:
    """`prompt_lookup`: copies the tokens after an earlier match of the newest tokens.

    Args:
        max_ngram: The longest match to compare. Of equally long matches, the one nearest to the copy position wins.
        min_ngram: The shortest match that gives a draft. At the copy position, one token suffices.
        max_index_bytes: The limit of device memory for references (Model Runner V2), at 4 bytes per token.
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
    """`suffix_lookup`: drafts like `prompt_lookup`, and also copies the commonest continuation of a match in earlier
    outputs.

    Args:
        store_bytes: The size of the store, which is allocated at the start, at 80 bytes per token. A full store evicts
            the oldest unused outputs; those of small tenants go last.
        store_path: The file from which the store is loaded and to which each output is appended. Data-parallel engines
            add ".dp1" and so on to the name.
        save_every_s: The longest time until an output is safe on the disk, in seconds. A power cut loses newer outputs.
        shared: The address of a Redis or Valkey server through which engines share outputs. vLLM logs the address, so
            use env:NAME if it contains a password.
        shared_keep_s: The time for which the server stores an output, in seconds.
    """

    store_bytes: int = integer(1 << 27, 1 << 20, 1 << 36)
    store_path: str | None = optional(path())
    save_every_s: int = integer(300, 1, 1_000_000)
    shared: str | None = optional(
        checked(
            "a redis://, rediss:// or unix:// address, 'env:NAME' for one in an environment variable,", _is_redis_url
        )
    )
    shared_keep_s: int = integer(604_800, 1, 100_000_000)

    def __post_init__(self) -> None:
        check_fields(self, "suffix_lookup")
        if self.shared is not None and find_spec("redis") is None:
            raise ConfigError("suffix_lookup: shared needs the package redis (pip install redis).")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartConfig:
    """The fields of methods that draft with a part of the target.

    Args:
        draft_sample_method: "coupled" samples with the random numbers of verification, so seeded outputs do not depend
            on drafts. "greedy" drafts the likeliest token. "probabilistic" samples independently, with slightly higher
            acceptance.
        learn: Trains the part while it serves; see below.
        tree: The number of tokens to verify as a tree, which then is also K. Meant for 1 to 4 requests; needs Model
            Runner V2.
        rejection: "rounds" verifies siblings in a tree of "probabilistic" drafts one after another (SpecInfer), with
            higher acceptance at temperatures near 1. Seeded outputs then depend on drafts.
    """

    draft_sample_method: str = choice("coupled", "greedy", "probabilistic")
    learn: Any = field(default=None, metadata=LEARN)
    tree: int | None = optional(integer(1, 1, MAX_TREE))
    rejection: str | None = optional(choice("rounds"))

    @property
    def is_trained(self) -> bool:
        """Returns whether the trained part learns while it serves."""
        return self.learn is not None


def _are_layers(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not all(is_integer(layer, 0, MAX_LAYERS - 1) for layer in value):
        return False
    return bool(value) and all(before < after for before, after in pairwise(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitConfig(PartConfig):
    """`early_exit`: drafts with some of the target's layers, its final norm and its head.

    Args:
        exit_layer: The number of first layers that draft.
        layers: The indices of the layers that draft, instead of the first ones. `calibrate --layers` chooses them for a
            model that was not trained for early exits.
        exit_head: The folder of a head from `train-exit-head`, which replaces the target's norm and head.
        look_ahead: The folder of embeddings from `train-look-ahead`, with which one pass drafts all tokens.
    """

    exit_layer: int = integer(1, 1, MAX_LAYERS)
    layers: tuple[int, ...] | None = optional(checked("a list of rising layer numbers", _are_layers))
    exit_head: str | None = optional(path())
    look_ahead: str | None = optional(path())

    def __post_init__(self) -> None:
        check_fields(self, "early_exit")
        if self.layers is None:
            return
        num_layers = len(self.layers)
        if self.exit_layer not in (1, num_layers):
            raise ConfigError(
                f"early_exit: remove exit_layer ({self.exit_layer}) or layers: both choose the layers that draft."
            )
        if self.look_ahead is not None:
            raise ConfigError("early_exit: remove look_ahead: it is untested with layers.")
        are_first = self.layers[-1] == num_layers - 1
        object.__setattr__(self, "exit_layer", num_layers)
        object.__setattr__(self, "layers", None if are_first else tuple(self.layers))

    @property
    def drafting_layers(self) -> int | tuple[int, ...]:
        """Returns the number of first layers that draft, or the indices of the drafting layers."""
        return self.layers or self.exit_layer

    @property
    def one_pass(self) -> bool:
        """Returns whether one pass drafts all tokens, from states instead of tokens."""
        return self.look_ahead is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpConfig(PartConfig):
    """`jump`: a trained part predicts the target's final hidden state, and the target's head decodes it. (A part may
    also predict the input of the last layers, which then run.)

    Args:
        head: The folder of the part from `train-jump`.
    """

    head: str = path()


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(PartConfig):
    """`medusa`: drafts one token per trained head from the target's last hidden state, in one pass.

    Args:
        heads: The folder with at least K heads (with `tree`, a third of that) in the format of FasterDecoding or vLLM.
            (With `model` instead of `heads`, vLLM's method runs, if your vLLM has one.)
        learn: See `early_exit`; it trains the layers of the heads.
    """

    heads: str = path()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """`grammar`: drafts the text that a request's grammar (xgrammar, guidance) forces, such as the keys of a schema.
    As a stage, it extends the drafts of all other stages, at any place in `stages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """`remote`: asks a model on another server for drafts ahead of time, and never waits for it.

    Args:
        url: The address of an OpenAI-compatible server, as in http://HOST:PORT/v1.
        model: The name of the drafter on that server.
        tokenizer: "same" exchanges token ids, for a drafter with the target's tokenizer; "other" exchanges text.
        max_prompt_tokens: The largest number of tokens in a question; older tokens are left out.
        api_key_env: The environment variable that holds the API key.
    """

    url: str = checked("an http:// or https:// address without user and password", _is_http_url)
    model: str = checked("a non-empty string", lambda value: isinstance(value, str) and bool(value))
    tokenizer: str = choice("same", "other")
    max_prompt_tokens: int = integer(4096, 64, 8192)
    api_key_env: str | None = optional(
        checked(
            "the name of an environment variable that is set,",
            lambda value: isinstance(value, str) and value in dict(os.environ),  # os.environ encodes the name first
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomConfig:
    """`custom`: runs your proposer.

    Args:
        proposer: The class, which is called with (options, context) and implements `draft.Proposer`.
        options: The options for the class. A registered class with a `Config` gets an instance of it instead.
    """

    proposer: str = checked("a string like 'package.module:Class'", _names_class)
    options: Any = field(default_factory=dict, metadata={"allowed": "a dictionary with string keys", "fits": _is_keyed})


def _are_stages(value: Any) -> bool:
    return isinstance(value, list | tuple) and 0 < len(value) <= MAX_STAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeConfig:
    """`cascade`: combines several proposers, its stages.

    Args:
        stages: The configurations or names of methods, cheapest first. A stage may set a smaller
            num_speculative_tokens.
        policy: "auto" chooses the stage or sequence of stages with the best expected gain (without a gate, the first
            stage with a draft). "verify" lets each stage check, correct and extend the draft of the previous stage; all
            stages after the first must be `early_exit`.
        tree: See `early_exit`. The draft of `prompt_lookup` joins the tree of `early_exit`, `jump` or `medusa`.
    """

    stages: tuple["StageConfig", ...] = checked(f"a list of 1 to {MAX_STAGES} dictionaries or names", _are_stages)
    policy: str = choice("auto", "verify")
    tree: int | None = optional(integer(1, 1, MAX_TREE))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """A stage of a cascade: the method's name, its configuration, and its limit of draft tokens (None: the limit of the
    cascade)."""

    method: str
    method_config: Any
    num_speculative_tokens: int | None = None
