"""One frozen dataclass per proposer, checked field by field."""

from dataclasses import dataclass, field
from typing import Any

from vllm_specplugins.config.checks import (
    ConfigError,
    brief,
    check_fields,
    choice,
    integer,
    number,
    optional_path,
    optional_text,
    text,
)

MAX_NGRAM, MAX_NUM_LAYERS = 16, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupConfig:
    """`prompt_lookup`: copy what followed an earlier occurrence of the newest tokens.

    Args:
        max_ngram: longest match that counts: among those as long, the nearest to where copying would go on is copied.
        min_ngram: shortest match that is drafted from; where copying would go on, one token is enough.
        max_index_bytes: most memory of references on the device (Model Runner V2), 4 bytes a token, at most 64 MiB.
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
        max_index_bytes: memory of all requests' own texts, 80 bytes a token, taken at the start; requests that find it
            full are drafted for from the store alone.
        store_bytes: memory of the store of earlier outputs, 80 bytes a token, taken at the start; where it is full,
            those used longest ago go, and first those of tenants that did not ask again.
        store_path: file that the store is loaded from, and that each output is added to; null: it is lost with the
            process. Data-parallel engines but the first add ".dp1" and so on.
        save_every_s: seconds from an output to when it is on the disk; a power cut costs what came since.
        min_confidence: a draft ends before a token whose acceptance probability is less.
    """

    max_index_bytes: int = integer(1 << 27, 1 << 20, 1 << 36)
    store_bytes: int = integer(1 << 27, 1 << 20, 1 << 36)
    store_path: str | None = optional_path()
    save_every_s: int = integer(300, 1, 1_000_000)
    min_confidence: float = number(0.1, 0, 1)

    def __post_init__(self) -> None:
        check_fields(self, "suffix_lookup")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitConfig:
    """`early_exit`: the target's first layers, its final norm and its head draft.

    Args:
        exit_layer: how many layers draft, from the first one on; at most as many as the target has.
        draft_sample_method: "greedy" drafts the likeliest token (q is one-hot); "probabilistic" samples from the
            exit at the request's temperature, and is accepted more often where that is high; "coupled" lets the exit
            run the race that verification will run, with the same noise and the request's temperature, top-k, top-p
            and min-p: nearly as often accepted, q is one-hot, and a seeded request says the same whatever is drafted.
        exit_head: folder of a head trained for that layer (`train-exit-head`); null: the target's norm and head.
        look_ahead: folder of trained embeddings (`train-look-ahead`) that stand for draft tokens not yet known, so that
            one pass through the layers drafts all; null: a pass for each token.
    """

    exit_layer: int = integer(1, 1, MAX_NUM_LAYERS)
    draft_sample_method: str = choice("coupled", "greedy", "probabilistic")
    exit_head: str | None = optional_text()
    look_ahead: str | None = optional_text()

    def __post_init__(self) -> None:
        check_fields(self, "early_exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpConfig:
    """`jump`: a trained part predicts the target's state before its norm and head from the newest token's embedding
    and the last hidden state, and the head decodes it; or the state before the last layers, which then run.

    Args:
        head: folder of the trained part (`python -m vllm_specplugins train-jump`), which says what runs.
        draft_sample_method: as of `early_exit`.
    """

    head: str = text()
    draft_sample_method: str = choice("coupled", "greedy", "probabilistic")

    def __post_init__(self) -> None:
        check_fields(self, "jump")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """`medusa`: trained heads on the target's last hidden state draft a token each, in one pass and without layers.

    Args:
        heads: folder of the heads, in the format of FasterDecoding or of vLLM; at least num_speculative_tokens.
            (`model` in its place asks for vLLM's own method, where that still exists.)
        draft_sample_method: as of `early_exit`.
    """

    heads: str = text()
    draft_sample_method: str = choice("coupled", "greedy", "probabilistic")

    def __post_init__(self) -> None:
        check_fields(self, "medusa")


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
            raise ConfigError(f"custom: proposer must be written 'package.module:Class', not {brief(self.proposer)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredConfig(CustomConfig):
    """A method that another package registers, whose class has a `Config` dataclass.

    Args:
        settings: an instance of that, handed to the class instead of options.
    """

    settings: Any = None
