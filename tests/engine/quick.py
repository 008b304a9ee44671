"""What makes the start of an engine quicker, in a process that starts a hundred of them."""

import gc
import weakref
from typing import Any

freeze, unfreeze = gc.freeze, gc.unfreeze


def quick_starts() -> None:
    """Changes vLLM in this process, for good. It looks at classes of models in a process of its own, which imports all
    of vLLM: this one has done so. And it collects garbage some ten times on its way, half a second each; so what there
    is without an engine is left out of that, from the beginning and with each end (`leave_out`).
    """
    from vllm.model_executor.models import registry

    from vllm_specplugins.engine.frontend.kernel_overrides import look_into_plain_modules_alone

    look_into_plain_modules_alone()  # the first engine may have no method of ours
    registry._run_in_subprocess = lambda function: function()
    gc.collect()
    freeze()
    gc.freeze = gc.unfreeze = lambda: None  # vLLM's would leave engines out, and take the rest in again


def leave_out(engine: "weakref.ref[Any]") -> None:
    """Everything that is there when an engine is gone is collected no more."""
    gc.collect()
    if engine() is None:  # a test may still hold it
        freeze()
