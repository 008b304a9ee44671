"""On a CPU vLLM looks into each object of each loaded module whenever an engine starts, for kernels to replace there.

Some objects answer to any name, `__dict__` too (numba's llvmlite has one, as has xgrammar), and vLLM dies of them: no
engine would start in a process after one of ours. Their modules, which hold no kernel of vLLM's, are left out here.
"""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

from vllm.triton_utils import dispatcher

from vllm_specplugins.engine.hooks import replaced, wrap


def look_into_plain_modules_alone() -> None:
    """Mends vLLM's search; once per process."""
    wrap(dispatcher, "_rebind_kernels", _among_plain_modules)


def _among_plain_modules(original: Any, overrides: Any) -> None:
    plain = {name: module for name, module in list(sys.modules.items()) if _is_plain(module)}
    with replaced(dispatcher, {"sys": SimpleNamespace(modules=plain)}):
        original(overrides)


def _is_plain(module: Any) -> bool:
    """Whether vLLM can look into all that a module holds.

    >>> import math
    >>> _is_plain(math)
    True
    """
    try:
        with warnings.catch_warnings():  # of torch, which is asked for what is deprecated
            warnings.simplefilter("ignore")
            values = [value for value in list(vars(module).values()) if hasattr(value, "__dict__")]
            return all(hasattr(vars(value), "get") for value in values)
    except Exception:  # whatever such an object raises
        return False
