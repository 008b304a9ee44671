"""Passes the options of a request through vLLM: the front end resolves them, and the worker reads them."""

import asyncio
import copy
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from difflib import get_close_matches
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

from vllm_specplugins.config import ConfigError, brief, did_you_mean, error_text
from vllm_specplugins.custom import OptionCheck, option_checks
from vllm_specplugins.engine.frontend.prediction import Predicted, take_predictions, text_of
from vllm_specplugins.engine.frontend.priority_executor import PriorityExecutor, Work, pieces
from vllm_specplugins.engine.hooks import wrap
from vllm_specplugins.engine.verify import verifies
from vllm_specplugins.isolation.exchange import frozen
from vllm_specplugins.methods import drafters
from vllm_specplugins.request_options import (
    FLAT,
    PLAIN,
    REFERENCE,
    SETTINGS,
    TENANT,
    Limits,
    Options,
    draft_limit,
    flat_options,
    read_options,
    received,
    resolved,
    understood,
)


class Resolved(dict[str, Any]):
    """Request options that an `OptionsResolver` has resolved."""


def sealed(core_request: Any) -> Any:
    """Marks the request's options so that the engine recognises them as checked (entrances.py)."""
    params = core_request.sampling_params
    if isinstance(options := (getattr(params, "extra_args", None) or {}).get("specplugins"), Resolved):
        params.extra_args = {**params.extra_args, "specplugins": Resolved({**options, TENANT: b""})}
    return core_request


def request_options(sampling_params: Any) -> Options:
    """Returns the resolved options of a request; empty if it has none."""
    options = (getattr(sampling_params, "extra_args", None) or {}).get("specplugins")
    try:
        return received(options) if isinstance(options, Mapping) else {}
    except (TypeError, ValueError):  # no request may stop the engine
        return {}


