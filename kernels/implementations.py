"""Which of an operation's modules runs."""

from importlib import import_module
from typing import Any


def implementation_of(logits: Any, wanted: str | None, on_cpu: str = "reference") -> str:
    """Name of the module that runs where these logits are, or of the one that is asked for."""
    if wanted is None:
        return "fused" if logits.is_cuda else on_cpu if logits.device.type == "cpu" else "reference"
    known = sorted({"reference", "fused", on_cpu})
    if wanted not in known:
        raise ValueError(f"implementation is {wanted!r}, but must be one of {', '.join(known)}.")
    return wanted


def module_of(package: str, logits: Any, wanted: str | None, on_cpu: str = "reference") -> Any:
    """That module. What it compiles is compiled when it is first asked for, or by its first call if in Triton."""
    return import_module(f"{package}.{implementation_of(logits, wanted, on_cpu)}")
