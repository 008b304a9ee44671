"""In the front end: time for engines to save what they keep in files.

At a signal vLLM's servers tell their engines to end and, with `--shutdown-timeout 0`, which is the default, kill them
at once; on ROCm alone they wait. An engine that has a file of ours gets as much time as vLLM gives workers.
"""

import functools
from typing import Any

from vllm.v1.engine import utils

from vllm_specplugins.config import SpecConfig, stage_configs

GRACE_S = 5.0


def keeps_files(config: SpecConfig) -> bool:
    """Whether an engine with this configuration saves something."""
    return any(getattr(own, "store_path", None) for own in stage_configs(config, object))


def give_time() -> None:
    """Has engines of this front end end in their own time, of so many seconds; once per process."""
    original = utils.get_engine_process_shutdown_timeout
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_engine_process_shutdown_timeout(request_timeout: Any, process_timeout: Any) -> Any:
        seconds = original(request_timeout, process_timeout)
        return GRACE_S if request_timeout == 0 and seconds == 0 else seconds

    utils.get_engine_process_shutdown_timeout = get_engine_process_shutdown_timeout
