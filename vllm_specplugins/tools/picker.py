"""Selects the methods that a tool runs, by name, by name and K, or as a --speculative-config."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

from vllm_specplugins.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError, brief, did_you_mean
from vllm_specplugins.config.fields import error_text
from vllm_specplugins.methods import METHODS
from vllm_specplugins.parsing import parse_config, registered_methods

NONE = "none"
Config = dict[str, Any]
Named = Mapping[str, Sequence[tuple[str, Config]]]

_NGRAM = {"num_speculative_tokens": 5, "prompt_lookup_max": 8, "prompt_lookup_min": 2}
_LOOKUP, _EXIT = {"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}
# Names in addition to this package's methods with their defaults; None is no speculation.
NAMED: Mapping[str, Config | None] = {
    NONE: None,
    "ngram": {"method": "ngram", **_NGRAM},
    "ngram_gpu": {"method": "ngram_gpu", **_NGRAM},
    "early_exit": {**_EXIT, "num_speculative_tokens": 3},
    "cascade": {"method": "cascade", "stages": [_LOOKUP, _EXIT]},
}


def is_ours(config: Config) -> bool:
    return config.get("method") in (*METHODS, *registered_methods())


def pick_methods(wanted: Sequence[str]) -> dict[str, Config | None]:
    """Returns configurations by name. No speculation comes first, even if the user does not name it.

    >>> list(pick_methods(["ngram:31,prompt_lookup", '{"method": "ngram", "num_speculative_tokens": 2}']))
    ['none', 'ngram:31', 'prompt_lookup', 'ngram:2']
    """
    picked = {NONE: None, **{name: config for name, config in pick(wanted, "--methods").items() if config}}
    if len(picked) == 1:
        raise ConfigError(f"--methods must name a method besides {NONE}.")
    return picked


def pick(wanted: Sequence[str], option: str, named: Named | None = None) -> dict[str, Config]:
    """Returns configurations by name, without duplicates. Each text of `wanted` contains names separated by commas, or
    a --speculative-config in JSON; NAME:K is a method with K draft tokens. `named` maps names to configurations; the
    default is NAMED, and this package's and registered methods under their names."""
    if named is None:
        names = dict.fromkeys([*NAMED, *METHODS, *registered_methods()])
        named = {name: [(name, NAMED.get(name, {"method": name}) or {})] for name in names}
    picked: dict[str, Config] = {}
    for text in wanted:
        for name, config in [_parsed(text, option)] if text.lstrip().startswith("{") else _by_name(text, option, named):
            if is_ours(config):
                parse_config(config)
            if config not in picked.values():
                numbered = chain([name], (f"{name} #{number}" for number in count(2)))
                picked[next(free for free in numbered if free not in picked)] = config
    return picked


def _by_name(text: str, option: str, named: Named) -> Iterator[tuple[str, Config]]:
    for word in filter(None, map(str.strip, text.split(","))):
        name, colon, number = word.partition(":")
        if name not in named:
            names = ", ".join(named)
            raise ConfigError(f"{option} must be {names}, or JSON, not {brief(word)}{did_you_mean(name, named)}")
        if colon and not (number.isdecimal() and 1 <= int(number[:9]) <= MAX_NUM_SPECULATIVE_TOKENS):
            allowed = f"1 to {MAX_NUM_SPECULATIVE_TOKENS}"
            raise ConfigError(f"{option}: K must be {allowed}, as in {name}:5, not {brief(word)}.")
        for its_name, config in named[name]:
            if not colon:
                yield its_name, config
            elif config:
                yield f"{its_name}:{number}", {**config, "num_speculative_tokens": int(number)}


def _parsed(text: str, option: str) -> tuple[str, Config]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} must be names or JSON, not {brief(text)} ({error_text(error)}).") from None
    match config:
        case {"method": str() as name, "num_speculative_tokens": int() as number}:
            return f"{name}:{number}", config
        case {"method": str() as name}:
            return name, config
    raise ConfigError(f'{option} must name a method, as in {{"method": "prompt_lookup"}}, not {brief(text)}.')
