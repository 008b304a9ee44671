"""Model Runner V2: samples and verifies with kernels/rejection, through vLLM's own samplers."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.config import VllmConfig


@contextmanager
def while_built(vllm_config: VllmConfig) -> Iterator[None]:
    """Nothing yet."""
    yield
