"""`bench` with engines that are made up, and everything else real."""

import json
import time
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
import torch

from vllm_specplugins.__main__ import main
from vllm_specplugins.engine.harness.serving import Answer, Machine, Traffic, Turn, _Clock
from vllm_specplugins.tools.bench import command

pytest.importorskip("vllm")


class MadeUpEngine:
    """In place of ServingEngine: first tokens after 20 ms and steps of 10 ms, or of 20 ms that emit 3 tokens.

    `lie`: an engine with speculation that says something else; `fast`: one whose steps take 8 ms.
    """

    lie: ClassVar[bool] = False
    fast: ClassVar[bool] = False
    dtype: ClassVar[str] = "float32"
    log: ClassVar[list[str]] = []

    def __init__(self, name: str, arguments: dict[str, Any], config: Any, log: Path):
        self._name, self._config, self.arguments = name, config, arguments
        self._round = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> Machine:
        return Machine("a made-up machine", self.dtype, "V1")

    def begin(self, traffic: Traffic) -> None:
        self._traffic, self._num_tokens = traffic, 0
        self._round += 1

    def go_on(self) -> Turn | int:
        """A slice makes as many tokens as steps of some 30 ms would."""
        self.log.append(self._name)
        total = self._traffic.max_tokens * len(self._traffic.prompts)
        self._num_tokens += 3 if self._config is None else 9
        return self._turn() if self._num_tokens >= total else self._num_tokens

    def _turn(self) -> Turn:
        slow = 1 + self._round / 10  # the machine gets slower from round to round, for all
        step_ms, emitted = (10.0, 1) if self._config is None else (8.0 if self.fast else 20.0, 3)
        answers = []
        for _ in self._traffic.prompts:
            tokens = list(range(self._traffic.max_tokens))
            if self.lie and self._config is not None:
                tokens[-1] = 0
            num_steps = (len(tokens) - 1) // emitted
            answers.append(Answer(tokens, 20.0 * slow, [step_ms * slow] * num_steps, 1))
        seconds = sum(answer.first_ms + sum(answer.step_ms) for answer in answers) / 1000
        steps = sum(len(answer.step_ms) for answer in answers)
        drafts = 0 if self._config is None else steps // 2
        return Turn(seconds, answers, seconds, drafts, 4 * drafts, 3 * drafts)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpEngine]:
    for name, value in {"lie": False, "fast": False, "dtype": "float32", "log": []}.items():
        monkeypatch.setattr(MadeUpEngine, name, value)
    monkeypatch.setattr(command, "ServingEngine", MadeUpEngine)
    have_free(monkeypatch, 64)
    return MadeUpEngine


def have_free(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=gib << 30))


