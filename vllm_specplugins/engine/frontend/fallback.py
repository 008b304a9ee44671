"""Serves without the plugin's drafts if VLLM_SPECPLUGINS_DISABLE is set or this vLLM lacks a name. The server then runs
without speculation, or with the drafter of vLLM that a cascade contains. With VLLM_SPECPLUGINS_ON_ERROR "refuse"
instead of "serve", the default, a missing name ends the start."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from vllm_specplugins.config import ConfigError
from vllm_specplugins.config.whole import SHORT
from vllm_specplugins.engine.hooks import replaced
from vllm_specplugins.methods import BUILT_IN

logger = logging.getLogger("vllm.specplugins")
_DISABLE, ON_ERROR = "VLLM_SPECPLUGINS_DISABLE", "VLLM_SPECPLUGINS_ON_ERROR"


def is_disabled() -> bool:
    return os.environ.get(_DISABLE, "0") not in ("", "0")


def refuses() -> bool:
    """Returns whether a server must not start without the plugin. Raises ConfigError for an invalid variable."""
    choice = os.environ.get(ON_ERROR) or "serve"
    if choice not in ("serve", "refuse"):
        raise ConfigError(f"{ON_ERROR} must be serve or refuse, not {choice!r}.")
    return choice == "refuse"


def check_choice(problem: str) -> None:
    """Raises ConfigError with the problem if the server must not start without the plugin."""
    if refuses():
        raise ConfigError(f"{problem}; the server stops, because {ON_ERROR} is refuse.")


def vllm_alone(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns vLLM's configuration of the vLLM drafter in a cascade, or None."""
    stages = raw.get("stages")
    for stage in stages if isinstance(stages, list | tuple) else ():
        theirs = stage if isinstance(stage, Mapping) else {"method": stage}
        if theirs.get("method") in BUILT_IN:
            length = raw.get("num_speculative_tokens", None if theirs["method"] == "mtp" else SHORT)
            return {**({"num_speculative_tokens": length} if length else {}), **theirs}
    return None


def serve_without_us(raw: Mapping[str, Any], reason: str, original: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
    """Returns vLLM's configuration without the plugin's method, and logs the reason in one sentence."""
    alone = vllm_alone(raw)
    how = f"with {alone['method']} alone" if alone else "without speculative decoding"
    logger.error("%s; the server runs %s.", reason, how)
    theirs = {"speculative_config": alone, "spec_method": None, "spec_model": None, "spec_tokens": None}
    with replaced(args, theirs):
        return original(args, *more, **kwargs)
