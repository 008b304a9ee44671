"""Per-request options: `SamplingParams.extra_args["specplugins"]`, a dictionary, or its JSON text.

The HTTP API takes them in `vllm_xargs`, whose values cannot be dictionaries: hence the text. They are a client's data,
and a client may cost only itself: the front end bounds, checks and resolves them, so that a bad one answers 400 and
reaches neither the engine nor another request. Knows nothing of vLLM.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplugins.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError, CustomConfig, SpecConfig, shown

Options = Mapping[str, Any]

MAX_CONTEXT = 2**31 - 1
# Of a reference; four are usual. One with more tokens than max_model_len is refused in any case.
BYTES_PER_TOKEN = 8
# JSON takes up to three characters for a byte (and nine for a token id): `\u00e9` is two.
CHARACTERS_PER_TOKEN = 24
OTHER_CHARACTERS = 1 << 16
# Of a custom proposer's own options, characters and values together: what a walk through them may cost.
MAX_OWN_SIZE = 1 << 14
MAX_NESTING = 8
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
        """The names of those that draft: of a method alone its own."""
        return [stage.method for stage in getattr(self.config.own, "stages", ())] or [self.config.method]

    @property
    def passes_own(self) -> bool:
        """Whether a proposer that is not ours may have options of its own."""
        parts = [self.config.own, *(stage.own for stage in getattr(self.config.own, "stages", ()))]
        return any(isinstance(part, CustomConfig) for part in parts)


def read_options(raw: Any, max_model_len: int) -> Options:
    """The dictionary that a request's `extra_args["specplugins"]` is, or holds as text.

    Raises:
        ConfigError: it is neither, or the text is too long.
    """
    options = raw
    if isinstance(raw, str):
        allowed = OTHER_CHARACTERS + CHARACTERS_PER_TOKEN * max_model_len
        if len(raw) > allowed:
            raise ConfigError(
                f"specplugins must be at most {allowed} characters of JSON text where max_model_len is "
                f"{max_model_len}, not {len(raw)}."
            )
        try:
            options = json.loads(raw)
        except (ValueError, RecursionError):
            options = None
    if not isinstance(options, Mapping):
        raise ConfigError(f"specplugins must be a dictionary or its JSON text, not {shown(raw)}.")
    return options


def check_options(options: Options, limits: Limits) -> None:
    """Raises ConfigError for an option that does not exist or whose value is not allowed.

    enabled: whether the request is drafted for at all.
    max_draft: most tokens that it gets drafted in one step.
    max_context: beyond so many tokens of prompt and output together it is not drafted for.
    stages: those of a cascade that draft for it.
    reference: what its output is likely to repeat, for prompt_lookup and suffix_lookup.
    learn: whether its output may be drafted from for later requests, by suffix_lookup and token_recycling.

    A proposer of the user's own may have options of its own, which pass if they are small.
    """
    names = limits.stages
    own = {}
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
                fits = isinstance(value, list | tuple) and bool(value) and all(name in names for name in value[:100])
                allowed = f"a list of one or more of {', '.join(map(repr, dict.fromkeys(names)))}"
            case "reference":
                _check_reference(value, limits)
                continue
            case _:
                if not limits.passes_own:
                    known = "enabled, max_draft, max_context, stages, reference, learn"
                    raise ConfigError(f"specplugins: {shown(key)} is not an option; the options are {known}.")
                own[key] = value
                continue
        if not fits:
            raise ConfigError(f"specplugins: {key} must be {allowed}, not {shown(value)}.")
    if not _is_small(own):
        raise ConfigError(
            f"specplugins: options of the proposer's own must be at most {MAX_OWN_SIZE} values and characters of UTF-8 "
            f"in {MAX_NESTING} levels, and integers of 64 bits, not {shown(own)}."
        )


def resolved(options: Options, token_ids: Iterable[int] | None, limits: Limits) -> dict[str, Any]:
    """Checked options as they travel to the engine: a reference as bytes, with the digest that names its content.

    Args:
        options: what `check_options` let pass.
        token_ids: those of a reference that is a text; None: it is none.
        limits: see there.

    Raises:
        ConfigError: the text has too many tokens, or tokens that the model does not have.
    """
    found = {key: options[key] for key in options if key not in (REFERENCE, DIGEST, TENANT)}
    reference = options.get(REFERENCE) if token_ids is None else list(token_ids)
    if reference:
        _check_token_ids(reference, limits)
        found[REFERENCE] = np.array(reference, np.int32).tobytes()
        found[DIGEST] = hashlib.blake2b(found[REFERENCE], digest_size=16).digest()
    return found


def received(options: Options) -> Options:
    """In the engine, what `resolved` made: the reference is a read-only array, [num_tokens] int32."""
    if REFERENCE not in options:
        return options
    return {**options, REFERENCE: np.frombuffer(options[REFERENCE], np.int32)}


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
    if not isinstance(value, str):
        _check_token_ids(value, limits)
        return
    allowed = BYTES_PER_TOKEN * limits.max_model_len
    try:
        # A character is a byte or more: one that is too long is not encoded.
        size = len(value) if len(value) > allowed else len(value.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"specplugins: reference must be valid UTF-8, not {shown(value)}.") from None
    if size > allowed:
        raise ConfigError(
            f"specplugins: reference must be at most {allowed} bytes of text where max_model_len is "
            f"{limits.max_model_len}, not {size}."
        )


def _check_token_ids(value: Any, limits: Limits) -> None:
    """Raises ConfigError unless `value` is a list of at most max_model_len token ids; looks at no more of them."""
    is_list = isinstance(value, list | tuple)
    if is_list and len(value) > limits.max_model_len:
        raise ConfigError(
            f"specplugins: reference must be at most {limits.max_model_len} tokens (max_model_len), not {len(value)}."
        )
    fits = is_list and set(map(type, value)) <= {int}
    if fits and value:
        try:
            ids = np.array(value, np.int64)
        except OverflowError:
            fits = False
        else:
            fits = ids.min() >= 0 and ids.max() < limits.vocab_size
    if not fits:
        allowed = f"a text or a list of token ids from 0 to {limits.vocab_size - 1}"
        raise ConfigError(f"specplugins: reference must be {allowed}, not {shown(value)}.")


def _is_small(value: Any) -> bool:
    """Whether a value holds at most MAX_OWN_SIZE values and characters, MAX_NESTING deep; looks at no more of them."""
    level, size = [value], 0
    for _ in range(MAX_NESTING):
        below: list[Any] = []
        for item in level:
            size += len(item) + 1 if isinstance(item, str | bytes | list | tuple | Mapping) else 1
            if size > MAX_OWN_SIZE:
                return False
            if isinstance(item, Mapping):
                below += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                below += item
            elif not _can_travel(item):
                return False
        if not below:
            return True
        level = below
    return False


def _can_travel(item: Any) -> bool:
    """Whether the engine's messages can hold a text or a number."""
    if isinstance(item, int):
        return -(2**63) <= item < 2**63
    try:
        if isinstance(item, str):
            item.encode()
    except UnicodeEncodeError:
        return False
    return True
