"""A refused configuration ends the program with one sentence in place of a traceback."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from vllm_specplugins.config import ConfigError


@contextmanager
def sentence_instead_of_traceback() -> Iterator[None]:
    """A ConfigError that ends the program is printed as its sentence alone."""
    try:
        yield
    except ConfigError:
        if not isinstance(sys.excepthook, _SentenceHook):
            sys.excepthook = _SentenceHook(sys.excepthook)
        raise


class _SentenceHook:
    """`sys.excepthook` that prints a ConfigError's message alone and hands everything else on."""

    def __init__(self, otherwise: Callable[..., Any]):
        self._otherwise = otherwise

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ConfigError):
            sys.stderr.write(f"error: {error}\n")
        else:
            self._otherwise(kind, error, trace)
