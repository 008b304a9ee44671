"""The check of a device: sound kernels pass, and the check sees an error planted in any of them.

Planted in the source of a copy of the kernels, which Triton's interpreter runs in a separate process.
"""

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, needs_triton

from vllm_specplugins import kernels

# What of `Shapes` is of vocab_size, beside the check that must find it. A tile of edits is of 2048 tokens, of
# a scan of 8192; 2100 tokens are 9 groups.
_DRAW = "verification", 8300
_CUT, _DENSE = ("verification, truncated", 2100), ("verification, sampled drafts", 2100)
_DENSE_CUT = "verification, sampled drafts, truncated", 2100
_EDITS, _NOISE, _PLACE = ("edits", 2100), ("noise", 2100), ("verification, in place", 2100)
# By the kernels' files: what it is, what stands there, what is planted, who must find it.
PLANTED: dict[str, list[tuple[str, str, str, tuple[str, int]]]] = {
    "rejection/accept_fused.py": [
        ("swapped", "(tl.int32) == tokens", "(tl.int32) != tokens", _DRAW),
        ("one too few", "tl.min(rejected, axis=0) + 1, num_rows", "tl.min(rejected, axis=0), num_rows", _DRAW),
        ("first of all", "== num_programs - 1", "== 0", _DENSE),
        ("row", "layout.positions + row", "layout.positions + request", _DRAW),
        ("place", "tl.load(layout.logits_indices + row)) + 1", "tl.load(layout.logits_indices + row))", _PLACE),
        ("q", "p_draft / q_draft, 0.0)", "p_draft, 0.0)", _DENSE),
        ("less", "steps * 0) < ratios", "steps * 0) > ratios", _DENSE),
        ("nothing recovered", "tl.where(has_draft, drafts.vocab_size, 0)", "tl.where(has_draft, 0, 0)", _DENSE),
        ("position", "layout.positions + begin + num_accepted", "layout.positions + begin", _DENSE),
        ("noise", "layout.positions + begin + steps", "layout.positions + begin + steps * 0", _DENSE),
        ("cut", "tl.where(logit >= limit, tl.exp2", "tl.where(logit == logit, tl.exp2", _DENSE_CUT),
    ],
    "rejection/scan_fused.py": [
        ("groups", "+ slots, maximum, mask", "+ slots, tl.where(groups < 1, maximum, float('-inf')), mask", _CUT),
        ("mask", "offsets < target.vocab_size)", "offsets < target.vocab_size - 1)", _DRAW),
        ("scale", "[:, None]) * scale_of(temperature))", "[:, None]) * (0.2 * scale_of(temperature)))", _CUT),
        ("temperature", "LOG2_E / tl.where(temperature == 0.0, 1.0, temperature)", "LOG2_E", _DRAW),
        ("weights", "totals * tl.exp2((maxima - maximum) * scale)", "totals", _CUT),
        ("a draft's row", "+ step * drafts.step_stride", "+ 0 * drafts.step_stride", _DENSE),
    ],
    "rejection/drafts.py": [("q", "logits < limit,", "logits <= limit,", _NOISE)],
    "rejection/truncation_fused.py": [
        ("top-k", "(given & 1) != 0", "(given & 8) != 0", _CUT),
        ("one more", "top_k.to(tl.float32), floor", "top_k.to(tl.float32) + 1.0, floor", _CUT),
        ("top-p", "row, top_p * total, floor", "row, top_p, floor", _CUT),
        ("top-p's share", "row, top_p * total, floor", "row, top_p * tl.sum(totals, axis=0), floor", _CUT),
        ("top-p's floor", "* total / vocab_size", "* total", _CUT),
        ("a read", "tl.where(has_a, b, a) - 1", "tl.where(has_a, a, a) - 1", _CUT),
        ("top-p's bound", "top_p * total * 1.001", "top_p * total * 0.3", _CUT),
        ("min-p", "tl.log2(min_p) / scale", "tl.log2(min_p)", _CUT),
        ("weight", "tl.maximum(total, 1.0), limit", "tl.maximum(total * 8.0, 1.0), limit", _DENSE_CUT),
    ],
    "rejection/race_fused.py": [
        ("streams", "stream << _STREAM_SHIFT", "stream << (_STREAM_SHIFT - 1)", _DENSE),
        ("seed", "_splitmix64(_splitmix64(seed.to(tl.uint64)) ^", "_splitmix64(seed.to(tl.uint64) ^", _DRAW),
        ("constant", "0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB", _NOISE),
        ("numbers", "state + 0x9E3779B97F4A7C15", "state", _NOISE),
        ("p + q", "p_weights - q_weights", "p_weights + q_weights", _DENSE),
        ("p", "p_weights - q_weights", "p_weights", _DENSE),
        ("another stream", "_RECOVERED_TOKEN, _TOKEN).to", "_TOKEN, _TOKEN).to", _DENSE),
        ("a draw's stream", "_RECOVERED_TOKEN, _TOKEN).to", "_RECOVERED_TOKEN, _GROUP).to", _DRAW),
        ("a group's noise", "axis=0) / exponential(key, group)", "axis=0)", _DENSE),
        ("likeliest", "logits == largest", "logits <= largest", _DENSE),
        ("limit", "tl.where(logits >= limit,", "tl.where(logits == logits,", _CUT),
    ],
    "rejection/adjust/fused.py": [
        ("presence", "logits -= presence * is_emitted", "logits -= 0.0", _EDITS),
        ("frequency", "frequency * counts", "frequency * is_emitted", _EDITS),
        ("a prompt", "is_emitted | (prompt != 0)", "is_emitted", _EDITS),
        ("drafts", "draft in range(num_drafts)", "draft in range(0)", _EDITS),
        ("a tile", "(tile + 1) * TILE, v", "(tile + 1) * TILE - 1, v", _EDITS),
        ("allowed", "num_allowed > 0, float", "num_allowed < 0, float", _EDITS),
        ("bias", "bias[2] + state * bias[4]", "bias[2]", _EDITS),
        ("minimum", "position < tl.load(min_tokens[2]", "position <= tl.load(min_tokens[2]", _EDITS),
        ("long lists", "range(0, num_tokens, BLOCK)", "range(0, tl.minimum(num_tokens, BLOCK), BLOCK)", _EDITS),
        ("words", "expected == token", "expected != token", _EDITS),
        ("words in prompts", "place >= prompt_length", "place >= 0", _EDITS),
        ("words in drafts", "drafts_ptr + 1 - back", "drafts_ptr", _EDITS),
    ],
    "history_match/fused.py": [
        ("no such function", "tl.where(largest > 0, place, 0)", "tl.nowhere(place)", ("lookup", 2100))
    ],
    "acceptance/fused.py": [
        ("no such function", "old_tried * _DECAY + tried", "tl.nowhere(old_tried)", ("acceptance", 2100))
    ],
    "steps/fused.py": [
        ("padding", "slots < num_slots, slots", "slots <= num_slots, slots", ("rows", 2100)),
        ("a kind", "_KINDS * before + 1", "_KINDS * before + 2", ("rows", 2100)),
        ("a length", "tl.load(computed_ptr + slots) + 1", "tl.load(computed_ptr + slots)", ("rows", 2100)),
        ("another's token", "tl.where(is_first, token_ids, second_ids)", "second_ids", ("rows", 2100)),
    ],
    "budget/fused.py": [("one less", "left = budget -", "left = budget - 1 -", ("budget", 2100))],
    "trees/fused.py": [
        ("siblings", "(bit == 1) |", "(bit >= 0) |", ("trees, attention", 2100)),
        ("any child", "(tokens == token) &", "(tokens >= 0) &", ("trees, paths", 2100)),
        (
            "a slot",
            "target = root + node, root + step",
            "target = root + node, root + step + 1",
            ("trees, moves", 2100),
        ),
    ],
}


