"""Per-request options: `SamplingParams.extra_args["specplugins"]`, a dictionary, or its JSON text.

The HTTP API takes them in `vllm_xargs`, whose values cannot be dictionaries: hence the text. They are a client's data,
and a client may cost only itself: the front end bounds, checks and resolves them, so that a bad one answers 400 and
reaches neither the engine nor another request. Knows nothing of vLLM.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplugins.config import (
    MAX_NUM_SPECULATIVE_TOKENS,
    ConfigError,
    CustomConfig,
    SpecConfig,
    brief,
    is_integer,
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
REFERENCE, TENANT = "reference", "tenant"


def _at_most(high: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer from 0 to {high}", lambda value: is_integer(value, 0, high)


_FLAG = "true or false", lambda value: isinstance(value, bool)
_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "enabled": _FLAG,
    "max_draft": _at_most(MAX_NUM_SPECULATIVE_TOKENS),
    "max_context": _at_most(MAX_CONTEXT),
    "learn": _FLAG,
}
SETTINGS = frozenset({*_PLAIN, "stages", TENANT})  # which no proposer of the user's own reads


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
    def passes_own(self) -> bool:
        """Whether a proposer that is not ours may have options of its own."""
        return bool(stage_configs(self.config, CustomConfig))

    @property
    def max_bytes(self) -> int:
        """Of a reference that is a text."""
        return BYTES_PER_TOKEN * self.max_model_len


def understood(options: Options, limits: Limits) -> dict[str, Any]:
    """The options, made anew from what was understood of them: nothing else of a client's travels any further.

    enabled: whether the request is drafted for at all.
    max_draft: most tokens that it gets drafted in one step.
    max_context: beyond so many tokens of prompt and output together it is not drafted for.
    stages: those of a cascade that draft for it, by name, or by number and name as in metrics.
    reference: what its output is likely to repeat, for prompt_lookup and suffix_lookup; ids become int32 bytes.
    learn: whether its output may be drafted from for later requests, by suffix_lookup, or learned from.

    A proposer of the user's own may have options of its own, which pass if they are small.

    Raises:
        ConfigError: an option does not exist, or its value is not allowed.
    """
    found: dict[str, Any] = {}
    own: dict[Any, Any] = {}
    for key, value in options.items():
        if key in _PLAIN:
            allowed, fits = _PLAIN[key]
            if not fits(value):
                raise ConfigError(f"specplugins: {key} must be {allowed}, not {brief(value)}.")
            found[key] = value
        elif key == "stages":
            found[key] = _stages(value, limits)
        elif key == REFERENCE:
            found[key] = _reference(value, limits)
        elif limits.passes_own:
            own[key] = value
        else:
            known = "enabled, max_draft, max_context, stages, reference, learn"
            raise ConfigError(f"specplugins: {brief(key)} is not an option; the options are {known}.")
    try:
        return {**_copied(own, MAX_NESTING, [MAX_OWN_SIZE]), **found}
    except _CannotTravel:
        raise ConfigError(
            f"specplugins: options of the proposer's own must be at most {MAX_OWN_SIZE} values and characters of UTF-8 "
            f"in {MAX_NESTING} levels, and integers of 64 bits, not {brief(own)}."
        ) from None


def _stages(value: Any, limits: Limits) -> list[str]:
    """The names of stages that a request allows, each once."""
    methods, by_name = methods_of(limits.config), dict[str, list[str]]()
    for index, name in enumerate(stage_names(methods)):
        by_name.setdefault(methods[index], []).append(name)
        by_name[f"{index} {methods[index]}"] = [name]
    fits = isinstance(value, list | tuple) and 0 < len(value) <= len(methods)
    if not fits or not all(isinstance(name, str) and name in by_name for name in value):
        allowed = ", ".join(map(repr, dict.fromkeys(methods)))
        most = f"at most {len(methods)}, each one" if len(methods) > 1 else "one"
        raise ConfigError(f"specplugins: stages must be a list of {most} of {allowed}, not {brief(value)}.")
    return sorted({name for asked in value for name in by_name[asked]})


def _reference(value: Any, limits: Limits) -> Any:
    """A text that may be tokenised, or int32 bytes of token ids."""
    if not isinstance(value, str | Text):
        return token_bytes(value, limits)
    size = 0
    for chunk in (value,) if isinstance(value, str) else value:
        try:  # a character is a byte or more: what is too long is not encoded
            size += len(chunk if size + len(chunk) > limits.max_bytes else chunk.encode())
        except UnicodeEncodeError:
            raise ConfigError(f"specplugins: reference must be valid UTF-8, not {brief(chunk)}.") from None
    check_size(f"specplugins: {REFERENCE}", size, limits)
    return value


def check_size(name: str, size: int, limits: Limits) -> None:
    """Raises ConfigError for a text of so many bytes, or more."""
    if size > limits.max_bytes:
        raise ConfigError(
            f"{name} must be at most {limits.max_bytes} bytes of text where max_model_len is {limits.max_model_len}, "
            f"not {size}."
        )


def token_bytes(value: Any, limits: Limits) -> bytes | bytearray:
    """A list of token ids as int32 bytes, which a bytearray is; ConfigError unless they are few and the model's."""
    ids = np.frombuffer(value, np.int32) if isinstance(value, bytearray) and len(value) % 4 == 0 else value
    is_list = isinstance(ids, list | tuple | np.ndarray)
    if is_list:
        check_number(len(ids), limits.max_model_len)
    fits = is_list and (ids is not value or set(map(type, ids)) <= {int})
    low, high = (min, max) if ids is value else (np.min, np.max)
    if not fits or (len(ids) and not (low(ids) >= 0 and high(ids) < limits.vocab_size)):
        given = value if ids is value else ids[:20].tolist()
        raise ConfigError(
            f"specplugins: reference must be a text or a list of token ids from 0 to {limits.vocab_size - 1}, not "
            f"{brief(given)}."
        )
    return value if isinstance(value, bytearray) else np.array(value, np.int32).tobytes()


