"""Per-request options: `SamplingParams.extra_args["specplugins"]`, a dictionary, or its JSON text.

The HTTP API takes them in `vllm_xargs`, whose values cannot be dictionaries: hence the text. They are a client's data,
and a client may cost only itself: the front end bounds, checks and resolves them, so that a bad one answers 400 and
reaches neither the engine nor another request. Knows nothing of vLLM.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplugins.config import (
    MAX_NUM_SPECULATIVE_TOKENS,
    ConfigError,
    CustomConfig,
    SpecConfig,
    brief,
    methods_of,
    stage_configs,
    stage_names,
)
from vllm_specplugins.options_text import MAX_OWN_SIZE, Text, check_number
from vllm_specplugins.options_text import read_options as read_options

Options = Mapping[str, Any]

MAX_CONTEXT = 2**31 - 1
# Of a reference; four are usual. One with more tokens than max_model_len is refused in any case.
BYTES_PER_TOKEN = 8
MAX_NESTING = 8
SETTINGS = "enabled", "max_draft", "max_context", "stages", "learn"  # which no proposer of the user's own reads
REFERENCE, DIGEST, TENANT = "reference", "reference_digest", "tenant"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request's options are held against.

    Args:
        config: the method that is served.
        vocab_size: token ids are in [0, vocab_size).
        max_model_len: most tokens that a request can have, and its reference.
    """

    config: SpecConfig
    vocab_size: int
    max_model_len: int

    @property
    def stages(self) -> list[str]:
        """The methods that draft: of a method alone its own."""
        return methods_of(self.config)

    @property
    def passes_own(self) -> bool:
        """Whether a proposer that is not ours may have options of its own."""
        return bool(stage_configs(self.config, CustomConfig))


def understood(options: Options, limits: Limits) -> dict[str, Any]:
    """The options, made anew from what was understood of them: nothing else of a client's travels any further.

    enabled: whether the request is drafted for at all.
    max_draft: most tokens that it gets drafted in one step.
    max_context: beyond so many tokens of prompt and output together it is not drafted for.
    stages: those of a cascade that draft for it, by name, or by number and name as in metrics.
    reference: what its output is likely to repeat, for prompt_lookup and suffix_lookup.
    learn: whether its output may be drafted from for later requests, by suffix_lookup.

    A proposer of the user's own may have options of its own, which pass if they are small.

    Raises:
        ConfigError: an option does not exist, or its value is not allowed.
    """
    found: dict[str, Any] = {}
    own: dict[Any, Any] = {}
    for key, value in options.items():
        match key:
            case "enabled" | "learn":
                fits, allowed = isinstance(value, bool), "true or false"
            case "max_draft":
                fits = _is_integer(value, 0, MAX_NUM_SPECULATIVE_TOKENS)
                allowed = f"an integer from 0 to {MAX_NUM_SPECULATIVE_TOKENS}"
            case "max_context":
                fits, allowed = _is_integer(value, 0, MAX_CONTEXT), f"an integer from 0 to {MAX_CONTEXT}"
            case "stages":
                found[key] = _stages(value, limits)
                continue
            case "reference":
                _check_reference(value, limits)
                found[key] = value
                continue
            case _:
                if not limits.passes_own:
                    known = "enabled, max_draft, max_context, stages, reference, learn"
                    raise ConfigError(f"specplugins: {brief(key)} is not an option; the options are {known}.")
                own[key] = value
                continue
        if not fits:
            raise ConfigError(f"specplugins: {key} must be {allowed}, not {brief(value)}.")
        found[key] = value
    try:
        return {**_copied(own, MAX_NESTING, [MAX_OWN_SIZE]), **found}
    except _CannotTravel:
        raise ConfigError(
            f"specplugins: options of the proposer's own must be at most {MAX_OWN_SIZE} values and characters of UTF-8 "
            f"in {MAX_NESTING} levels, and integers of 64 bits, not {brief(own)}."
        ) from None


def _stages(value: Any, limits: Limits) -> list[str]:
    """The names of stages that a request allows, each once."""
    methods, by_name = limits.stages, dict[str, list[str]]()
    for index, name in enumerate(stage_names(methods)):
        by_name.setdefault(methods[index], []).append(name)
        by_name[f"{index} {methods[index]}"] = [name]
    fits = isinstance(value, list | tuple) and 0 < len(value) <= len(methods)
    if not fits or not all(isinstance(name, str) and name in by_name for name in value):
        allowed = ", ".join(map(repr, dict.fromkeys(methods)))
        most = f"at most {len(methods)}, each one" if len(methods) > 1 else "one"
        raise ConfigError(f"specplugins: stages must be a list of {most} of {allowed}, not {brief(value)}.")
    return sorted({name for asked in value for name in by_name[asked]})


