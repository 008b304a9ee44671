"""Adds arguments of commands to a parser, and reads their values."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_specplugins.config import brief

Add = Callable[..., None]  # the function that `adder` returns
Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


def adder(parser: argparse.ArgumentParser) -> Add:
    """Returns a function that adds an argument to a parser, by name, help, reader (bool: a flag) and default; `shown`
    is the text of the default."""

    def add(name: str, words: str, read: Any = str, default: Any = None, shown: str = "", **more: Any) -> None:
        if shown := shown or ("" if default is None else str(default)):
            words += f" (default: {shown})"
        kind = {"action": "store_true"} if read is bool else {"type": read, "default": default}
        parser.add_argument(name, help=words, **(kind if name.startswith("-") else {"type": read}), **more)

    return add


def number(read: Callable[[str], Number], fits: Callable[[Number], bool], words: str) -> Callable[[str], Number]:
    """Reads a number within the allowed range."""

    def checked(text: str) -> Number:
        try:
            if fits(value := read(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"must be {words}, not {brief(text)}")

    return checked


def whole(low: int, high: int) -> Callable[[str], int]:
    return number(int, lambda value: low <= value <= high, f"an integer from {low} to {high}")


share = number(float, lambda value: 0 < value < 1, "a number between 0 and 1")
temperature = number(float, lambda value: 0 <= value <= 10, "numbers from 0 to 10")
positive = number(float, lambda value: 0 <= value < math.inf, "a number of 0 or more")
count, layer = whole(1, 10_000_000), whole(1, 10_000)


def listed(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    return lambda text: [read(part) for part in text.split(",")]


def dictionary(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {brief(text)}")
    return value
