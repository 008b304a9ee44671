"""What vLLM's own methods are called, and what it is told that ours are."""

from typing import Any, get_args


def vllm_methods() -> tuple[Any, ...]:
    """Names of vLLM's own methods."""
    from vllm.config.speculative import SpeculativeMethod

    return get_args(SpeculativeMethod)


def name_in_vllm(method: str) -> str:
    """What vLLM is told that a method of ours is called: nothing that it would serve itself."""
    return f"specplugins_{method}" if method in vllm_methods() else method
