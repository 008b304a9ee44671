"""Per-request options: `SamplingParams.extra_args["specplugins"]`, a dictionary, or its JSON text.

The HTTP API takes them in `vllm_xargs`, whose values cannot be dictionaries: hence the text.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from vllm_specplugins.config import shown

logger = logging.getLogger("vllm.specplugins")


def request_options(sampling_params: Any) -> Mapping[str, Any]:
    """The options of a request; empty where it has none, or (logged) where they cannot be read."""
    options = (getattr(sampling_params, "extra_args", None) or {}).get("specplugins", {})
    try:
        read = json.loads(options) if isinstance(options, str) else options
    except ValueError:
        read = None
    if isinstance(read, Mapping):
        return read
    logger.warning("extra_args: specplugins must be a dictionary or its JSON text, not %s; ignored.", shown(options))
    return {}
