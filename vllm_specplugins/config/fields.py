"""What a field of a configuration may be, and the sentence that refuses it."""

import difflib
import os
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, field, fields
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

# Settings of other engines, without dashes before them -> whose it is, and names of ours, of which a method has one.
# docs/other-engines.md has them, too.
ELSEWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_lookup_max": ("vLLM", ("max_ngram",)),
    "prompt_lookup_min": ("vLLM", ("min_ngram",)),
    "suffix_decoding_max_cached_requests": ("vLLM", ("store_bytes",)),
    "suffix_decoding_min_token_prob": ("vLLM", ("min_confidence",)),
    "suffix_decoding_max_tree_depth": ("vLLM", ("num_speculative_tokens",)),
    "prompt_lookup_num_tokens": ("transformers", ("num_speculative_tokens",)),
    "num_assistant_tokens": ("transformers", ("num_speculative_tokens",)),
    "max_matching_ngram_size": ("transformers", ("max_ngram",)),
    "assistant_early_exit": ("transformers", ("exit_layer",)),
    "draft_max": ("llama.cpp", ("num_speculative_tokens",)),
    "draft_min": ("llama.cpp", ("min_ngram", "num_speculative_tokens")),
    "draft_p_min": ("llama.cpp", ("min_confidence", "gate")),
    "speculative_num_draft_tokens": ("SGLang", ("num_speculative_tokens",)),
    "speculative_num_steps": ("SGLang", ("num_speculative_tokens",)),
    "NGRAM": ("SGLang", ("prompt_lookup",)),
}
# Methods, fields and commands that were removed, and what to use instead.
GONE = {
    "cost_table": "leave it out, for the gate learns what steps cost while it serves",
    "max_index_bytes": "leave it out, for no index is kept of a request's own text",
    "rejection": "leave it out, for draft tokens are accepted one by one",
    "token_recycling": "use suffix_lookup",
    "train-medusa": "use train-jump, whose parts draft better",
}
# Values of fields as `brief` has them; a list is one.
_POLICY = "'auto' drafts as it did, where that pays; with gate 'off' the first stage that has something drafts"
_LAYER = "`calibrate` finds the layer"
GONE_VALUES = {
    ("exit_layer", "'auto'"): _LAYER,
    ("exit_layer", "a list"): _LAYER,
    ("policy", "'first'"): _POLICY,
    ("policy", "'extend'"): _POLICY,
}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence for the user."""


def checked(allowed: str, fits: Callable[[Any], bool], default: Any = MISSING) -> Any:
    """A dataclass field whose values `fits` knows, and the words for them in docs and refusals."""
    return field(default=default, metadata={"allowed": allowed, "fits": fits})


def integer(default: int, low: int, high: int) -> Any:
    """A dataclass field that holds an integer in [low, high]."""
    return checked(f"an integer from {low} to {high}", lambda value: is_integer(value, low, high), default)


def optional_integer(low: int, high: int) -> Any:
    """The same, or None, which is the default."""
    fits = lambda value: value is None or is_integer(value, low, high)  # noqa: E731
    return checked(f"an integer from {low} to {high} or null", fits, None)


def number(default: float, low: float, high: float) -> Any:
    """A dataclass field that holds a number in [low, high]."""
    fits = lambda value: type(value) in (int, float) and low <= value <= high  # noqa: E731
    return checked(f"a number from {low:g} to {high:g}", fits, default)


def path() -> Any:
    """A dataclass field that holds the path of a file or a folder."""
    return checked("a path", _is_path)


def optional_path() -> Any:
    """The same, or None."""
    return checked("a path or null", lambda value: value is None or _is_path(value), None)


def optional_redis_url() -> Any:
    """A dataclass field that holds the address of a Redis or Valkey server, or None."""
    allowed = "a redis://, rediss:// or unix:// address, 'env:NAME' for one in an environment variable, or null"
    return checked(allowed, lambda value: value is None or (isinstance(value, str) and _is_redis_url(value)), None)


def redis_url(value: str) -> str:
    """The address that such a field holds or names; "" if the variable is not set."""
    return os.environ.get(value[4:], "") if value.startswith("env:") else value


def choice(default: str, *others: str) -> Any:
    """A dataclass field that holds one of some words."""
    words = (default, *others)
    return checked(
        f"one of {', '.join(map(repr, words))}", lambda value: isinstance(value, str) and value in words, default
    )


def is_integer(value: Any, low: int, high: int) -> bool:
    """Whether a value is an integer in [low, high], and no bool."""
    return type(value) is int and low <= value <= high


def _is_path(value: Any) -> bool:
    """Whether the system can be asked for a file of this name."""
    try:
        return isinstance(value, str) and bool(value) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _is_redis_url(value: str) -> bool:
    try:
        parts = urlsplit(redis_url(value))
        return bool(parts.path if parts.scheme == "unix" else parts.hostname and (parts.port or 6379)) and (
            parts.scheme in ("redis", "rediss", "unix")
        )
    except ValueError:  # a port that is none
        return False


def check_fields(config: Any, method: str) -> None:
    """Raises ConfigError for the first field of a dataclass whose value its metadata does not allow; parses some."""
    for entry in fields(config):
        value, metadata = getattr(config, entry.name), entry.metadata
        if "parsed" in metadata:
            value = metadata["parsed"](method, value)
            object.__setattr__(config, entry.name, value)
        if "fits" in metadata and not metadata["fits"](value):  # a class of the user's own may say nothing
            given = brief(value)
            gone = GONE_VALUES.get((entry.name, "a list" if isinstance(value, list) else given))
            instead = f": {gone}" if gone else ""
            raise ConfigError(f"{method}: {entry.name} must be {metadata['allowed']}, not {given}{instead}.")


class _Brief(reprlib.Repr):
    """A client's value may be large: no more of it is looked at than may be shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict = 3, 10
        self.maxlist = self.maxtuple = self.maxset = 10
        self.maxstring = self.maxlong = self.maxother = 200

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)  # or else all would be sorted


