"""tests/gpu/forced_trace.py with engines that are made up: what it asks of `bench` and `replay`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_specplugins.engine.harness.traffic import Answer, Turn

pytest.importorskip("vllm")
GPU = Path(__file__).parents[1] / "gpu"


@pytest.mark.parametrize(("has_drafter", "rate"), [(False, "0.5"), (True, "0.5"), (False, "")])
def test_program(
    has_drafter: bool, rate: str, made_up: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Fails if engines get another log than the one that is played, if a drafter is not served alone and in a cascade,
    if a replay's costs are not those that were measured, or if rates or a length are not as asked for."""
    monkeypatch.syspath_prepend(str(GPU))
    import forced_trace

    def ask(engine: Any, message: object) -> Turn:
        outputs = [json.loads(line)["output"] for line in (tmp_path / "tiny.jsonl").read_text().splitlines()]
        answers = [Answer(outputs[row], 20.0, [10.0] * 95, 1) for row in engine.traffic.logged]
        return Turn(2.0, answers, 2.0, steps=[(1, 10.0)] * 3 + [(5, 12.0)] * 3)

    engines = made_up(ask, log=[])
    asked = ["forced_trace.py", "--shape", "tiny", "--folder", str(tmp_path), "--batch", "1,4"]
    asked += ["--rate", rate, "--output-len", "96"]
    monkeypatch.setattr(sys, "argv", asked + ["--drafter"] * has_drafter)
    assert forced_trace.main() == 0
    methods, printed = [config and config["method"] for config in engines.configs], capsys.readouterr().out
    assert methods == [None, *(["eagle3", "cascade"] if has_drafter else ["ngram_gpu", "prompt_lookup"])]
    assert ("rate 0.5 of capacity" in printed) is bool(rate)
    assert {len(json.loads(row)["output"]) for row in (tmp_path / "tiny.jsonl").read_text().splitlines()} == {96}
    if not has_drafter:
        assert "* prompt_lookup, 4 at a time: 1.000 tokens a step; replay 1." in printed
        assert "steps that bench measured" in " ".join(printed.split())
    for name in ("forced_trace", "start"):
        sys.modules.pop(name, None)
