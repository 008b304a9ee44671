"""Calls our functions around vLLM's, or temporarily in their place."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from vllm_specplugins.config import ConfigError


def both(first: Any, second: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return call


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Makes a method of vLLM call `around`, with the original method as the first argument. Applied once per
    process."""
    original = getattr(owner, name)
    if getattr(original, "around", None) == around:  # bound methods are equal, never the same
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, "around", around)  # noqa: B010
    setattr(owner, name, wrapped)


@contextmanager
def replaced(target: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Sets attributes for the duration of a block."""
    before = {name: getattr(target, name, None) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextmanager
def sentence_instead_of_traceback() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        if getattr(sys.excepthook, "func", None) is not _hook:
            sys.excepthook = partial(_hook, sys.excepthook)
        raise


def _hook(
    otherwise: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, ConfigError):
        sys.stderr.write(f"error: {error}\n")
    else:
        otherwise(kind, error, trace)
