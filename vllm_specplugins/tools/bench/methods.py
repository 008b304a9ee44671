"""What is compared: methods by name, or as the user would give them to vLLM."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specplugins.config import ConfigError, shown
from vllm_specplugins.methods import METHODS, parse_config, registered_methods

NONE = "none"
Config = dict[str, Any]

_DRAFTS = {"num_speculative_tokens": 5}
_LOOKUP, _EXIT = {"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}
# What a name stands for; None is no speculation. Every other method of ours stands for its defaults.
NAMED: Mapping[str, Config | None] = {
    NONE: None,
    "ngram": {"method": "ngram", **_DRAFTS, "prompt_lookup_max": 8, "prompt_lookup_min": 2},
    "prompt_lookup": {**_LOOKUP, **_DRAFTS},
    "early_exit": {**_EXIT, "num_speculative_tokens": 3},
    "cascade": {"method": "cascade", **_DRAFTS, "policy": "first", "stages": [_LOOKUP, _EXIT]},
}


def pick_methods(wanted: Sequence[str]) -> dict[str, Config | None]:
    """Names and configurations of what is compared, no speculation first, whether it is asked for or not.

    Args:
        wanted: each names with commas between them, or a value of --speculative-config in JSON.

    Raises:
        ConfigError: no method of that name, no JSON, or a configuration that its method refuses.

    >>> list(pick_methods(["ngram,prompt_lookup", '{"method": "ngram", "num_speculative_tokens": 2}']))
    ['none', 'ngram', 'prompt_lookup', 'ngram 2']
    """
    configs: list[tuple[str, Config]] = []
    for text in wanted:
        configs += [_parsed(text)] if text.lstrip().startswith("{") else _named(text)
    picked: dict[str, Config | None] = {NONE: None}
    for name, config in configs:
        if config["method"] in (*METHODS, *registered_methods()):
            parse_config(config)
        if config not in picked.values():
            picked[_free_name(name, picked)] = config
    if len(picked) == 1:
        raise ConfigError(f"--methods must name a method beside {NONE}.")
    return picked


def _named(text: str) -> list[tuple[str, Config]]:
    found = []
    for name in filter(None, map(str.strip, text.split(","))):
        known = dict.fromkeys([*NAMED, *METHODS, *registered_methods()])
        if name not in known:
            names = ", ".join(known)
            raise ConfigError(f"--methods must be of {names}, or a speculative_config in JSON, not {shown(name)}.")
        config = NAMED.get(name, {"method": name, **_DRAFTS})
        if config is not None:
            found.append((name, config))
    return found


def _parsed(text: str) -> tuple[str, Config]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--methods must be names or JSON, not {shown(text)} ({error}).") from None
    if not isinstance(config.get("method"), str):
        raise ConfigError(f'--methods must name a method, as in {{"method": "prompt_lookup"}}, not {shown(text)}.')
    return config["method"], dict(config)


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """The name, with a number if it is taken."""
    number = 1
    while (free := name if number == 1 else f"{name} {number}") in taken:
        number += 1
    return free
