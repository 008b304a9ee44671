"""Which methods a tool is to run: by name, by name and K, or as the user would give them to vLLM. One for all tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specplugins.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError, brief
from vllm_specplugins.methods import METHODS, parse_config, registered_methods

NONE = "none"
Config = dict[str, Any]
Named = Mapping[str, Sequence[tuple[str, Config]]]

_NGRAM = {"num_speculative_tokens": 5, "prompt_lookup_max": 8, "prompt_lookup_min": 2}
_LOOKUP, _EXIT = {"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}
# What a name stands for, where that is not a method of ours with its defaults; None is no speculation.
NAMED: Mapping[str, Config | None] = {
    NONE: None,
    "ngram": {"method": "ngram", **_NGRAM},
    "ngram_gpu": {"method": "ngram_gpu", **_NGRAM},
    "early_exit": {**_EXIT, "num_speculative_tokens": 3},
    "cascade": {"method": "cascade", "stages": [_LOOKUP, _EXIT]},
}


def pick_methods(wanted: Sequence[str]) -> dict[str, Config | None]:
    """Names and configurations of what is compared, no speculation first, whether it is asked for or not.

    Args:
        wanted: each names with commas between them, or a value of --speculative-config in JSON. NAME:K is the method
            with K draft tokens.

    Raises:
        ConfigError: no method of that name, no JSON, or a configuration that its method refuses.

    >>> list(pick_methods(["ngram:31,prompt_lookup", '{"method": "ngram", "num_speculative_tokens": 2}']))
    ['none', 'ngram:31', 'prompt_lookup', 'ngram:2']
    """
    found = pick(wanted, "--methods", usual())
    picked = {NONE: None, **{name: config for name, config in found.items() if config}}
    if len(picked) == 1:
        raise ConfigError(f"--methods must name a method beside {NONE}.")
    for config in filter(None, picked.values()):
        if config["method"] in (*METHODS, *registered_methods()):
            parse_config(config)
    return picked


def usual() -> Named:
    """What stands for itself: our methods, registered ones, and those in NAMED."""
    known = dict.fromkeys([*NAMED, *METHODS, *registered_methods()])
    return {name: [(name, NAMED.get(name, {"method": name}) or {})] for name in known}


def pick(wanted: Sequence[str], option: str, named: Named) -> dict[str, Config]:
    """What each name stands for, with its K where it says one, and each value in JSON; no configuration twice."""
    picked: dict[str, Config] = {}
    for text in wanted:
        found = [_parsed(text, option)] if text.lstrip().startswith("{") else _by_name(text, option, named)
        for name, config in found:
            if config not in picked.values():
                picked[_free_name(name, picked)] = config
    return picked


def _by_name(text: str, option: str, named: Named) -> list[tuple[str, Config]]:
    found: list[tuple[str, Config]] = []
    for word in filter(None, map(str.strip, text.split(","))):
        name, _, count = word.partition(":")
        if name not in named:
            names = ", ".join(named)
            raise ConfigError(f"{option} must be of {names}, or a speculative_config in JSON, not {brief(word)}.")
        if name == word:
            found += named[name]
            continue
        if not (count.isdecimal() and 1 <= int(count[:9]) <= MAX_NUM_SPECULATIVE_TOKENS):
            allowed = f"1 to {MAX_NUM_SPECULATIVE_TOKENS}"
            raise ConfigError(f"{option}: K must be {allowed}, as in {name}:5, not {brief(word)}.")
        found += [(f"{its}:{count}", {**own, "num_speculative_tokens": int(count)}) for its, own in named[name] if own]
    return found


def _parsed(text: str, option: str) -> tuple[str, Config]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} must be names or JSON, not {brief(text)} ({type(error).__name__}).") from None
    if not isinstance(config.get("method"), str):
        raise ConfigError(f'{option} must name a method, as in {{"method": "prompt_lookup"}}, not {brief(text)}.')
    count = config.get("num_speculative_tokens")
    return f"{config['method']}:{count}" if isinstance(count, int) else config["method"], dict(config)


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """The name, with a number if it is taken."""
    number = 1
    while (free := name if number == 1 else f"{name} #{number}") in taken:
        number += 1
    return free