class OptionsResolver:
    """Resolves the options of requests where they arrive. It copies the tokenizer, since vLLM's threads use the
    original, before the first request: copying may take a while."""

    def __init__(self, speculative_config: Any, model_config: Any, tokenizer: Any):
        config = speculative_config.plugin_config
        self._limits = Limits(config, model_config.get_vocab_size(), model_config.max_model_len)
        rows = [row for row, _ in drafters(config)]
        self._wants_reference = any(row.is_lookup for row in rows) or self._limits.passes_custom
        self._checks = OptionChecks(option_checks(config), config.common.time_budget_ms)
        self._tokenizer = copy.deepcopy(tokenizer) if self._wants_reference else None
        self._executor: PriorityExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_warned = False

    def resolved(self, params: SamplingParams) -> SamplingParams:
        """Calls `resolved_beside` for a caller without an event loop, or one that waits in it."""
        if not self._takes(params):
            return params
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="specplugins-options", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self.resolved_beside(params), self._loop).result()

    async def resolved_beside(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters with resolved options, or the same object if there is nothing to resolve. Other
        threads tokenize texts and call custom proposers, so the event loop continues to stream. Raises
        VLLMValidationError for an invalid option; the front end then answers 400."""
        if not self._takes(params):
            return params
        try:
            options = self._read(params.extra_args.get("specplugins"), flat_options(params.extra_args))
            text, token_ids = options.get(REFERENCE), None
            if isinstance(text, str):
                if self._executor is None:
                    self._executor = PriorityExecutor()
                token_ids = await asyncio.wrap_future(self._executor.submit(len(text), self._tokenize(text)))
            checked = resolved(options, self._limits, token_ids)
            shown = MappingProxyType(dict(received(checked)))
            if self._checks.concern(shown):
                if self._checks.are_stuck:
                    checked = {"enabled": False}
                elif (refusal := await self._checks.refusal(shown)) is not None:
                    raise ConfigError(f"specplugins: the proposer refuses the options: {refusal}.")
        except ConfigError as error:
            raise VLLMValidationError(str(error)) from None
        params = copy.copy(params)  # the caller may use the original for other requests
        others = {key: value for key, value in params.extra_args.items() if not f"{key}".startswith(FLAT)}
        params.extra_args = {**others, "specplugins": Resolved(checked)}
        return params

    def _takes(self, params: Any) -> bool:
        """Returns whether the request has options to resolve. Warns once about a key that resembles an option
        ("specplugin.enabled"), which vLLM would silently ignore."""
        keys = getattr(params, "extra_args", None) if not self._has_warned else None
        for key in map(str, islice(keys, 8)) if isinstance(keys, dict) else ():
            resembles = get_close_matches(key[: len(FLAT)], [FLAT], 1, 0.8)
            if resembles and key != "specplugins" and not key.startswith(FLAT):
                names = [f"{FLAT}{name}" for name in (*PLAIN, "stages", REFERENCE)]
                words = "A request has the key %s, which the plugin ignores%s This is logged once."
                logger.warning(words, brief(key), did_you_mean(key, names))
                self._has_warned = True
        return _is_raw(params)

    def _read(self, raw: Any, flat: Options) -> Options:
        predicted: Options = {}
        if isinstance(raw, Predicted):
            predicted = {REFERENCE: text_of(raw.prediction, self._limits)} if self._wants_reference else {}
            raw = raw.options
        given = {} if is_none(raw) else read_options(raw, self._limits.max_model_len)
        options = understood({**predicted, **given, **flat}, self._limits)
        if not self._wants_reference:
            options.pop(REFERENCE, None)
        return options

    def _tokenize(self, text: str) -> Work[bytearray]:
        """Yields the tokens of a reference as int32, piece by piece, up to max_model_len."""
        if self._tokenizer is None:
            raise ConfigError("specplugins: reference must be token ids: the engine has no tokenizer.")
        token_ids = bytearray()
        for piece in pieces(text):
            try:
                token_ids += np.array(self._tokenizer.encode(piece, add_special_tokens=False), np.int32).tobytes()
            except Exception as error:
                raise ConfigError(f"specplugins: reference cannot be tokenized ({error_text(error)}).") from None
            if len(token_ids) > 4 * self._limits.max_model_len:
                break
            yield
        return token_ids


def _is_raw(params: Any) -> bool:
    extra_args = isinstance(params, SamplingParams) and params.extra_args
    if not extra_args or isinstance(options := extra_args.get("specplugins"), Resolved):
        return False
    return not is_none(options) or bool(flat_options(extra_args))


def is_none(options: Any) -> bool:
    return options is None or options is False  # 0 equals False


def check_requests() -> None:
    """Makes vLLM resolve the options of requests on arrival. Applied once per process; other configurations are
    unaffected."""
    wrap(SamplingParams, "_validate_spec_decode", _with_every_parameter)
    wrap(InputProcessor, "__init__", _with_resolver)
    wrap(InputProcessor, "process_inputs", _with_resolved)
    wrap(AsyncLLM, "add_request", _with_resolved_beside)


def _with_every_parameter(original: Any, self: SamplingParams, speculative_config: Any) -> None:
    """Allows min_p and logit_bias, which vLLM refuses with speculation: the plugin's verification supports them."""
    config = getattr(speculative_config, "plugin_config", None)
    if config is not None and verifies():
        self = copy.copy(self)
        self.min_p, self.logit_bias = 0.0, None
    original(self, speculative_config)


def _with_resolver(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    original(self, vllm_config, *args, **kwargs)
    if getattr(vllm_config.speculative_config, "plugin_config", None) is not None:
        take_predictions()
        self.specplugins = OptionsResolver(vllm_config.speculative_config, vllm_config.model_config, self.tokenizer)


def _with_resolved(original: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kw: Any) -> Any:
    resolver = getattr(self, "specplugins", None)
    if resolver is None:
        return original(self, request_id, prompt, params, *args, **kw)
    return sealed(original(self, request_id, prompt, resolver.resolved(params), *args, **kw))


async def _with_resolved_beside(
    original: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    if resolver := getattr(self.input_processor, "specplugins", None):
        params = await resolver.resolved_beside(params)
    return await original(self, request_id, prompt, params, *args, **kwargs)


class RequestLimits(NamedTuple):
    """The limits of a request's drafts.

    Args:
        options: the options that the front end resolved; empty if the request has none.
        length_limit: the limit of prompt, output and the branches of a draft together, in tokens.
    """

    options: Options
    length_limit: int
    num_prompt_tokens: int = 0

    @classmethod
    def of(cls, params: Any, num_prompt_tokens: int, max_model_len: int, num_beside: int = 0) -> "RequestLimits":
        """Returns the limits of a request with these parameters. Of each draft, `num_beside` tokens are not on its
        longest path, and take no room of the output."""
        output = getattr(params, "max_tokens", None)
        limit = max_model_len if output is None else num_prompt_tokens + output + num_beside
        return cls(request_options(params), min(max_model_len, limit), num_prompt_tokens)

    def frozen(self) -> "RequestLimits":
        """Copies the limits, with read-only options."""
        return self._replace(options=frozen(self.options))

    def max_draft_tokens(self, num_tokens: int, max_num_draft: int) -> int:
        """Returns the longest draft that a request of this length may get in a step, at most `max_num_draft` tokens."""
        return draft_limit(self.options, num_tokens, max_num_draft, self.length_limit)


logger = logging.getLogger("vllm.specplugins")

MAX_ABANDONED = 8  # maximum number of checks that have not returned; each still uses the interpreter


class OptionChecks:
    """Runs the `check_options` functions of proposers, which raise to refuse options. A check is a user's code on a
    client's data, so it runs in a thread. A check that hangs delays its request by `budget_ms` ms. A call in C that
    holds the GIL, such as a regular expression, delays all requests until it returns."""

    def __init__(self, checks: Sequence[OptionCheck], budget_ms: float):
        self._checks = checks
        self._budget_ms = budget_ms
        self._abandoned: list[Future[str | None]] = []

    def concern(self, options: Mapping[str, Any]) -> bool:
        """Returns whether any check applies to these options."""
        return bool(self._checks) and not options.keys() <= SETTINGS

    @property
    def are_stuck(self) -> bool:
        """Returns whether MAX_ABANDONED earlier checks still run."""
        self._abandoned = [check for check in self._abandoned if not check.done()]
        return len(self._abandoned) >= MAX_ABANDONED

    async def refusal(self, options: Mapping[str, Any]) -> str | None:
        """Returns the reason why a check refuses the options, or None."""
        check: Future[str | None] = Future()
        check.set_running_or_notify_cancel()
        work = lambda: check.set_result(self._refusal(options))  # noqa: E731
        threading.Thread(target=work, name="specplugins-check", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(check), self._budget_ms / 1000)
        except TimeoutError:
            self._abandoned.append(check)
        if len(self._abandoned) == MAX_ABANDONED:
            logger.warning(
                "%d calls of check_options have not returned. Until one does, requests with options of a custom "
                "proposer get no drafts.",
                MAX_ABANDONED,
            )
        return f"its check_options did not return within {self._budget_ms:.0f} ms"

    def _refusal(self, options: Mapping[str, Any]) -> str | None:
        for check in self._checks:
            try:
                check(options)
            except BaseException as error:  # SystemExit included
                return error_text(error)
        return None
