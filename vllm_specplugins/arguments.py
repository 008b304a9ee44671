"""What an argument of the command line may be: readers of its text, which refuse with half a sentence."""

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_specplugins.config import brief

Value = TypeVar("Value")


def whole(low: int, high: int) -> Callable[[str], int]:
    """Reads an integer in [low, high]."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be an integer from {low} to {high}, not {brief(text)}")
        return value

    return read


def fraction(low: float, high: float) -> Callable[[str], float]:
    """Reads a number between low and high, neither included."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low
        if not low < value < high:
            raise argparse.ArgumentTypeError(f"must be a number between {low:g} and {high:g}, not {brief(text)}")
        return value

    return read


def layer_list(text: str) -> list[int]:
    """Reads layers, as in "1,2,4"."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be integers with commas between them, not {brief(text)}")
    return [int(part) for part in parts]


def temperature(text: str) -> float:
    """Reads a number from 0 to 10, both included."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 10, not {brief(text)}")
    return value


def positive(text: str) -> float:
    """Reads a number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, not {brief(text)}")
    return value


def words_list(text: str) -> list[str]:
    """Reads names, as in "code,copy"."""
    return [word.strip() for word in text.split(",") if word.strip()]


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
