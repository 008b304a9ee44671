"""`verify-lossless` with real engines: our methods pass, and every planted error is caught."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ALL, INTERPRETED, RUNNER
from vllm_specplugins.kernels import rejection
from vllm_specplugins.kernels.rejection import reference

from vllm_specplugins.engine.harness.samples import SETTINGS, draw
from vllm_specplugins.tools.lossless import grid
from vllm_specplugins.tools.lossless.grid import BIAS, CUTS, METHODS, PENALTIES, REWARDS, TOP_K, Cell, cell
from vllm_specplugins.tools.lossless.model import write_checkpoint, write_parts
from vllm_specplugins.tools.lossless.report import PASSED, WRONG, Judged, Report
from vllm_specplugins.tools.verify_lossless import NO_SPECULATION, Verification

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "write-a-proposer.md"
WITHOUT_TAPES = "64 samples a step take minutes in Triton's interpreter"
NUM_SAMPLES = 300 if INTERPRETED else 1500
PASSING = ["cascade-verify"] if INTERPRETED else ["prompt_lookup", "cascade-verify", "jump-probabilistic"]
if ALL:
    PASSING = list(METHODS)
PASSING_CELLS = [cell(1.0, CUTS, PENALTIES, BIAS)] if INTERPRETED else [cell(0.0, PENALTIES), *grid.cells()[-6:]]
Judge = Callable[..., list[tuple[Judged, str]]]


@pytest.fixture(scope="module")
def judge(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """judge(method, cells, num_samples): each cell and its verdict, and that of all at once."""
    folder = tmp_path_factory.mktemp("tiny")
    model = write_checkpoint(folder, seed=0)
    write_parts(folder, seed=0)
    settings = {**SETTINGS, "model": str(folder), "seed": 0, "max_num_seqs": 64 if INTERPRETED else 256}

    def judge(method: str, cells: list[Cell], num_samples: int = NUM_SAMPLES) -> list[tuple[Judged, str]]:
        verification = Verification(model, cells, num_samples, 0, lambda: None)
        plain: list[Judged] = []
        if any(cell.is_greedy for cell in cells):
            plain = verification.judge(partial(draw, engine(**settings)), NO_SPECULATION)
        judged = verification.judge(partial(draw, engine(grid.placed(METHODS[method], folder), **settings)), method)
        none = plain or [Judged(NO_SPECULATION, "")]
        verdicts = Report([*none, *judged], {}).verdicts
        return list(zip(judged, verdicts[len(none) :], strict=True))

    return judge


@pytest.mark.parametrize("method", PASSING)
def test_ours_pass(method: str, judge: Judge) -> None:
    """Kills: an exact distribution that is not vLLM's, drafts that nobody counts."""
    for judged, verdict in judge(method, PASSING_CELLS, 200 if INTERPRETED else 500):
        assert verdict == PASSED, judged
        assert 0 < judged.num_accepted < judged.num_drafted


def accept_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts with min(1, p / q) + 0.02."""
    right = reference.draft_ratio
    monkeypatch.setattr(reference, "draft_ratio", lambda p, q: right(p, q) + 0.02)


def recover_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the recovered token from p instead of the residual."""
    monkeypatch.setattr(reference, "residual", lambda p, *_: p)


def another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """q of twice the temperature."""

    def wrong(*arguments: Any) -> Any:
        draft_logits = arguments[7] if len(arguments) > 7 else None
        return rejection.rejection_sample(*arguments[:7], None if draft_logits is None else draft_logits / 2)

    replace_operation(monkeypatch, wrong)


def forget_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties do not count the step's drafts."""
    from vllm_specplugins.engine.v1 import edits

    right = edits.adjust

    def wrong(logits: Any, cu_num_logits: Any, draft_token_ids: Any, *rest: Any) -> Any:
        return right(logits, cu_num_logits, torch.full_like(draft_token_ids, -1), *rest)

    monkeypatch.setattr(edits, "adjust", wrong)


def replace_operation(monkeypatch: pytest.MonkeyPatch, operation: Callable[..., Any]) -> None:
    where = "v2.verification" if RUNNER == "v2" else "v1"
    monkeypatch.setattr(f"vllm_specplugins.engine.{where}.verify.rejection_sample", operation)


SAMPLED = "early_exit-probabilistic"
PLANTED = {
    accept_more: (SAMPLED, cell(1.5, TOP_K)),
    another_temperature: (SAMPLED, cell(1.0)),
    recover_from_p: (SAMPLED, cell(1.0)),
    forget_drafts: (SAMPLED, cell(1.0, REWARDS)),
}


@pytest.mark.skipif(RUNNER == "v2" and not INTERPRETED, reason="plants its errors into what runs on a CPU")
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_errors_are_caught(plant: Any, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a grid, a number of samples or a test that these errors slip through."""
    if INTERPRETED and plant is not accept_more:
        pytest.skip("the same operation as on V1, and too few samples can be drawn to see the others")
    method, cell = PLANTED[plant]
    plant(monkeypatch)
    [(judged, verdict)] = judge(method, [cell])
    assert verdict == WRONG, judged


@pytest.mark.skipif(INTERPRETED, reason="the same program on both runners, and 34 cells through the interpreter")
def test_command(tmp_path: Path) -> None:
    """From the command line to its exit status, with the documentation's proposer: engines in processes of their own.

    Kills: an engine that the user's module does not reach, counts that nobody prints."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_proposer.py").write_text(code)
    config = {"method": "custom", "proposer": "my_proposer:LastSuccessor", "gate": "off", "num_speculative_tokens": 2}
    command = [sys.executable, "-m", "vllm_specplugins", "verify-lossless", "--json", tmp_path / "report.json"]
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, "--method", json.dumps(config), "--samples", "100"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lossless"] and {cell["verdict"] for cell in report["cells"]} == {PASSED}
    assert "Lossless: 34 passed." in done.stdout and "Traceback" not in done.stderr  # which says how far it is


@pytest.mark.parametrize("has_begun", [False, True])
def test_refused_or_failed(has_begun: bool) -> None:
    """Kills: an engine that failed in a step, and would never end the next, taken for one that refuses."""
    from types import SimpleNamespace

    def generate(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("what is wrong.\nand more")

    llm_engine = SimpleNamespace(has_unfinished_requests=lambda: has_begun)
    llm = SimpleNamespace(generate=generate, get_metrics=list, llm_engine=llm_engine)
    if has_begun:
        with pytest.raises(ValueError, match="what is wrong"):
            draw(llm, [])
    else:
        assert draw(llm, []).refusal == "what is wrong."
