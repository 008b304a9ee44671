"""Reads the options of one request: `SamplingParams.extra_args["specplugins"]`, a dictionary or its JSON text, and flat
keys, such as "specplugins.max_draft".

The HTTP API takes options in `vllm_xargs`, whose values cannot be dictionaries, so text and flat keys are allowed. The
front end limits, checks and resolves options. A request with an invalid option gets a 400, and affects neither the
engine nor another request.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from vllm_specplugins.config import (
    MAX_NUM_SPECULATIVE_TOKENS,
    ConfigError,
    CustomConfig,
    SpecConfig,
    brief,
    did_you_mean,
    is_integer,
    methods_of,
    stage_configs,
    stage_names,
)

Options = Mapping[str, Any]

MAX_CONTEXT = 2**31 - 1
# A token has four bytes of text on average. A reference with more than max_model_len tokens is refused later.
BYTES_PER_TOKEN = 8
# JSON takes up to three characters for a byte (and nine for a token id): `\u00e9` is two bytes.
CHARACTERS_PER_TOKEN = 24
MAX_OTHER_BYTES, MAX_OTHER_BRACKETS = 1 << 16, 1 << 12  # of JSON text without the reference
MAX_CUSTOM_BYTES, MAX_NESTING = 1 << 14, 8  # options of a custom proposer, as MessagePack
REFERENCE, TENANT = "reference", "tenant"
FLAT = "specplugins."  # prefix of flat keys


def _integer_up_to(high: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer from 0 to {high}", lambda value: is_integer(value, 0, high)


_FLAG = "true or false", lambda value: isinstance(value, bool)
_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "enabled": _FLAG,
    "max_draft": _integer_up_to(MAX_NUM_SPECULATIVE_TOKENS),
    "max_context": _integer_up_to(MAX_CONTEXT),
    "learn": _FLAG,
}
PLAIN = tuple(_PLAIN)
FLAGS = frozenset(name for name, rule in _PLAIN.items() if rule is _FLAG)
STORES_NOTHING = {"learn": False}  # options of a request that stores nothing for later requests
SETTINGS = frozenset({*_PLAIN, "stages", TENANT})  # custom proposers do not read these


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the options of a request; `max_model_len` limits the tokens of the request and of its reference."""

    config: SpecConfig
    vocab_size: int
    max_model_len: int

    @property
    def passes_custom(self) -> bool:
        return bool(stage_configs(self.config, CustomConfig))

    @property
    def max_reference_bytes(self) -> int:
        return BYTES_PER_TOKEN * self.max_model_len


class _Reference(msgspec.Struct):
    reference: msgspec.Raw = msgspec.Raw(b"null")