def without_own(options: Options, limits: Limits) -> dict[str, Any]:
    """What is left of resolved options of which a proposer of the user's own shall see nothing: it does not draft."""
    owns = [part.own for part in limits.config.stages or (limits.config,)]
    names = [
        name
        for name, own in zip(stage_names(limits.stages), owns, strict=True)
        if not isinstance(own, CustomConfig) and name in options.get("stages", (name,))
    ]
    kept = {key: options[key] for key in options if key in (*SETTINGS, REFERENCE, DIGEST)}
    return {**kept, "stages": names} if names else {**kept, "enabled": False}


def resolved(options: Options, token_ids: Sequence[int] | bytearray | None, limits: Limits) -> dict[str, Any]:
    """Checked options as they travel to the engine: a reference as bytes, with the digest that names its content.

    Args:
        options: as `understood`.
        token_ids: those of a reference that is a text, numbers or int32 bytes; None: it is none.
        limits: see there.

    Raises:
        ConfigError: the text has too many tokens, or tokens that the model does not have.
    """
    found = {key: options[key] for key in options if key not in (REFERENCE, DIGEST, TENANT)}
    reference = options.get(REFERENCE)
    if token_ids is not None:
        reference = token_ids
        _check_token_ids(reference, limits)
    if reference:
        is_ready = isinstance(reference, bytearray)  # and sent as it is: it may be most of what a request takes
        found[REFERENCE] = reference if is_ready else np.array(reference, np.int32).tobytes()
        found[DIGEST] = hashlib.blake2b(found[REFERENCE], digest_size=16).digest()
    return found


def received(options: Options) -> Options:
    """In the engine, what `resolved` made: the reference is a read-only array, [num_tokens] int32."""
    if REFERENCE not in options:
        return options
    token_ids = np.frombuffer(options[REFERENCE], np.int32)
    token_ids.flags.writeable = False
    return {**options, REFERENCE: token_ids}


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


def _check_reference(value: Any, limits: Limits) -> None:
    """Raises ConfigError for a reference that must not be tokenised, or whose ids are none."""
    if not isinstance(value, str | Text):
        _check_token_ids(value, limits)
        return
    allowed, size = BYTES_PER_TOKEN * limits.max_model_len, 0
    # A character is a byte or more: what is too long is not encoded.
    for chunk in (value,) if isinstance(value, str) else value:
        if size + len(chunk) <= allowed and not chunk.isascii() and not _is_utf8(chunk):
            raise ConfigError(f"specplugins: reference must be valid UTF-8, not {brief(chunk)}.")
        size += len(chunk) if chunk.isascii() or size + len(chunk) > allowed else len(chunk.encode())
    if size > allowed:
        raise ConfigError(
            f"specplugins: reference must be at most {allowed} bytes of text where max_model_len is "
            f"{limits.max_model_len}, not {size}."
        )


def _check_token_ids(value: Any, limits: Limits) -> None:
    """Raises ConfigError unless `value` is a list of at most max_model_len token ids; looks at no more of them."""
    ids = np.frombuffer(value, np.int32) if isinstance(value, bytearray) and len(value) % 4 == 0 else value
    is_list = isinstance(ids, list | tuple | np.ndarray)
    if is_list:
        check_number(len(ids), limits.max_model_len)
    fits = is_list and (ids is not value or set(map(type, ids)) <= {int})
    low, high = (min, max) if ids is value else (np.min, np.max)
    if not fits or (len(ids) and not (low(ids) >= 0 and high(ids) < limits.vocab_size)):
        allowed = f"a text or a list of token ids from 0 to {limits.vocab_size - 1}"
        given = value if ids is value else ids[:20].tolist()
        raise ConfigError(f"specplugins: reference must be {allowed}, not {brief(given)}.")


class _CannotTravel(Exception):
    """A value that the engine's messages cannot hold, or that is too large."""


def _copied(value: Any, levels: int, left: list[int]) -> Any:
    """A copy in plain dictionaries, lists, texts and numbers; `left` of the size that it may have is counted down.

    Raises:
        _CannotTravel: it is larger or deeper, and no more of it is looked at; or it holds something else.
    """
    left[0] -= 1 + (len(value) if isinstance(value, str | bytes | list | tuple | Mapping) else 0)
    if left[0] < 0 or levels == 0:
        raise _CannotTravel
    match value:
        case Mapping():
            return {_copied(key, 1, left): _copied(item, levels - 1, left) for key, item in value.items()}
        case list() | tuple():
            return [_copied(item, levels - 1, left) for item in value]
        case None | bool() | bytes():
            return value
        case float():
            return float(value)
        case int() if -(2**63) <= value < 2**63:
            return int(value)
        case str() if _is_utf8(value):
            return str(value)
    raise _CannotTravel


def _is_utf8(text: str) -> bool:
    """Whether a text can be encoded: JSON may hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
