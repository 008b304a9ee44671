"""Checks, in the engine, the options of requests that bypass the plugin's front end: requests from vLLM's Rust front
end and from clients of the engine core. The plugin's front end runs in vLLM's Python API server and in `LLM`. Its
checked options contain a tenant as bytes, which JSON cannot express."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.core import EngineCore

from vllm_specplugins.engine.frontend.options import OptionsResolver, Resolved, is_none
from vllm_specplugins.engine.hooks import wrap
from vllm_specplugins.engine.metrics.port import address_of
from vllm_specplugins.isolation.faults import cause_text
from vllm_specplugins.methods import has_tenants
from vllm_specplugins.request_options import REFERENCE, TENANT, Options, flat_options, read_options
from vllm_specplugins.structures.suffix.store_file import tenant_of

logger = logging.getLogger("vllm.specplugins")
RUST = (
    "VLLM_USE_RUST_FRONTEND is set: a request with an invalid option runs without options and gets no 400. The server "
    "ignores `prediction` and a reference in text. Its /metrics lacks the plugin's metrics: set "
    "VLLM_SPECPLUGINS_METRICS_PORT to export them."
)


class EngineOptions(OptionsResolver):
    """Resolves options that bypassed the front end, without a tokenizer."""

    def __init__(self, vllm_config: Any):
        super().__init__(vllm_config.speculative_config, vllm_config.model_config, None)
        self._logged = set[str]()

    def options_of(self, params: Any) -> Options:
        """Returns a request's checked options. If an option is invalid, the result is empty, and the first error is
        logged."""
        try:
            mine = self.resolved(params)
            return dict(mine.extra_args["specplugins"])
        except Exception as error:
            cause = str(error) if isinstance(error, VLLMValidationError) else f"{cause_text(error)}."
            self._log_once(
                type(error).__name__,
                f"A request bypassed vLLM's Python front end and runs without its options: {cause}",
            )
        return {}

    def _read(self, raw: Any, flat: Options) -> Options:
        options = {**({} if is_none(raw) else read_options(raw, self._limits.max_model_len)), **flat}
        if isinstance(options.get(REFERENCE), str):
            del options[REFERENCE]
            self._log_once(
                REFERENCE,
                "A request runs without its reference: only vLLM's Python front end tokenizes text. Send token ids.",
            )
        return super()._read(options, {})

    def _log_once(self, kind: str, sentence: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("%s This is logged once.", sentence)


def check_front_end(vllm_config: VllmConfig) -> None:
    """Logs the limits of vLLM's Rust front end. Raises ConfigError if the port for metrics is invalid."""
    address_of(vllm_config)
    if envs.VLLM_USE_RUST_FRONTEND and vllm_config.parallel_config._api_process_rank == -1:  # `vllm serve` starts it
        logger.warning(RUST)


def check_arrivals() -> None:
    """Makes vLLM's engine check the options of every request; once per process."""
    wrap(EngineCore, "preprocess_add_request", _with_checked_options)


def _with_checked_options(original: Any, self: Any, core_request: Any) -> Any:
    config, params = getattr(self.vllm_config.speculative_config, "plugin_config", None), core_request.sampling_params
    if config is None or params is None:
        return original(self, core_request)
    extra, salt = params.extra_args or {}, core_request.cache_salt
    options = extra.get("specplugins") or {}
    is_checked = isinstance(options, Mapping) and isinstance(options.get(TENANT), bytes)
    if (options or flat_options(extra)) and not is_checked:
        if not hasattr(self, "specplugins"):
            self.specplugins = EngineOptions(self.vllm_config)
        options = self.specplugins.options_of(params)
    tenant = tenant_of(salt) if salt and has_tenants(config) else b""
    if options or tenant or "specplugins" in extra:
        core_request.sampling_params = mine = copy.copy(params)  # requests with other salts may share these
        mine.extra_args = {**extra, "specplugins": Resolved({**options, TENANT: tenant})}
    return original(self, core_request)
