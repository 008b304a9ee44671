"""In the front end: time for engines to save what they keep in files.

At a signal vLLM's servers tell their engines to end and, with `--shutdown-timeout 0`, which is the default, kill them
at once; on ROCm alone they wait. An engine that has a file of ours gets as much time as vLLM gives workers.
"""

from typing import Any

from vllm.v1.engine import utils

from vllm_specplugins.config import SpecConfig
from vllm_specplugins.engine.hooks import wrap

GRACE_S = 5.0


def give_time(config: SpecConfig) -> None:
    """Has engines of this front end end in their own time, of so many seconds, if one saves something."""
    if any(getattr(part.own, "store_path", None) for part in config.parts):
        wrap(utils, "get_engine_process_shutdown_timeout", _with_time)


def _with_time(original: Any, request_timeout: Any, process_timeout: Any) -> Any:
    seconds = original(request_timeout, process_timeout)
    return GRACE_S if request_timeout == 0 and seconds == 0 else seconds
