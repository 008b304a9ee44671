"""Chooses the module that runs an operation."""

from importlib import import_module
from typing import Any


def implementation_of(logits: Any, wanted: str | None, on_cpu: str = "reference") -> str:
    """Returns the name of the module to run: the given one, or the default for the logits' device. Raises ValueError
    for an unknown name."""
    if wanted is None:
        return "fused" if logits.is_cuda else on_cpu if logits.device.type == "cpu" else "reference"
    known = sorted({"reference", "fused", on_cpu})
    if wanted not in known:
        raise ValueError(f"implementation is {wanted!r}, but must be one of {', '.join(known)}.")
    return wanted


def module_of(package: str, logits: Any, wanted: str | None, on_cpu: str = "reference") -> Any:
    """Imports and returns the module; importing it compiles its loops for the CPU."""
    return import_module(f"{package}.{implementation_of(logits, wanted, on_cpu)}")
