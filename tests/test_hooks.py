"""Functions that the plugin calls around vLLM's functions, or in their place."""

from types import SimpleNamespace
from typing import Any

from vllm_specplugins.engine.hooks import wrap


class Around:
    def double(self, original: Any, number: int) -> int:
        return 2 * int(original(number))


def test_wrapped_once() -> None:
    """Of a bound method there is a new object each time it is asked for. Fails if it is put around a function twice, as
    a start that initialises its KV cache twice would do."""
    owner, around = SimpleNamespace(add=lambda number: number + 1), Around()
    for _ in range(2):
        wrap(owner, "add", around.double)
    assert owner.add(3) == 8
    wrap(owner, "add", Around().double)
    assert owner.add(3) == 16, "of another object"
