"""`verify-lossless` with engines that are made up, and everything else real."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from vllm_specplugins.__main__ import main
from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.harness.samples import Draw, Drawn, Request
from vllm_specplugins.tools import progress, verify_lossless
from vllm_specplugins.tools.lossless import grid
from vllm_specplugins.tools.lossless.model import VOCAB_SIZE, ExactModel, make_model
from vllm_specplugins.tools.lossless.report import ChiSquared, Judged, Report

pytest.importorskip("vllm")
EXACT = ExactModel(make_model(0), grid.NUM_TOKENS)  # of --seed 0


CUMULATIVE: dict[str, np.ndarray] = {}


def cumulative(prompt: list[int], params: dict[str, Any]) -> np.ndarray:
    """Running sums of the exact probabilities of all outcomes."""
    key = repr((prompt, sorted((name, value) for name, value in params.items() if name not in ("n", "seed"))))
    if key not in CUMULATIVE:
        sums = EXACT.joint(prompt, params).ravel().cumsum()
        CUMULATIVE[key] = sums / sums[-1]
    return CUMULATIVE[key]


class MadeUpEngine:
    """In place of sampling_engine: samples from the exact distribution; a parameter may be made wrong, or refused."""

    num_drafted = 100
    wrong: ClassVar[dict[str, Any]] = {}
    refused: ClassVar[tuple[str, ...]] = ()
    dies_of: ClassVar[str] = ""
    wrong_without_speculation = False

    def __init__(self, blame: str, log: Path, model: Path, config: Any, settings: dict[str, Any]):
        assert (model / "config.json").exists()
        self._is_plain, self._rng = config is None, np.random.default_rng(settings["seed"])
        self._is_alive = True

    def __enter__(self) -> Draw:
        return self.draw

    def __exit__(self, *_: object) -> None:
        pass

    def draw(self, requests: Sequence[Request]) -> Drawn:
        assert self._is_alive
        if not self._is_plain and any(name in request.params for request in requests for name in self.refused):
            return Drawn(refusal="Not yet.")
        if not self._is_plain and any(self.dies_of in request.params for request in requests):
            self._is_alive = False
            raise ConfigError("It died.")
        num_drafted = 0 if self._is_plain else self.num_drafted
        return Drawn([self._outputs(request) for request in requests], num_drafted, num_drafted // 2)

    def _outputs(self, request: Request) -> list[list[int]]:
        params = request.params
        if not self._is_plain or self.wrong_without_speculation:
            params = {**params, **{key: value for key, value in self.wrong.items() if key in params}}
        places = np.searchsorted(cumulative(request.prompt, params), self._rng.random(params.get("n", 1)))
        outcomes = np.stack(np.unravel_index(places, (VOCAB_SIZE,) * grid.NUM_TOKENS), axis=1).tolist()
        return [cut(outcome, params.get("stop_token_ids", [])) for outcome in outcomes]


def cut(outcome: list[int], stop: list[int]) -> list[int]:
    """As an engine would: nothing behind a stop token."""
    ends = [index + 1 for index, token in enumerate(outcome) if token in stop]
    return outcome[: min(ends, default=len(outcome))]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """set(attribute=value, ...) of the made-up engine."""
    monkeypatch.setattr(verify_lossless, "sampling_engine", MadeUpEngine)
    return lambda **values: [monkeypatch.setattr(MadeUpEngine, name, value) for name, value in values.items()]


def run(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report, with one method."""
    method = () if "--method" in options else ("--method", "prompt_lookup")
    status = main(
        ["verify-lossless", "--samples", "1000", "--output-json", str(path / "report.json"), *method, *options]
    )
    return status, json.loads((path / "report.json").read_text())


def verdicts(report: dict[str, Any], method: str = "prompt_lookup") -> dict[str, str]:
    return {cell["cell"]: cell["verdict"] for cell in report["cells"] if cell["method"] == method}


