"""Defines the allowed values of configuration fields, and the error messages for other values."""

import difflib
import os
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, field, fields
from itertools import islice
from typing import Any

# Settings of other engines, without leading dashes -> the engine, and this package's names; a method has one of them.
# docs/configuration.md also lists them.
ELSEWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_lookup_max": ("vLLM", ("max_ngram",)),
    "prompt_lookup_min": ("vLLM", ("min_ngram",)),
    "suffix_decoding_max_cached_requests": ("vLLM", ("store_bytes",)),
    "suffix_decoding_min_token_prob": ("vLLM", ("gate",)),
    "suffix_decoding_max_tree_depth": ("vLLM", ("num_speculative_tokens",)),
    "suffix_decoding_max_spec_factor": ("vLLM", ("gate",)),
    "num_speculative_tokens_per_batch_size": ("vLLM", ("gate",)),
    "enable_adaptive_verification": ("vLLM", ("gate",)),
    "draft_confidence_threshold": ("vLLM", ("gate",)),
    "prompt_lookup_num_tokens": ("transformers", ("num_speculative_tokens",)),
    "num_assistant_tokens": ("transformers", ("num_speculative_tokens",)),
    "max_matching_ngram_size": ("transformers", ("max_ngram",)),
    "assistant_early_exit": ("transformers", ("exit_layer",)),
    "draft_max": ("llama.cpp", ("num_speculative_tokens",)),
    "draft_min": ("llama.cpp", ("min_ngram", "num_speculative_tokens")),
    "draft_p_min": ("llama.cpp", ("gate",)),
    "speculative_num_draft_tokens": ("SGLang", ("num_speculative_tokens",)),
    "speculative_num_steps": ("SGLang", ("num_speculative_tokens",)),
    "NGRAM": ("SGLang", ("prompt_lookup",)),
}


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one sentence for the user."""


def checked(allowed: str, fits: Callable[[Any], bool], default: Any = MISSING) -> Any:
    """Returns a dataclass field for values that satisfy `fits`; docs and error messages quote `allowed`."""
    return field(default=default, metadata={"allowed": allowed, "fits": fits})


def optional(entry: Any) -> Any:
    """Makes a field optional; its default is None."""
    allowed, fits = entry.metadata["allowed"], entry.metadata["fits"]
    return checked(f"{allowed} or null", lambda value: value is None or fits(value), None)


def integer(default: int, low: int, high: int) -> Any:
    """Returns a dataclass field for an integer in [low, high]."""
    return checked(f"an integer from {low} to {high}", lambda value: is_integer(value, low, high), default)


def number(default: float, low: float, high: float) -> Any:
    """Returns a dataclass field for a number in [low, high]."""
    fits = lambda value: type(value) in (int, float) and low <= value <= high  # noqa: E731
    return checked(f"a number from {low:g} to {high:g}", fits, default)


def path() -> Any:
    """Returns a dataclass field for the path of a file or folder."""
    return checked("a path", _is_path)


def choice(default: str, *others: str) -> Any:
    """Returns a dataclass field for one of several words; the first is the default."""
    words = (default, *others)
    fits = lambda value: isinstance(value, str) and value in words  # noqa: E731
    return checked(f"one of {', '.join(map(repr, words))}", fits, default)


def is_integer(value: Any, low: int, high: int) -> bool:
    """Returns whether a value is an integer in [low, high] and no bool."""
    return type(value) is int and low <= value <= high


def _is_path(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(value) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def check_fields(config: Any, method: str) -> None:
    """Parses the fields that have a parser. Raises ConfigError for the first value that is not allowed."""
    for entry in fields(config):
        value, metadata = getattr(config, entry.name), entry.metadata
        if "parsed" in metadata:
            value = metadata["parsed"](method, value)
            object.__setattr__(config, entry.name, value)
        if "fits" in metadata and not metadata["fits"](value):  # other packages' fields need no metadata
            raise ConfigError(f"{method}: {entry.name} must be {metadata['allowed']}, not {brief(value)}.")


class _Brief(reprlib.Repr):
    """Formats a client's value, and reads only the part that it shows, since the value may be large."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict = 3, 10
        self.maxlist = self.maxtuple = self.maxset = 10
        self.maxstring = self.maxlong = self.maxother = 200

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)  # or else all would be sorted


def brief(value: object) -> str:
    """Quotes `value` for an error message: at most 60 characters of its repr."""
    return one_line(_Brief().repr(value), 60)


def error_text(error: BaseException) -> str:
    """Returns an error's text for another message: one line of at most 120 characters, all of which can be encoded."""
    try:
        words = str(error) or type(error).__name__
    except BaseException:  # the class may be the user's
        words = "an error that cannot be shown"
    return one_line(words.strip().rstrip("."), 120)


def one_line(words: str, length: int) -> str:
    r"""Returns text of others for a message or the log, without line breaks and control characters.

    >>> one_line("red \x1b[31m, a line\x85 and \ud800", 60)
    'red \\x1b[31m, a line and \\ud800'
    """
    words = " ".join(words.split())[: length + 1]
    words = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
    return words if len(words) <= length else words[: length - 3] + "..."


def check_names(given: Iterable[object], names: Sequence[str], method: str) -> None:
    """Raises ConfigError for the first key that is not a field."""
    for key in given:
        if key not in names:
            allowed = ", ".join(names) + did_you_mean(key, names)
            raise ConfigError(f"{method}: {brief(key)} is not a field; the fields are {allowed}")


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Returns the end of an error message for an unknown name: a suggestion, or a full stop.

    >>> did_you_mean("max_ngrams", ["max_ngram", "min_ngram"]), did_you_mean(5, ["max_ngram"])
    ("; did you mean 'max_ngram'?", '.')
    >>> did_you_mean("prompt_lookup_max", ["max_ngram", "min_ngram"])
    "; prompt_lookup_max is vLLM's; here it is max_ngram."
    """
    names = list(names)
    engine, ours = ELSEWHERE.get(str(name).lstrip("-").replace("-", "_"), ("", ()))
    if match := next((our_name for our_name in ours if our_name in names), None):
        return f"; {name} is {engine}'s; here it is {match}."
    near = difflib.get_close_matches(brief(name), names, 1)
    return f"; did you mean {near[0]!r}?" if near else "."
