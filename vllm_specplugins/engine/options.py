"""Per-request options on their way through vLLM: checked in the front end, read in the worker."""

import copy
import functools
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_specplugins.config import ConfigError
from vllm_specplugins.request_options import Options, check_options, read_options


def request_options(sampling_params: Any) -> Options:
    """The options of a request, which the front end has checked; empty where it has none."""
    try:
        return _read(sampling_params)
    except ConfigError:  # of a request that came past the front end: nothing of it may stop the engine
        return {}


def _read(sampling_params: Any) -> Options:
    raw = (getattr(sampling_params, "extra_args", None) or {}).get("specplugins")
    return {} if raw is None else read_options(raw)


def check_requests() -> None:
    """Has vLLM check the options of every request, wherever it checks the others, and allow min_p and logit_bias;
    once per process.

    A call that is not about a configuration of ours goes to vLLM unchanged.
    """
    original = SamplingParams._validate_spec_decode
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _validate_spec_decode(self: SamplingParams, speculative_config: Any) -> None:
        config = getattr(speculative_config, "plugin_config", None)
        if config is not None:
            vocab_size = speculative_config.target_model_config.get_vocab_size()
            try:
                check_options(_read(self), config, vocab_size)
            except ConfigError as error:
                raise VLLMValidationError(str(error)) from None
            if config.common.verification == "fused" and (self.min_p or self.logit_bias):
                # vLLM refuses them wherever there is speculation; our verification knows them.
                self = copy.copy(self)
                self.min_p, self.logit_bias = 0.0, None
        original(self, speculative_config)

    SamplingParams._validate_spec_decode = _validate_spec_decode