def test_right_samples_pass(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a test that refuses what is right; silence in a file."""
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    status, report = run(tmp_path)
    assert status == 0 and report["lossless"] and report["methods"] == {"prompt_lookup": grid.METHODS["prompt_lookup"]}
    assert set(verdicts(report).values()) == {"passed"} == set(verdicts(report, "no speculation").values())
    assert len(verdicts(report)) == len(grid.cells()) + 1
    output, lines = capsys.readouterr()
    assert re.search(r"^prompt_lookup: \d+ of 34, .* left$", lines, re.MULTILINE)
    assert "Lossless: 34 passed." in output and "T 1.5, top-k 3, seeds" in output and "Bonferroni" in output


@pytest.mark.parametrize(
    ("wrong", "seen_in"),
    [
        ({"temperature": 0.8}, "T 1.0"),
        ({"top_k": 4}, "T 0.7, top-k 3"),
        ({"top_p": 1.0}, "T 1.5, top-p 0.8"),
        ({"min_p": 0.1}, "T 1.0, min-p 0.15"),
        ({"repetition_penalty": 1.0}, "T 0.7, rep 1.7"),
        ({"logit_bias": {}}, "T 1.0, bias"),
        ({"allowed_token_ids": list(range(VOCAB_SIZE))}, "T 1.0, allowed, top-p 0.8"),
        ({"min_tokens": 1}, "T 0.7, stops, min 2, top-k 6"),
    ],
)
def test_wrong_samples_are_seen(wrong: dict[str, Any], seen_in: str, engine: Any, tmp_path: Path) -> None:
    """Fails if the exact distribution ignores a parameter, or if a verdict has no effect."""
    engine(wrong=wrong)
    status, report = run(tmp_path)
    assert status == 1 and not report["lossless"]
    found = verdicts(report)
    assert found[seen_in] == "WRONG" and found["all of the above at once"] == "WRONG"
    assert set(verdicts(report, "no speculation").values()) == {"passed"}


def test_another_greedy_token_is_seen(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine(wrong={"presence_penalty": 8.0})
    status, report = run(tmp_path)
    greedy = "T 0.0, rep 1.7, pres 0.8, freq 0.6"
    assert status == 1 and verdicts(report)[greedy] == "WRONG" and verdicts(report)["T 0.0"] == "passed"
    assert "differ" in capsys.readouterr().out


def test_nothing_drafted_proves_nothing(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine(num_drafted=0)
    status, report = run(tmp_path)
    assert status == 1 and set(verdicts(report).values()) == {"nothing drafted"}
    assert "NOT proven lossless: 17 passed, 17 nothing drafted." in capsys.readouterr().out


def test_refused(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither passed nor failed; what is served at once with the others leaves them out."""
    engine(refused=("min_p", "logit_bias"))
    status, report = run(tmp_path)
    assert status == 0 and list(verdicts(report).values()).count("refused") == 5
    assert verdicts(report)["all of the above at once"] == "passed"
    assert "refused: Not yet." in capsys.readouterr().out


def test_all_refused_is_no_proof(engine: Any, tmp_path: Path) -> None:
    engine(refused=("temperature",))
    status, report = run(tmp_path)
    assert status == 1 and set(verdicts(report).values()) == {"refused"}


def test_an_engine_that_dies_ends_its_method(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the next method is verified. Kills: a method that passes by what it did before."""
    engine(dies_of="top_k")
    status, report = run(tmp_path, "--method", "prompt_lookup", "early_exit-coupled")
    for method in ("prompt_lookup", "early_exit-coupled"):
        found = verdicts(report, method)
        assert list(found.items())[-1] == ("T 0.7, top-k 3", "DIED") and found["T 1.0"] == "passed"
    assert status == 1 and "DIED: It died." in capsys.readouterr().out


def test_false_alarms() -> None:
    """Kills: a limit of one test for all, or none that counts."""
    for p_value, verdict in ((2e-4, "passed"), (0.9e-4, "WRONG")):
        tests = [ChiSquared(1.0, 1, p) for p in (p_value, *[0.5] * 9)]
        cells = [Judged("none", "", 0, 0, test) for test in tests]
        assert Report(cells, {}).verdicts == [verdict, *["passed"] * 9]


def test_wrong_without_speculation(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kills: a method blamed for what it did not do."""
    engine(wrong={"temperature": 0.8}, wrong_without_speculation=True)
    assert run(tmp_path)[0] == 1
    assert "Nothing is proven: this vLLM is wrong with no speculation" in capsys.readouterr().out


def test_grid() -> None:
    """Kills: a parameter that is left out, or a cell that comes twice."""
    names = [cell.name for cell in grid.cells()]
    [params] = zip(*(cell.params for cell in grid.cells()), strict=True)
    assert len(set(names)) == len(names) and {p["temperature"] for p in params} == {0.0, 0.7, 1.0, 1.5}
    assert {*grid.SHORT, *grid.WORDS} == {name for p in params for name in p}


def test_requests() -> None:
    """Groups come in turns, and no two outputs share a seed."""
    cell = grid.cell(1.0, grid.SEEDED)
    groups = grid.groups(cell, grid.make_prompts(0, 4))
    indices, requests = zip(*grid.requests(groups, 400), strict=True)
    assert indices[:5] == (0, 1, 2, 3, 0) and sum(request.params["n"] for request in requests) == 400
    seeds = [request.params["seed"] + i for request in requests for i in range(grid.PER_TURN)]
    assert len(set(seeds)) == 400
    mixed = grid.groups(grid.mixed(grid.cells()), grid.make_prompts(0, 4))
    assert len(mixed) == 13 and all(request.params["temperature"] > 0 for request in mixed)
    assert sum("seed" in request.params for _, request in grid.requests(mixed, 13)) == 2 * grid.MIN_TURNS
