"""Functions of ours beside functions of vLLM's."""

import functools
from collections.abc import Callable
from typing import Any


def both(first: Any, second: Any) -> Any:
    """A function that calls both, with the same arguments."""

    def call(*args: Any, **kwargs: Any) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return call


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Has `around` called in place of a method of vLLM's, which is its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)