def flat_options(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options in flat keys. A flag may also be a number or a text, since `vllm_xargs` allows nothing else.

    >>> flat_options({"specplugins.max_draft": 4, "specplugins.enabled": 0, "other": 1})
    {'max_draft': 4, 'enabled': False}
    """
    flat = {key[len(FLAT) :]: value for key, value in extra_args.items() if f"{key}".startswith(FLAT)}
    for name in flat.keys() & FLAGS:
        flat[name] = {"0": False, "false": False, "1": True, "true": True}.get(f"{flat[name]}".lower(), flat[name])
    return flat


def read_options(raw: Any, max_model_len: int) -> Options:
    """Returns the dictionary of a request's options, decoded if it is JSON text. Raises ConfigError for other types,
    and for a text that is too long or has too many brackets or token ids."""
    options = raw
    if isinstance(raw, str):
        longest = MAX_OTHER_BYTES + CHARACTERS_PER_TOKEN * max_model_len
        if len(raw) > longest:
            raise ConfigError(
                f"specplugins must be at most {longest} characters of JSON text for max_model_len {max_model_len}, not "
                f"{len(raw)}."
            )
        try:
            options = _decoded(raw.encode(), max_model_len)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            options = None
    if not isinstance(options, Mapping):
        raise ConfigError(f"specplugins must be a dictionary or its JSON text, not {brief(raw)}.")
    return options


def _decoded(json: bytes, max_model_len: int) -> dict[str, Any]:
    """Decodes options in bounded memory. The reference may be long, so the limits apply to the text without it."""
    decode = msgspec.json.decode
    reference = bytes(decode(json, type=_Reference).reference)
    num_bytes = len(json) - len(reference)
    num_brackets = sum(json.count(bracket) - reference.count(bracket) for bracket in (b"[", b"{"))
    if num_bytes > MAX_OTHER_BYTES or num_brackets > MAX_OTHER_BRACKETS:
        raise ConfigError(
            f"specplugins: the JSON text without the reference must be at most {MAX_OTHER_BYTES} bytes and "
            f"{MAX_OTHER_BRACKETS} brackets, not {num_bytes} and {num_brackets}."
        )
    options: dict[str, Any] = decode(json, type=dict[str, msgspec.Raw])
    for key, value in options.items():
        if key != REFERENCE:
            options[key] = decode(value)
        elif value := bytes(value):
            if value.startswith(b"["):
                check_number(value.count(b",") + 1, max_model_len)
            with suppress(msgspec.ValidationError):  # leaves the bytes, which `understood` refuses
                value = decode(value, type=str | list[int] | None)
            options[key] = value
    return options


def understood(options: Options, limits: Limits) -> dict[str, Any]:
    """Returns checked copies of the known options, and no other data of a client.

    enabled: whether the request gets drafts. max_draft: the largest number of tokens that one step drafts for the
    request. max_context: the number of tokens of prompt and output at which drafting ends. stages: the stages of a
    cascade that draft for the request, by name, or by index and name as in metrics. reference: a text that the output
    is likely to repeat, for prompt_lookup and suffix_lookup; ids become int32 bytes. learn: whether suffix_lookup may
    draft from the output for later requests, and heads may learn from it.

    Small options of a custom proposer pass unchanged.

    Raises:
        ConfigError: an option is unknown, or its value is not allowed.
    """
    checked: dict[str, Any] = {}
    custom: dict[Any, Any] = {}
    for key, value in options.items():
        if key in _PLAIN:
            allowed, fits = _PLAIN[key]
            if not fits(value):
                raise ConfigError(f"specplugins: {key} must be {allowed}, not {brief(value)}.")
            checked[key] = value
        elif key == "stages":
            checked[key] = _stages(value, limits)
        elif key == REFERENCE:
            checked[key] = _reference(value, limits)
        elif limits.passes_custom:
            custom[key] = value
        else:
            known = "enabled, max_draft, max_context, stages, reference, learn"
            hint = did_you_mean(key, known.split(", "))
            raise ConfigError(f"specplugins: {brief(key)} is not an option; the options are {known}{hint}")
    return {**_custom(custom), **checked} if custom else checked


def _custom(options: dict[Any, Any]) -> dict[str, Any]:
    """Returns a copy that consists of plain dictionaries, lists, texts and numbers, which the engine's messages can
    carry."""
    try:
        packed = msgspec.msgpack.encode(options)
        copy: dict[str, Any] = msgspec.msgpack.decode(packed)
        if len(packed) <= MAX_CUSTOM_BYTES and _depth(copy) <= MAX_NESTING:
            return copy
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    raise ConfigError(
        f"specplugins: options of a custom proposer must be at most {MAX_CUSTOM_BYTES} bytes of MessagePack in "
        f"{MAX_NESTING} levels, not {brief(options)}."
    )


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 1 if items is None else 1 + max(map(_depth, items), default=0)


def _stages(value: Any, limits: Limits) -> list[str]:
    methods, by_name = methods_of(limits.config), dict[str, list[str]]()
    for index, name in enumerate(stage_names(methods)):
        by_name.setdefault(methods[index], []).append(name)
        by_name[f"{index} {methods[index]}"] = [name]
    fits = isinstance(value, list | tuple) and 0 < len(value) <= len(methods)
    unknown = [name for name in value if not (isinstance(name, str) and name in by_name)] if fits else [value]
    if unknown:
        allowed, hint = ", ".join(map(repr, dict.fromkeys(methods))), did_you_mean(unknown[0], by_name)
        words = f"up to {len(methods)} of {allowed}, not {brief(unknown[0])}"
        raise ConfigError(f"specplugins: stages must be {words}{hint}")
    return sorted({name for asked in value for name in by_name[asked]})


def _reference(value: Any, limits: Limits) -> str | bytes:
    """Returns a text, which the front end will tokenise, or token ids as int32 bytes."""
    if not isinstance(value, str):
        return token_bytes(value, limits)
    try:  # a character has at least one byte: a text that is too long is not encoded
        size = len(value) if len(value) > limits.max_reference_bytes else len(value.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"specplugins: reference must be valid UTF-8, not {brief(value)}.") from None
    check_size(f"specplugins: {REFERENCE}", size, limits)
    return value


def check_size(name: str, size: int, limits: Limits) -> None:
    if size > limits.max_reference_bytes:
        raise ConfigError(
            f"{name} must be at most {limits.max_reference_bytes} bytes of text where max_model_len is "
            f"{limits.max_model_len}, not {size}."
        )


def check_number(num_tokens: int, max_model_len: int) -> None:
    if num_tokens > max_model_len:
        raise ConfigError(
            f"specplugins: reference must be at most {max_model_len} tokens (max_model_len), not {num_tokens}."
        )


def token_bytes(value: Any, limits: Limits) -> bytes:
    """Converts token ids, a list or a bytearray of int32, to int32 bytes. Raises ConfigError for other types, for too
    many ids, and for ids outside the vocabulary."""
    token_ids = None
    if isinstance(value, bytearray):
        token_ids = np.frombuffer(value, np.int32)
        check_number(len(token_ids), limits.max_model_len)
    elif isinstance(value, list | tuple):
        check_number(len(value), limits.max_model_len)
        if set(map(type, value)) <= {int}:
            with suppress(OverflowError):
                token_ids = np.array(value, np.int64)
    if token_ids is None or (len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < limits.vocab_size):
        given = token_ids[:20].tolist() if isinstance(value, bytearray) and token_ids is not None else value
        raise ConfigError(
            f"specplugins: reference must be a text or a list of token ids from 0 to {limits.vocab_size - 1}, not "
            f"{brief(given)}."
        )
    return token_ids.astype(np.int32).tobytes()


def resolved(options: Options, limits: Limits, token_ids: Sequence[int] | bytearray | None = None) -> dict[str, Any]:
    """Returns checked options in the form for the engine, with the reference as bytes. `token_ids` are the ids of a
    reference in text. Raises ConfigError if an id is outside the vocabulary."""
    sent = {key: options[key] for key in options if key not in (REFERENCE, TENANT)}
    if reference := options.get(REFERENCE) if token_ids is None else token_bytes(token_ids, limits):
        sent[REFERENCE] = reference
    return sent


def received(options: Options) -> Options:
    """Returns resolved options in the engine, where the reference is a read-only array, [num_tokens] int32."""
    if REFERENCE not in options:
        return options
    token_ids = np.frombuffer(options[REFERENCE], np.int32)
    token_ids.flags.writeable = False
    return {**options, REFERENCE: token_ids}


def draft_limit(options: Options, num_tokens: int, max_num_draft: int, length_limit: int) -> int:
    """Returns the largest number of tokens to draft in a step; the target emits one more token. `length_limit` includes
    the prompt.

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
    """Returns [num_reqs] bool, whether each request's options allow the stage of this name to draft; None if all do.

    >>> allows([{}, {"stages": ("a",)}], "a"), allows([{}, {"stages": ("a",)}], "b").tolist()
    (None, [True, False])
    """
    if not any(options):
        return None
    allowed = np.array([not given or name in given.get("stages", (name,)) for given in options], bool)
    return None if allowed.all() else allowed
