"""Names of vLLM's methods, and the names under which vLLM knows ours."""

from typing import Any, get_args


def vllm_methods() -> tuple[Any, ...]:
    from vllm.config.speculative import SpeculativeMethod

    return get_args(SpeculativeMethod)


def name_in_vllm(method: str) -> str:
    """The name of our method for vLLM, with a prefix where vLLM has a method of that name and would serve it itself."""
    return f"specplugins_{method}" if method in vllm_methods() else method
