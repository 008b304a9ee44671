"""Prints a refused configuration as one sentence instead of a traceback."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from vllm_specplugins.config import ConfigError


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
