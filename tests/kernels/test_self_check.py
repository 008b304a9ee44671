"""The check of a device: sound kernels pass, and an error planted in any of them is found.

Planted in the source of a copy of the kernels, which Triton's interpreter runs in a process of its own.
"""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

from vllm_specplugins import kernels

sys.path.insert(0, str(Path(__file__).parent))
from interpreted import INTERPRETED, RUNS, needs_triton, run_interpreted

# File, what stands there, what is planted, the check that must find it.
_ONE_HOT, _CUT, _DENSE = "verification", "verification, truncated", "verification, sampled drafts"
PLANTED = {
    "draw: another stream": ("rejection/fused.py", "seed, position, _TOKEN)", "seed, position, _GROUP)", _ONE_HOT),
    "draw: mask": ("rejection/fused.py", "offsets < target.vocab_size", "offsets < target.vocab_size - 1", _ONE_HOT),
    "draw: row": ("rejection/fused.py", "layout.positions + row", "layout.positions + request", _ONE_HOT),
    "accept: tiles": ("rejection/fused.py", "[None, :] < num_tiles)", "[None, :] < num_tiles - 1)", _ONE_HOT),
    "accept: swapped": ("rejection/result/fused.py", "(tl.int32) == tokens", "(tl.int32) != tokens", _ONE_HOT),
    "scan: groups": ("rejection/scan/fused.py", "maximum, mask=groups < num_groups", "maximum, mask=groups < 1", _CUT),
    "truncation: top-k": ("rejection/truncation/fused.py", "(given & 1) != 0", "(given & 8) != 0", _CUT),
    "dense: q": ("rejection/dense/fused.py", "p_draft / q_draft, 0.0)", "p_draft, 0.0)", _DENSE),
    "dense: swapped": ("rejection/dense/fused.py", "steps * 0) < ratios", "steps * 0) > ratios", _DENSE),
    "edits: a penalty": ("rejection/adjust/fused.py", "logits -= presence * is_said", "logits -= 0.0", "edits"),
    "edits: drafts": ("rejection/adjust/fused.py", "draft in range(num_drafts)", "draft in range(0)", "edits"),
    "edits: a tile": ("rejection/adjust/fused.py", "(tile + 1) * TILE, v", "(tile + 1) * TILE - 1, v", "edits"),
    "noise: position": ("gumbel/fused.py", "^ position.to(tl.uint64))", "^ row.to(tl.uint64))", "noise"),
    "noise: constant": ("gumbel/fused.py", "0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB", "noise"),
    "noise: mask": ("gumbel/fused.py", "inside = tokens < vocab_size", "inside = tokens < vocab_size - 1", "noise"),
    "noise: tiles": ("gumbel/fused.py", "mask=tiles < num_tiles", "mask=tiles < num_tiles - 1", "noise"),
}
# Two tiles of the kernels for edits and noise, in 9 groups; of those that draw a tile is 8192.
VOCAB_SIZE, SEVERAL_TILES = 2100, 8300


@pytest.mark.skipif(RUNS, reason="is that process")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def problems(package: str, vocab_size: int, block: bool, only: str | None = None) -> dict[str, str]:
    check = importlib.import_module(f"{package}.self_check")
    shapes = check.Shapes(vocab_size, torch.bfloat16, max_num_draft=3, samples=True, block=block)
    findings = check.check_device(torch.device("cpu"), shapes, only)
    return {finding.name: finding.problem for finding in findings}


@needs_triton
def test_sound() -> None:
    """Kills: a check that finds fault with what is right, or leaves one out."""
    found = problems("vllm_specplugins.kernels", VOCAB_SIZE, block=True)
    assert not any(found.values()), found
    assert len(found) == 6


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter's process")
@pytest.mark.parametrize("name", PLANTED)
def test_planted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: inputs that do not reach what they are to check."""
    file, old, new, check = PLANTED[name]
    package = tmp_path / ("planted_" + "".join(filter(str.isalpha, name)))
    shutil.copytree(Path(kernels.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (package / file).read_text()
    assert source.count(old) >= 1, "the planted error has no place"
    (package / file).write_text(source.replace(old, new))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = problems(package.name, SEVERAL_TILES if check == _ONE_HOT else VOCAB_SIZE, False, check)
    assert found == {check: "differs from its reference"}
