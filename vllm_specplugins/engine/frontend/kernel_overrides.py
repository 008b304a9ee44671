"""Lets vLLM start an engine on a CPU in a process that has loaded Numba or xgrammar: vLLM searches each object of each
loaded module for kernels to replace, and fails on objects that have every attribute, even `__dict__`."""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

from vllm.triton_utils import dispatcher

from vllm_specplugins.engine.hooks import replaced, wrap


def look_into_plain_modules_alone() -> None:
    wrap(dispatcher, "_rebind_kernels", _among_plain_modules)


def _among_plain_modules(original: Any, overrides: Any) -> None:
    plain = {name: module for name, module in list(sys.modules.items()) if _is_plain(module)}
    with replaced(dispatcher, {"sys": SimpleNamespace(modules=plain)}):
        original(overrides)


def _is_plain(module: Any) -> bool:
    """Returns whether vLLM can read all objects of a module.

    >>> import math
    >>> _is_plain(math)
    True
    """
    try:
        with warnings.catch_warnings():  # torch warns about deprecated attributes
            warnings.simplefilter("ignore")
            values = [value for value in list(vars(module).values()) if hasattr(value, "__dict__")]
            return all(hasattr(vars(value), "get") for value in values)
    except Exception:
        return False
