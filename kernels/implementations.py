"""Which of an operation's modules runs."""

from typing import Any


def implementation_of(logits: Any, wanted: str | None, on_cpu: str = "reference") -> str:
    """Name of the module that runs where these logits are, or of the one that is asked for."""
    if wanted is None:
        return "fused" if logits.is_cuda else on_cpu if logits.device.type == "cpu" else "reference"
    known = sorted({"reference", "fused", on_cpu})
    if wanted not in known:
        raise ValueError(f"implementation is {wanted!r}, but must be one of {', '.join(known)}.")
    return wanted