def brief(value: object) -> str:
    """`value` as an error message quotes it: at most 60 characters of its repr."""
    return _cut(_Brief().repr(value), 60)


def error_text(error: BaseException) -> str:
    """What an error says, as another message quotes it: on one line, at most 120 characters, all of which can be sent;
    its type where it says nothing or cannot."""
    try:
        words = str(error) or type(error).__name__
    except BaseException:  # it may be of the user's own making, and exit
        words = "an error that cannot be shown"
    return _cut(words.strip().rstrip(".").encode(errors="backslashreplace").decode(), 120)


def _cut(words: str, length: int) -> str:
    words = " ".join(words.split())
    return words if len(words) <= length else words[: length - 3] + "..."


def check_names(given: Iterable[object], names: Sequence[str], method: str) -> None:
    """Raises ConfigError for the first key that is no name of a field."""
    for key in given:
        if key not in names:
            allowed = ", ".join(names) + did_you_mean(key, names)
            raise ConfigError(f"{method}: {brief(key)} is not a field; the fields are {allowed}")


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """How the refusal of an unknown name ends.

    >>> did_you_mean("max_ngrams", ["max_ngram", "min_ngram"]), did_you_mean(5, ["max_ngram"])
    ("; did you mean 'max_ngram'?", '.')
    >>> did_you_mean("prompt_lookup_max", ["max_ngram", "min_ngram"])
    "; prompt_lookup_max is vLLM's; here it is max_ngram."
    """
    names = list(names)
    if isinstance(name, str) and name in GONE:
        return f"; {name} went: {GONE[name]}."
    whose, ours = ELSEWHERE.get(str(name).lstrip("-").replace("-", "_"), ("", ()))
    if own := next((own for own in ours if own in names), None):
        return f"; {name} is {whose}'s; here it is {own}."
    near = difflib.get_close_matches(brief(name), names, 1)
    return f"; did you mean {near[0]!r}?" if near else "."
