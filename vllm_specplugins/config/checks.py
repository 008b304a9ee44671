"""What a field of a configuration may be, and the sentence that refuses it."""

import difflib
import os
import reprlib
from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from itertools import islice
from typing import Any

from vllm_specplugins.config.elsewhere import name_here
from vllm_specplugins.config.gone import NAMES, in_place_of


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


def optional_path() -> Any:
    """A dataclass field that holds a file's path or None."""
    return field(default=None, metadata={"kind": "path"})


def choice(default: str, *others: str) -> Any:
    """A dataclass field that holds one of some words."""
    return field(default=default, metadata={"kind": tuple, "words": (default, *others)})


class _Brief(reprlib.Repr):
    """A client's value may be large: no more of it is looked at than may be shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 8
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 60
        self.maxstring = self.maxlong = self.maxother = 200
        self._left = 60  # values that can be shown

    def repr1(self, x: Any, level: int) -> str:
        self._left -= 1
        return super().repr1(x, level) if self._left > 0 else "..."

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if len(x) > self.maxdict:  # which would be sorted
            x = dict(islice(x.items(), self.maxdict))
        return super().repr_dict(x, level)


def brief(value: object) -> str:
    """`value` as an error message quotes it: at most 60 characters of its repr."""
    words = " ".join(_Brief().repr(value).split())
    return words if len(words) <= 60 else words[:57] + "..."


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """How the refusal of an unknown name ends.

    >>> meant("max_ngrams", ["max_ngram", "min_ngram"]), meant(5, ["max_ngram"])
    ("; did you mean 'max_ngram'?", '.')
    """
    names = list(names)
    if isinstance(name, str) and name in NAMES:
        return f"; {name} went: {NAMES[name]}."
    if elsewhere := name_here(name, names):
        return f"; {elsewhere}."
    near = difflib.get_close_matches(brief(name), names, 1)
    return f"; did you mean {near[0]!r}?" if near else "."


def error_text(error: BaseException) -> str:
    """What an error says, as another message quotes it: on one line, at most 120 characters, all of which can be sent;
    its type where it says nothing or cannot."""
    try:
        words = " ".join(str(error).split()) or type(error).__name__
    except BaseException:  # it may be of the user's own making, and exit
        words = "an error that cannot be shown"
    words = words.rstrip(".").encode(errors="backslashreplace").decode()
    return words if len(words) <= 120 else words[:117] + "..."


def _is_path(value: object) -> bool:
    """Whether the system can be asked for a file of this name."""
    try:
        return b"\0" not in os.fsencode(str(value))
    except UnicodeEncodeError:
        return False


def check_value(entry: Any, value: object) -> tuple[bool, str]:
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
    if kind == "path":
        return value is None or (is_text and _is_path(value)), "a file's path or null"
    if kind is tuple:
        words = entry.metadata["words"]
        return isinstance(value, str) and value in words, f"one of {', '.join(map(repr, words))}"
    if kind is list:
        most = entry.metadata["most"]
        return isinstance(value, list | tuple) and 0 < len(value) <= most, f"a list of 1 to {most} dictionaries"
    return isinstance(value, dict) and all(isinstance(key, str) for key in value), "a dictionary with string keys"


def check_fields(config: Any, method: str) -> None:
    """Raises ConfigError for the first field of a dataclass whose value its metadata does not allow."""
    for entry in fields(config):
        if "kind" not in entry.metadata:  # of a class of the user's own
            continue
        value = getattr(config, entry.name)
        fits, allowed = check_value(entry, value)
        if not fits:
            instead = in_place_of(entry.name, value)
            raise ConfigError(f"{method}: {entry.name} must be {allowed}, not {brief(value)}{instead}.")