def problems(package: str, vocab_size: int, only: str | None = None) -> dict[str, str]:
    check = importlib.import_module(f"{package}.self_check")
    served = {"samples": True, "looks_up": True, "trims": True, "runs_target": True, "cascades": True}
    dtype = torch.bfloat16
    if (only or "").startswith("trees"):  # Triton's interpreter multiplies no bfloat16
        dtype, served["heads"] = torch.float32, (4, 2, 16)
    shapes = check.Shapes(vocab_size, dtype, max_num_draft=3, **served)
    findings = check.check_device(torch.device(DEVICE), shapes, only)
    return {finding.name: finding.problem for finding in findings}


@needs_triton
def test_sound() -> None:
    """Fails if a check reports a correct kernel, or if a kernel has no check."""
    problem_of = problems("vllm_specplugins.kernels", 2100)
    assert len(problem_of) == 12
    for name in ("trees, attention", "trees, paths", "trees, moves"):
        problem_of |= problems("vllm_specplugins.kernels", 2100, only=name)
    assert len(problem_of) == 15 and not any(problem_of.values()), problem_of


def planted() -> list[Any]:
    """An error of each file of verification, all of the others; all with SPECPLUGINS_PLANTED=1, which takes minutes."""
    everything = os.environ.get("SPECPLUGINS_PLANTED") == "1"
    return [
        pytest.param(file, *error, id=f"{file}: {error[0]}")
        for file, errors in PLANTED.items()
        for error in (errors if everything or not file.startswith("rejection/") else errors[:1])
    ]


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter's process")
@pytest.mark.parametrize(("file", "name", "old", "new", "shapes"), planted())
def test_planted(
    file: str, name: str, old: str, new: str, shapes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: inputs that do not reach what they are to check; a kernel of drafts that is not even run."""
    check, vocab_size = shapes
    package = tmp_path / ("planted_" + "".join(filter(str.isalpha, file + name)))
    shutil.copytree(Path(kernels.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (package / file).read_text()
    assert source.count(old) >= 1, "the planted error has no place"
    (package / file).write_text(source.replace(old, new))
    monkeypatch.syspath_prepend(str(tmp_path))
    found, runs = problems(package.name, vocab_size, check)[check], "nowhere" not in new
    assert found.startswith("differs from its reference" if runs else "cannot run (")
    assert runs or "AttributeError" in found


def test_advice() -> None:
    """Kills: a server that drafts nothing because of trees, and a log that does not say so."""
    from vllm_specplugins.kernels.self_check import Finding

    assert "without trees" in Finding("trees, attention", "cannot run").advice
    assert Finding("rows", "cannot run").advice == ""
