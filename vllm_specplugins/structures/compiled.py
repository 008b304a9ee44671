"""How our loops are compiled for the CPU: as those of kernels/, with their types."""

from collections.abc import Callable
from typing import Any, TypeVar

from vllm_specplugins.kernels import compiled as loops

Function = TypeVar("Function", bound=Callable[..., Any])

inlined: Callable[[Function], Function] = loops.inlined
compiled: Callable[[Any], Callable[[Function], Function]] = loops.compiled
text_at, borrowed = loops.text_at, loops.borrowed
