"""The examples in the docstrings of the package."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [file for room in ("vllm_specplugins", "kernels") for file in sorted((ROOT / room).rglob("*.py"))]
NAMES = [
    ".".join(("vllm_specplugins", *file.relative_to(ROOT).with_suffix("").parts)).replace(".vllm_specplugins", "")
    for file in FILES
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("name", NAMES)
def test_docstrings(name: str) -> None:
    """Kills: an example that is not true."""
    module = import_module(name.removesuffix(".__init__"))
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