def run(model: Path, *options: str) -> int:
    few = ("--methods", "prompt_lookup", "--workloads", "random", "--prompts", "2", "--tokens", "31", "--rounds", "4")
    return main(["bench", "--model", str(model), *few, *options])


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines share a GPU's memory")
@pytest.mark.parametrize(("gib", "in_turns"), [(4, False), (8, True)])
def test_little_memory(
    gib: int,
    in_turns: bool,
    tiny_model: Path,
    engines: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two engines take 5 GiB. Where these are not free, one serves after the other, with the same figures.

    Kills: engines that page each other out; a method without a row; rounds held against another round's.
    """
    have_free(monkeypatch, gib)
    assert run(tiny_model) == 0
    changes = sum(name != before for name, before in pairwise(engines.log))
    assert changes > 1 if in_turns else changes == 1
    output = " ".join(capsys.readouterr().out.split())
    assert ("took turns" in output) is in_turns and ("one engine after the other" in output) is not in_turns
    assert "1.45x" in output


def test_figures(tiny_model: Path, engines: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: a step of 3 tokens takes 20 ms where 3 steps take 30 ms.

    Kills: the first token counted as a step, the round that warms up counted, ratios of other rounds' times, a
    range that is not the rounds' own.
    """
    assert run(tiny_model, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    plain, lookup = found["rows"]
    assert lookup["ratio"].pop("rounds") == pytest.approx([320 / 220] * 4)
    assert lookup["ratio"] == pytest.approx(dict.fromkeys(("median", "low", "high"), 320 / 220))
    assert lookup["decoding"]["median"] == pytest.approx(1.5)
    assert lookup["tokens_per_step"] == 3.0 and plain["tokens_per_step"] == 1.0
    assert lookup["step_cost"]["median"] == pytest.approx(2.0)
    assert lookup["coverage"] == 0.5 and lookup["accepted"] == 0.75
    # The median of rounds 2 to 5, of which the third and fourth are 1.3 and 1.4 times as slow.
    assert lookup["step_ms"] == pytest.approx(20 * 1.35) and lookup["first_ms"] == pytest.approx(20 * 1.35)
    assert lookup["num_outputs"] == 8 and lookup["num_different"] == 0 and lookup["repeats"] == 0
    output = capsys.readouterr().out
    assert "1.45x (1.45-1.45)" in output and "1.50x (1.50-1.50)" in output and "8/8" in output
    advice = 'Serve with prompt_lookup: 1.45x (1.45-1.45).\n--speculative-config \'{"method": "prompt_lookup"}\''
    assert advice in output and max(map(len, output.splitlines())) <= 100
    assert "decodes" not in output
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and int.from_bytes(picture[16:20], "big") < 700  # of one bar, pixels wide


def test_a_clock_stands_still_while_others_serve() -> None:
    """And workers are told for how long. Fails if they are not, or if a slice does not end."""
    here, there = Pipe()
    told = []
    clock = _Clock(there, 0.0, lambda name, args: told.append((name, *args)))
    begun = time.perf_counter() - clock.now()
    Timer(0.2, here.send, (True,)).start()
    clock.give_way(3)
    [(name, paused_ms)] = told
    assert here.recv() == 3 and name == "specplugins_paused" and paused_ms > 100
    assert time.perf_counter() - clock.now() - begun >= paused_ms / 1000


def test_engines_take_turns(tiny_model: Path, engines: Any) -> None:
    """Kills: a round in which one engine is done before another has begun, or the same one always first."""
    assert run(tiny_model, "--rounds", "1") == 0
    turns = len(engines.log) // 2
    first, second = engines.log[:turns], engines.log[turns:]
    assert first[0] == "none" and second[0] == "prompt_lookup"
    # 3 tokens a slice against 9: behind each slice of the fast engine come three of the other.
    assert first[:9] == ["none", "prompt_lookup", "none", "none", "none", "prompt_lookup", "none", "none", "none"]


def test_an_output_that_differs(tiny_model: Path, engines: Any, monkeypatch: Any, capsys: Any) -> None:
    """Kills: speculation that is recommended although it changes outputs; exit status 0; rounding taken for it."""
    monkeypatch.setattr(engines, "lie", True)
    assert run(tiny_model) == 1
    output = capsys.readouterr().out
    assert "Speculation changed an output" in output and "--speculative-config" not in output and "0/8" in output
    assert run(tiny_model, "--temperature", "0.8") == 0
    assert "not compared" in capsys.readouterr().out
    monkeypatch.setattr(engines, "dtype", "bfloat16")
    assert run(tiny_model) == 0
    assert "Outputs in bfloat16 may differ" in capsys.readouterr().out


def test_more_than_its_steps(tiny_model: Path, engines: Any, monkeypatch: Any, capsys: Any) -> None:
    """Kills: decoding 3.75 times as fast with 3 tokens a step, without a word; advice from it."""
    monkeypatch.setattr(engines, "fast", True)
    assert run(tiny_model) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "decodes 3.75x as fast with 3.00 tokens/step: its steps took 0.80x (0.80-0.80)" in output
    assert "No advice: a ratio is above tokens/step" in output and "--speculative-config" not in output


def test_a_busy_machine(tiny_model: Path, engines: Any, monkeypatch: Any, capsys: Any) -> None:
    """Kills: a method that is preferred to one that may be as fast; wide ranges without a word; advice from either."""
    methods = ["--methods", "ngram,prompt_lookup"]
    assert run(tiny_model, *methods) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "the ranges overlap, so that ngram is not told from prompt_lookup 1.45x (1.45-1.45)." in output
    assert "No advice" in output and "--speculative-config" not in output and "Ranges are wide" not in output
    original = engines._turn

    def turn(self: MadeUpEngine) -> Turn:
        served = original(self)
        busy = self._name == "ngram" and self._round == 3
        return Turn(2 * served.seconds, served.answers) if busy else served

    monkeypatch.setattr(engines, "_turn", turn)
    assert run(tiny_model, *methods) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Ranges are wide" in output and "the ranges are wide" in output and "--speculative-config" not in output


@pytest.mark.parametrize(("options", "words"), [
    (["--rounds", "2", "--prompts", "4"], "No advice: it takes 3 rounds, not 2."),
    (["--rounds", "3"], "No advice: it takes 8 requests of each workload, not 6."),
])  # fmt: skip
def test_too_little_for_advice(options: list[str], words: str, tiny_model: Path, engines: Any, capsys: Any) -> None:
    """Kills: a method recommended from two rounds, or from six requests."""
    assert run(tiny_model, *options) == 0
    output = capsys.readouterr().out
    assert words in output and "--speculative-config" not in output


def test_rounds_are_strangers(tiny_model: Path, engines: Any, monkeypatch: Any, capsys: Any) -> None:
    """Kills: prompts, or a tenant, that two rounds share; rounds of `repeat` that do not; methods asked differently."""
    asked: dict[str, list[Traffic]] = {}
    begin = engines.begin

    def write_down(self: MadeUpEngine, traffic: Traffic) -> None:
        asked.setdefault(self._name, []).append(traffic)
        begin(self, traffic)

    monkeypatch.setattr(engines, "begin", write_down)
    assert run(tiny_model, "--prompt-tokens", "32") == 0
    rounds = asked["prompt_lookup"]
    prompts = [tuple(prompt) for traffic in rounds for prompt in traffic.prompts]
    assert len(set(prompts)) == len(prompts) == 10 and len({traffic.salt for traffic in rounds}) == 5
    assert "what an engine learns" in " ".join(capsys.readouterr().out.lower().split()) and asked["none"] == rounds
    for options, num_prompts in ((["--workloads", "repeat"], 2), (["--keep"], 10)):
        asked.clear()
        assert run(tiny_model, "--prompt-tokens", "32", *options) == 0
        rounds = asked["prompt_lookup"]
        assert len({traffic.salt for traffic in rounds}) == 1
        assert len({tuple(prompt) for traffic in rounds for prompt in traffic.prompts}) == num_prompts
        assert "what was learnt from a round's outputs is known" in " ".join(capsys.readouterr().out.split())


def test_all_cells(tiny_model: Path, engines: Any, tmp_path: Path, capsys: Any) -> None:
    """Kills: a cell that is left out, or served with too few requests for its batch."""
    options = ["--workloads", "code,random", "--batch", "1,4", "--temperature", "0,1", "--rounds", "1"]
    assert run(tiny_model, *options, "--prompt-tokens", "32", "--json", str(tmp_path / "a.json")) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    cells = {(row["cell"]["workload"], row["cell"]["batch"], row["cell"]["temperature"]) for row in rows}
    assert len(cells) == 8 and len(rows) == 16
    assert {row["num_outputs"] for row in rows if row["cell"]["batch"] == 4} == {4}


REFUSED = {
    "method": (
        ["--methods", "sorcery"],
        "--methods must be of none, ngram, ngram_gpu, early_exit, cascade, prompt_lookup, ",
    ),
    "no method": (["--methods", "none"], "--methods must name a method beside none"),
    "K": (["--methods", "ngram:65"], "--methods: K must be 1 to 64, as in ngram:5, not 'ngram:65'"),
    "no JSON": (["--methods", "{"], "--methods must be names or JSON, not '{'"),
    "field": (["--methods", '{"method":"prompt_lookup","max_ngram":99}'], "max_ngram must be an integer from 1 to 16"),
    "workload": (["--workloads", "prose"], "--workloads must be of code, copy, chat, random, repeat, not 'prose'"),
    "no file": (["--data", "nowhere.jsonl"], "--data must be readable files, not nowhere.jsonl"),
    "folder as file": (["--data", "."], "--data must be readable files, not . (Is a directory)"),
    "no model": (["--model", "./nowhere"], "a folder with a config.json, not './nowhere'"),
    "batch": (["--batch", "1,none"], "--batch: must be an integer from 1 to 4096, not 'none'"),
    "temperature": (["--temperature", "-1"], "--temperature: must be numbers from 0 to 10, not '-1'"),
    "context": (["--tokens", "500"], "--tokens must be at most 256 behind these prompts, not 500"),
    "folder": (["--plot", "nowhere/a.png"], "--plot must be a file in a folder that is there, not nowhere/a.png"),
    "engine": (["--engine-args", "[]"], "--engine-args: must be a JSON object, not '[]'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tiny_model: Path, engines: Any, capsys: Any) -> None:
    """Kills: a check that is left out, a traceback, an engine that is started first, another exit status."""
    options, words = REFUSED[name]
    try:
        status = run(tiny_model, *options)
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2 and words in error and not engines.log
    assert error.startswith("error: ") and error.endswith(".\n") and error.count("\n") == 1