def resolved(options: Options, limits: Limits, token_ids: Sequence[int] | bytearray | None = None) -> dict[str, Any]:
    """Options that were understood as they travel to the engine: a reference as bytes.

    `token_ids` are those of a reference that is a text: ConfigError if they are too many, or others than the model has.
    """
    found = {key: options[key] for key in options if key not in (REFERENCE, TENANT)}
    if reference := options.get(REFERENCE) if token_ids is None else token_bytes(token_ids, limits):
        found[REFERENCE] = reference
    return found


def received(options: Options) -> Options:
    """In the engine, what `resolved` made: the reference is a read-only array, [num_tokens] int32."""
    if REFERENCE not in options:
        return options
    token_ids = np.frombuffer(options[REFERENCE], np.int32)
    token_ids.flags.writeable = False
    return {**options, REFERENCE: token_ids}


def draft_limit(options: Options, num_tokens: int, max_num_draft: int, length_limit: int) -> int:
    """Most tokens that a request of this length gets drafted in one step; the target emits one more.

    Args:
        length_limit: most tokens that the request may have, its prompt included.

    >>> draft_limit({}, 100, 5, 4096), draft_limit({}, 100, 5, 104), draft_limit({"max_draft": 2}, 100, 5, 4096)
    (5, 3, 2)
    """
    max_num_draft = max(0, min(max_num_draft, length_limit - num_tokens - 1))
    if not options:
        return max_num_draft
    if not options.get("enabled", True) or num_tokens > options.get("max_context", MAX_CONTEXT):
        return 0
    return min(max_num_draft, int(options.get("max_draft", max_num_draft)))


def allows(options: Sequence[Mapping[str, Any]], name: str) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """[num_reqs] bool: whether each request's options let the stage of this name draft; None if all do.

    >>> allows([{}, {"stages": ("a",)}], "a"), allows([{}, {"stages": ("a",)}], "b").tolist()
    (None, [True, False])
    """
    if not any(options):
        return None
    allowed = np.array([not own or name in own.get("stages", (name,)) for own in options], bool)
    return None if allowed.all() else allowed


class _CannotTravel(Exception):
    """A value that the engine's messages cannot hold, or that is too large."""


def _copied(value: Any, levels: int, left: list[int]) -> Any:
    """A copy in plain dictionaries, lists, texts and numbers; `left` of the size that it may have is counted down.

    Raises _CannotTravel where it is larger or deeper, or holds something else, and looks at no more of it.
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
        case str():
            try:
                value.encode()  # JSON may hold halves of characters
                return str(value)
            except UnicodeEncodeError:
                pass
    raise _CannotTravel
