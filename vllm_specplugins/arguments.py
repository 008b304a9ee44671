"""What an argument of the command line may be: readers of its text, which refuse with half a sentence."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_specplugins.config import brief

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


def number(read: Callable[[str], Number], fits: Callable[[Number], bool], words: str) -> Callable[[str], Number]:
    """Reads a number that fits."""

    def checked(text: str) -> Number:
        try:
            value = read(text)
        except ValueError:
            pass
        else:
            if fits(value):
                return value
        raise argparse.ArgumentTypeError(f"must be {words}, not {brief(text)}")

    return checked


def whole(low: int, high: int) -> Callable[[str], int]:
    """Reads an integer in [low, high]."""
    return number(int, lambda value: low <= value <= high, f"an integer from {low} to {high}")


share = number(float, lambda value: 0 < value < 1, "a number between 0 and 1")
temperature = number(float, lambda value: 0 <= value <= 10, "numbers from 0 to 10")
positive = number(float, lambda value: 0 <= value < math.inf, "a number of 0 or more")


def listed(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Reads values with commas between them."""
    return lambda text: [read(part) for part in text.split(",")]


def dictionary(text: str) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {brief(text)}")
    return value
