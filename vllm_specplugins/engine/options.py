"""Per-request options: `SamplingParams.extra_args["specplugins"]` (`vllm_xargs` of the HTTP API)."""

from collections.abc import Mapping
from typing import Any


def request_options(sampling_params: Any) -> Mapping[str, Any]:
    """The options of a request, empty where it has none or they are no dictionary."""
    extra_args = getattr(sampling_params, "extra_args", None) or {}
    options = extra_args.get("specplugins")
    return options if isinstance(options, Mapping) else {}
