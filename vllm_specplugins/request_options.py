"""Per-request options: `SamplingParams.extra_args["specplugins"]`, a dictionary, or its JSON text.

The HTTP API takes them in `vllm_xargs`, whose values cannot be dictionaries: hence the text. The front end checks them,
so that a bad one answers 400 and reaches neither the engine nor another request. Knows nothing of vLLM.
"""

import json
from collections.abc import Mapping
from typing import Any

from vllm_specplugins.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError, SpecConfig, shown

Options = Mapping[str, Any]

MAX_CONTEXT = 2**31 - 1


def read_options(raw: Any) -> Options:
    """The dictionary that a request's `extra_args["specplugins"]` is, or holds as text.

    Raises:
        ConfigError: it is neither.
    """
    try:
        options = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        options = None
    if not isinstance(options, Mapping):
        raise ConfigError(f"specplugins must be a dictionary or its JSON text, not {shown(raw)}.")
    return options


def check_options(options: Options, config: SpecConfig, vocab_size: int) -> None:
    """Raises ConfigError for an option that does not exist or whose value is not allowed.

    enabled: whether the request is drafted for at all.
    max_draft: most tokens that it gets drafted in one step.
    max_context: beyond so many tokens of prompt and output together it is not drafted for.
    stages: those of a cascade that draft for it.
    reference: what its output is likely to repeat, for prompt_lookup.

    A proposer of the user's own may have options of its own, which pass.
    """
    stages = [stage.method for stage in getattr(config.own, "stages", ())]
    names = stages or [config.method]
    for key, value in options.items():
        match key:
            case "enabled":
                fits, allowed = isinstance(value, bool), "true or false"
            case "max_draft":
                fits = _is_integer(value, 0, MAX_NUM_SPECULATIVE_TOKENS)
                allowed = f"an integer from 0 to {MAX_NUM_SPECULATIVE_TOKENS}"
            case "max_context":
                fits, allowed = _is_integer(value, 0, MAX_CONTEXT), f"an integer from 0 to {MAX_CONTEXT}"
            case "stages":
                fits = isinstance(value, list | tuple) and bool(value) and all(name in names for name in value)
                allowed = f"a list of one or more of {', '.join(map(repr, dict.fromkeys(names)))}"
            case "reference":
                fits = isinstance(value, str) or _are_token_ids(value, vocab_size)
                allowed = f"a text or a list of token ids from 0 to {vocab_size - 1}"
            case _:
                fits = "custom" in names
                if not fits:
                    known = "enabled, max_draft, max_context, stages, reference"
                    raise ConfigError(f"specplugins: {shown(key)} is not an option; the options are {known}.")
        if not fits:
            raise ConfigError(f"specplugins: {key} must be {allowed}, not {shown(value)}.")


def draft_limit(options: Options, num_tokens: int, max_num_draft: int, max_model_len: int) -> int:
    """Most tokens that a request of this length gets drafted in one step; its context leaves room for one more.

    >>> draft_limit({}, 100, 5, 4096), draft_limit({}, 100, 5, 104), draft_limit({"max_draft": 2}, 100, 5, 4096)
    (5, 3, 2)
    """
    max_num_draft = max(0, min(max_num_draft, max_model_len - num_tokens - 1))
    if not options:
        return max_num_draft
    if not options.get("enabled", True) or num_tokens > options.get("max_context", MAX_CONTEXT):
        return 0
    return min(max_num_draft, int(options.get("max_draft", max_num_draft)))


def _is_integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _are_token_ids(value: Any, vocab_size: int) -> bool:
    return isinstance(value, list | tuple) and all(_is_integer(token, 0, vocab_size - 1) for token in value)
