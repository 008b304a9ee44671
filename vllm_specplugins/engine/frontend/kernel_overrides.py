"""On a CPU vLLM looks into each object of each loaded module whenever an engine starts, for kernels to replace there.

Some objects answer to any name, `__dict__` too (numba's llvmlite has one, as has xgrammar), and vLLM dies of them: no
engine would start in a process after one of ours. Their modules, which hold no kernel of vLLM's, are left out here.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.triton_utils import dispatcher


def look_into_plain_modules_alone() -> None:
    """Mends vLLM's search; once per process."""
    if not hasattr(dispatcher._rebind_kernels, "__wrapped__"):
        dispatcher._rebind_kernels = _among_plain_modules(dispatcher._rebind_kernels)


def _among_plain_modules(original: Callable[[Sequence[Any]], None]) -> Callable[[Sequence[Any]], None]:
    @functools.wraps(original)
    def rebind_kernels(overrides: Sequence[Any]) -> None:
        plain = {name: module for name, module in list(sys.modules.items()) if _is_plain(module)}
        dispatcher.sys = SimpleNamespace(modules=plain)
        try:
            original(overrides)
        finally:
            dispatcher.sys = sys

    return rebind_kernels


def _is_plain(module: Any) -> bool:
    """Whether vLLM can look into all that a module holds.

    >>> import math
    >>> _is_plain(math)
    True
    """
    try:
        with warnings.catch_warnings():  # of torch, which is asked for what is deprecated
            warnings.simplefilter("ignore")
            return _has_dictionaries(module)
    except Exception:  # whatever such an object raises
        return False


def _has_dictionaries(module: Any) -> bool:
    values = list(getattr(module, "__dict__", {}).values())
    return all(hasattr(vars(value), "get") for value in values if hasattr(value, "__dict__"))
