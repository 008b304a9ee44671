"""Functions of ours beside functions of vLLM's."""

from typing import Any


def both(first: Any, second: Any) -> Any:
    """A function that calls both, with the same arguments."""

    def call(*args: Any, **kwargs: Any) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return call
