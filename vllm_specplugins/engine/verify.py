"""What both runners' verification needs of vLLM's front end."""

import copy
import functools
from typing import Any

from vllm.sampling_params import SamplingParams


def allow_parameters() -> None:
    """Lets requests to our methods use min_p and logit_bias, which vLLM refuses wherever there is speculation."""
    original = SamplingParams._validate_spec_decode
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        config = getattr(speculative_config, "plugin_config", None)
        if config is not None and config.common.verification == "fused" and (self.min_p or self.logit_bias):
            self = copy.copy(self)
            self.min_p, self.logit_bias = 0.0, None
        original(self, speculative_config)

    SamplingParams._validate_spec_decode = _validate_spec_decode
