"""Calls the plugin's functions around vLLM's functions, or temporarily in their place."""

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
    if getattr(original, "around", None) == around:  # bound methods may be equal, but never identical
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, "around", around)  # noqa: B010
    setattr(owner, name, wrapped)


class replaced:
    """Sets attributes for the duration of a block. It is a class because steps enter such blocks, and a generator takes
    more time."""

    def __init__(self, target: Any, values: Mapping[str, Any]):
        self._target, self._values = target, values

    def __enter__(self) -> None:
        self._before = {name: getattr(self._target, name, None) for name in self._values}
        for name, value in self._values.items():
            setattr(self._target, name, value)

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            setattr(self._target, name, value)


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
