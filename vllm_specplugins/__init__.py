"""Extensible speculative decoding for vLLM. vLLM calls `register` in every process that it starts."""

from vllm_specplugins.config import ConfigError

__version__ = "0.2.0.dev0"
__all__ = ["ConfigError", "__version__", "register"]


def register() -> None:
    """Entry point `vllm.general_plugins`: adds our methods to vLLM's. A second call has no effect."""
    from vllm_specplugins.engine.frontend.plugin import install

    install()
