"""A request's options as text: read in bounded time and memory, before anything of them is looked at.

A reference may hold as many tokens as the context, and is read by itself; the rest must be short.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from vllm_specplugins.config import ConfigError, brief

# JSON takes up to three characters for a byte (and nine for a token id): `\u00e9` is two.
CHARACTERS_PER_TOKEN = 24
OTHER_CHARACTERS = 1 << 16
MAX_DIGITS = 100
# Of a custom proposer's own options, characters and values together: what a walk through them may cost.
MAX_OWN_SIZE = 1 << 14
_REFERENCE_KEY = re.compile(r'"reference"\s*:\s*')
_STRING = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])[^"\\\x00-\x1f]*+)*+"')
# Of what stands in a string: what is decoded together, both halves of a character too.
_CHUNK = re.compile(r"(?:[^\\]{1,64}+|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.){1,64}+", re.DOTALL)
_NUMBER = r"\s*+(?:0|[1-9]\d{0,8}+)\s*+"  # of 32 bits; what else there may be is no token id
_IDS = re.compile(rf"\[{_NUMBER}(?:,{_NUMBER})*+\]")
PIECE = 1 << 14  # characters


@dataclass(frozen=True, slots=True)
class Text:
    """A text that JSON holds from `start` to `end`, decoded by pieces whenever it is read: no second one is kept."""

    json: str
    start: int
    end: int

    def __iter__(self) -> Iterator[str]:
        for chunk in _CHUNK.finditer(self.json, self.start, self.end):
            yield scanstring(chunk.group() + '"', 0)[0]

    def __len__(self) -> int:
        """In characters of JSON."""
        return self.end - self.start


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:  # what it costs grows with their square
        raise ValueError
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)


def read_options(raw: Any, max_model_len: int) -> Mapping[str, Any]:
    """The dictionary that a request's options are, or hold as text; ConfigError if neither, or the text is too long."""
    options = raw
    if isinstance(raw, str):
        allowed = OTHER_CHARACTERS + CHARACTERS_PER_TOKEN * max_model_len
        if len(raw) > allowed:
            raise ConfigError(
                f"specplugins must be at most {allowed} characters of JSON text where max_model_len is "
                f"{max_model_len}, not {len(raw)}."
            )
        try:
            options = _decoded(raw, max_model_len)
        except ConfigError:
            raise
        except (ValueError, RecursionError):
            options = None
    if not isinstance(options, Mapping):
        raise ConfigError(f"specplugins must be a dictionary or its JSON text, not {brief(raw)}.")
    return options


def _decoded(text: str, max_model_len: int) -> Any:
    """What JSON text holds: a reference is read by itself, which costs little, and the rest must be short."""
    found = [match.end() for match in islice(_REFERENCE_KEY.finditer(text), 2)]
    start = found[0] if len(found) == 1 else len(text)
    if string := _STRING.match(text, start):
        end = string.end()
        reference: Any = Text(text, start + 1, end - 1)
    elif ids := _IDS.match(text, start):
        end = ids.end()
        check_number(text.count(",", start, end) + 1, max_model_len)
        reference = _numbers(text, start + 1, end - 1)
    else:
        return _decoded_short(text)
    options = _decoded_short(f"{text[:start]}null{text[end:]}")
    if isinstance(options, dict) and "reference" in options:
        return {**options, "reference": reference}
    return _decoded_short(text)


def _numbers(text: str, start: int, end: int) -> bytearray:
    """What stands between the brackets, int32, by pieces: a list of Python's numbers would be ten times as large."""
    numbers = bytearray()
    while start < end:
        stop = text.find(",", min(start + PIECE, end), end)
        stop = end if stop < 0 else stop
        numbers += np.fromstring(text[start:stop], np.int32, sep=",").tobytes()
        start = stop + 1
    return numbers


def _decoded_short(text: str) -> Any:
    """What JSON text holds that is short, and holds few lists and dictionaries."""
    num_brackets = text.count("[") + text.count("{")
    if len(text) > OTHER_CHARACTERS or num_brackets > MAX_OWN_SIZE // 4:
        raise ConfigError(
            f"specplugins: its JSON text must be at most {OTHER_CHARACTERS} characters and {MAX_OWN_SIZE // 4} "
            f"brackets beside the reference, not {len(text)} and {num_brackets}."
        )
    return _DECODER.decode(text)


def check_number(num_tokens: int, max_model_len: int) -> None:
    """Raises ConfigError for a reference of more tokens than a request may have."""
    if num_tokens > max_model_len:
        raise ConfigError(
            f"specplugins: reference must be at most {max_model_len} tokens (max_model_len), not {num_tokens}."
        )
