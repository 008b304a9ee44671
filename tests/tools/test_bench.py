"""`bench` with engines that are made up, and everything else real."""

import json
import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path
from random import Random
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplugins.__main__ import main
from vllm_specplugins.engine.harness.serving import _Clock
from vllm_specplugins.engine.harness.traffic import Answer, Turn
from vllm_specplugins.tools.bench import command

pytest.importorskip("vllm")
Run = Callable[..., tuple[int, str]]


def ask(engine: Any, message: object) -> Turn | int:
    """First tokens after 20 ms and steps of 10 ms, or with speculation of 20 ms that emit 3 tokens; slices of 30 ms."""
    engine.log.append(engine.name)
    num_tokens, plain = engine.traffic.output_lengths, engine.config is None
    engine.num_tokens += 3 if plain else 9
    if engine.num_tokens < num_tokens * len(engine.traffic.prompts):
        return int(engine.num_tokens)
    slow = 1 + engine.round / 10  # the machine gets slower from round to round, for all
    step_ms, emitted = (10.0, 1) if plain else (20.0, 3)
    tokens = [*range(num_tokens - 1), 0 if engine.lie and not plain else num_tokens - 1]
    num_steps = (num_tokens - 1) // emitted
    answers = [Answer(tokens, 20.0 * slow, [step_ms * slow] * num_steps, 1) for _ in engine.traffic.prompts]
    seconds = sum(answer.first_ms + sum(answer.step_ms) for answer in answers) / 1000
    drafts = 0 if plain else num_steps * len(answers) // 2
    noise = engine.noise.get(engine.name, {}).get(engine.round, 1.0)
    wall = 2 * seconds if engine.busy and engine.name == "ngram" and engine.round == 3 else seconds
    taken = [(1 if plain else 5, step_ms * slow)] * num_steps
    return Turn(wall * noise, answers, seconds * noise, drafts, 4 * drafts, 3 * drafts, steps=taken)


@pytest.fixture
def engines(made_up: Any) -> Any:
    """`lie`: speculation changes outputs; `busy`: the machine is, in the third round of
    ngram; `noise`: by method and round, so many times as slow; `log`: who had a slice of time."""
    return made_up(ask, lie=False, busy=False, noise={}, log=[])


@pytest.fixture
def asked(tiny_model: Path, prompts_file: Path) -> list[str]:
    return ["bench", "--model", str(tiny_model), "--methods", "prompt_lookup", "--dataset-path", str(prompts_file)]


@pytest.fixture
def run(asked: list[str], engines: Any, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(options): the exit status, and what was printed."""
    few = "--num-prompts", "2", "--output-len", "31", "--rounds", "4"
    return lambda *options: (main([*asked, *few, *options]), " ".join(capsys.readouterr().out.split()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines share a GPU's memory")
@pytest.mark.parametrize(("gib", "in_turns"), [(4, False), (8, True)])
def test_little_memory(gib: int, in_turns: bool, run: Run, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines take 5 GiB. Where these are not free, one serves after the other, with the same figures. Kills:
    engines that page each other out; a method without a row; rounds held against another round's.
    """
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=gib << 30, total=64 << 30))
    status, output = run()
    changes = sum(name != before for name, before in pairwise(engines.log))
    assert status == 0 and (changes > 1 if in_turns else changes == 1)
    assert ("took turns" in output) is in_turns and ("one engine after the other" in output) is not in_turns
    assert "1.45x" in output


def test_figures(asked: list[str], run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: a step of 3 tokens takes 20 ms where 3 steps take 30 ms. Kills: the first token counted as a step, the
    round that warms up counted, ratios of other rounds' times, a range that is not the rounds' own, lines of more than
    100 columns, step times of one method alone.
    """
    status, output = run("--output-json", str(tmp_path / "a.json"))
    found = json.loads((tmp_path / "a.json").read_text())
    plain, lookup = found["rows"]
    assert found["step_ms_by_tokens"] == pytest.approx({"1": 10 * 1.35, "5": 20 * 1.35})
    assert status == 0 and lookup["ratio"].pop("rounds") == pytest.approx([320 / 220] * 4)
    assert lookup["ratio"] == pytest.approx(dict.fromkeys(("median", "low", "high"), 320 / 220))
    assert lookup["decoding"]["median"] == pytest.approx(1.5)
    assert lookup["tokens_per_step"] == 3.0 and plain["tokens_per_step"] == 1.0
    assert lookup["step_cost"]["median"] == pytest.approx(2.0)
    assert lookup["coverage"] == 0.5 and lookup["accepted"] == 0.75
    # The median of rounds 2 to 5, of which the third and fourth are 1.3 and 1.4 times as slow.
    assert lookup["step_ms"] == pytest.approx(20 * 1.35) and lookup["first_ms"] == pytest.approx(20 * 1.35)
    assert lookup["num_outputs"] == 8 and lookup["num_different"] == 0 and lookup["repeats"] == 0
    advice = 'Serve with prompt_lookup: 1.45x (1.45-1.45). --speculative-config \'{"method": "prompt_lookup"}\''
    assert all(words in output for words in ("1.45x (1.45-1.45)", "1.50x (1.50-1.50)", "8/8", advice))
    assert main(asked) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_columns_divide(run: Run, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: medians of each engine's rounds, which do not divide where rounds differ: 9.0, 12.6 and 1.25x."""
    noise = {"none": {2: 2.0, 3: 1.0, 4: 1.1, 5: 3.0}, "prompt_lookup": {2: 1.0, 3: 1.2, 4: 2.5, 5: 1.0}}
    monkeypatch.setattr(engines, "noise", noise)
    _, output = run()
    plain, ours = (re.search(rf"{name} [^\d]*([\d.]+) [^\d]*([\d.]+)x", output) for name in ("none", "prompt_lookup"))
    assert float(ours[1]) / float(plain[1]) == pytest.approx(float(ours[2]), abs=0.011), output


def test_a_clock_stands_still_while_others_serve() -> None:
    """And workers are told for how long. Fails if they are not, or if a slice does not end."""
    here, there = Pipe()
    told = []
    clock = _Clock(there, 0.0, lambda name, args: told.append((name, *args)))
    begun = time.perf_counter() - clock.now()
    Timer(0.2, here.send, (True,)).start()
    clock.give_way(3)
    [(name, paused_ms)] = told
    assert here.recv() == 3 and name == "specplugins_paused" and paused_ms > 0
    assert time.perf_counter() - clock.now() - begun >= paused_ms / 1000


def test_engines_take_turns(run: Run, engines: Any) -> None:
    """Kills: a round in which one engine is done before another has begun, or the same one always first."""
    assert run("--rounds", "1")[0] == 0
    turns = len(engines.log) // 2
    first, second = engines.log[:turns], engines.log[turns:]
    assert first[0] == "none" and second[0] == "prompt_lookup"
    # 3 tokens a slice against 9: after each slice of the fast engine come three of the other.
    assert first[:9] == ["none", "prompt_lookup", "none", "none", "none", "prompt_lookup", "none", "none", "none"]


# Settings of the engines, options, exit status, and parts of what is printed.
VERDICTS: dict[str, tuple[dict[str, Any], list[str], int, list[str]]] = {
    "another output": ({"lie": True}, [], 1, ["Error: speculation changed an output", "0/8"]),
    "another sample": ({"lie": True}, ["--temperature", "0.8"], 0, ["not compared"]),
    "rounding": ({"lie": True, "dtype": "bfloat16"}, [], 0, ["Outputs in bfloat16 may differ"]),
    "two that are as fast": ({}, ["--methods", "ngram,prompt_lookup"], 0, [
        "Serve with ngram: 1.45x (1.45-1.45) (prompt_lookup may be as fast).",
    ]),
    "a busy machine": ({"busy": True}, ["--methods", "ngram,prompt_lookup"], 0, [
        "Times are CPU time of the engine's thread", "ngram: 1.45x (1.45-1.45)",
    ]),
    "one of two is better in every round": (
        {"noise": {"ngram": {2: 1.1, 3: 1.08, 4: 1.12, 5: 1.1}}}, ["--methods", "ngram,prompt_lookup"], 0,
        ["Serve with prompt_lookup: 1.45x (1.45-1.45). --spec"],
    ),
    "as slow as without": ({"noise": {"prompt_lookup": {3: 1.8, 5: 1.7}}}, [], 0, [
        "No advice: the interval of the best method, 0.", "includes 1; more rounds narrow it",
    ]),
    "slower": ({"noise": {"prompt_lookup": {2: 1.6, 3: 1.65, 4: 1.6, 5: 1.65}}}, [], 0, ["Serve without speculation"]),
    "few rounds": ({}, ["--rounds", "2", "--num-prompts", "4"], 0, ["No advice: it needs 3 rounds, not 2."]),
    "few requests": ({}, ["--rounds", "3"], 0, ["No advice: it needs 8 requests of each workload, not 6."]),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name: str, run: Run, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: speculation that is recommended although it changes outputs, or from two rounds or six requests, or where
    the paired rounds do not say that it gains; no advice although they do; another load on the machine that hides the
    difference; rounding taken for a changed output; wide ranges without a word; another exit status."""
    settings, options, expected, said = VERDICTS[name]
    for attribute, value in settings.items():
        monkeypatch.setattr(engines, attribute, value)
    status, output = run(*options)
    assert status == expected and all(words in output for words in said), output
    advises = name not in ("another output", "as slow as without", "slower", "few rounds", "few requests")
    assert ("--speculative-config" in output) is advises
    assert ("Ranges are wide" in output) is (name == "as slow as without")


def test_rounds_are_strangers(run: Run, engines: Any) -> None:
    """Kills: prompts, or a tenant, that two rounds share; methods asked differently."""
    status, output = run()
    rounds = engines.asked["prompt_lookup"]
    prompts = [tuple(prompt) for traffic in rounds for prompt in traffic.prompts]
    assert status == 0 and len(set(prompts)) == len(prompts) == 10 and len({traffic.salt for traffic in rounds}) == 5
    assert "engines keep their estimates" in output.lower() and engines.asked["none"] == rounds


def test_all_cells(run: Run, prompts_file: Path, tmp_path: Path) -> None:
    """Kills: a cell that is left out, or served with too few requests for its batch."""
    (tmp_path / "again.jsonl").write_text(prompts_file.read_text())
    options = [
        "--dataset-path",
        str(prompts_file),
        str(tmp_path / "again.jsonl"),
        "--max-concurrency",
        "1,4",
        "--temperature",
        "0,1",
    ]
    assert run(*options, "--rounds", "1", "--output-json", str(tmp_path / "a.json"))[0] == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    cells = {(row["cell"]["workload"], row["cell"]["batch"], row["cell"]["temperature"]) for row in rows}
    assert len(cells) == 8 and len(rows) == 16
    assert {row["num_outputs"] for row in rows if row["cell"]["batch"] == 4} == {4}


def test_an_interruption_loses_one_cell(run: Run, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second cell. Fails if a cell's figures wait for the end of the run, or lack a method."""

    def interrupted(engine: Any, message: object) -> Turn | int:
        if engine.traffic.at_a_time == 4:
            raise KeyboardInterrupt
        return ask(engine, message)

    monkeypatch.setattr(engines, "ask", interrupted)
    status, output = run("--max-concurrency", "1,4")
    assert status == 130 and output.count("batch") == 1
    assert "batch 1, T 0: none 71.9 tokens/s, 1.00 tok/step; prompt_lookup 104.5 tokens/s, 3.00 tok/step" in output


LOG = [{"prompt": [5, 6, 7], "output": [8, 9, 8], "accepted": {"eagle": [1, 0, 0]}}, {"prompt": [5], "output": [6]}]


def test_forced_logs(
    tiny_model: Path, engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All rounds ask the log's requests, each up to its length; at a rate they arrive at that share of the rate that no
    speculation served. Fails if a request gets another one's length or row, if outputs are not compared with the log,
    if the rate is another method's, or if latencies are not shown beside it."""
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOG))
    monkeypatch.setattr(engines, "ask", lambda engine, message: served(engine, engine.lie))
    given = ["bench", "--model", str(tiny_model), "--methods", "prompt_lookup", "--trace", str(tmp_path / "log.jsonl")]
    given += ["--rounds", "2", "--rate", "0.5", "--output-json", str(tmp_path / "a.json")]
    assert main(given) == 0
    closed, open_ = engines.asked["prompt_lookup"][:3], engines.asked["prompt_lookup"][3:]
    assert all(
        list(traffic.prompts) == [[5, 6, 7], [5]] and list(traffic.logged) == [0, 1] for traffic in closed + open_
    )
    assert all(list(traffic.output_lengths) == [3, 1] and traffic.ignore_eos for traffic in closed + open_)
    assert len(open_) == 3 and all(traffic.arrivals is None for traffic in closed)
    drawn = Random(0)
    first = drawn.expovariate(0.5 * 2 / 4.0)  # two requests in 4 s without speculation
    assert open_[0].arrivals == pytest.approx([first, first + drawn.expovariate(0.25)])
    assert all(row["num_different"] == 0 for row in json.loads((tmp_path / "a.json").read_text())["rows"])
    printed = capsys.readouterr().out
    assert "first, ms" in printed and "1, 1" in printed and max(map(len, printed.splitlines())) <= 100
    engines.lie = True
    assert main(given) == 1


def served(engine: Any, lies: bool) -> Turn:
    outputs = [[8, 9, 9 if lies else 8], [6]]
    return Turn(4.0 if engine.config is None else 2.0, [Answer(tokens, 1.0, [1.0], 1) for tokens in outputs])


UNFORCED: dict[str, tuple[list[str], Any]] = {
    "--temperature must be 0 with --trace": (["--temperature", "0.7"], LOG),
    "early_exit must not read the target's layers": (["--methods", "early_exit"], LOG),
    "enable_batch_sharded_sampling must be false": (["--engine-args", '{"enable_batch_sharded_sampling":true}'], LOG),
    "token ids below 3072, not 5000": ([], [{"prompt": [5], "output": [5000]}]),
    'must have "prompt" and "output" as token ids': ([], [{"prompt": "x", "output": "y"}]),
    'must have "accepted": {"mtp": [...]} for --drafter': (["--drafter", "mtp"], LOG),
    "--trace: line 1 of": ([], [5]),
    "--trace must be a file with a prompt and an output": ([], [{"prompt": [], "output": [5]}]),
}


@pytest.mark.parametrize("words", UNFORCED)
def test_logs_that_cannot_be_forced(words: str, tiny_model: Path, engines: Any, tmp_path: Path, refused: Any) -> None:
    """Fails if an engine starts although its outputs would not be the log's, for a reason that is not given, or with
    that of another flag."""
    options, rows = UNFORCED[words]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--methods", "prompt_lookup", "--trace", str(tmp_path / "log.jsonl"), *options]
    assert words in refused("bench", "--model", tiny_model, *given) and not engines.configs


def test_the_chat_model_is_the_default(
    asked: list[str], tiny_model: Path, engines: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, refused: Any
) -> None:
    """Fails if another one is served, or if no sentence names the program that makes it where it is not there."""
    del asked[1:3]
    monkeypatch.setattr(command, "CHAT_MODEL", Path("nowhere"))
    assert "`python examples/chat_model.py`" in refused(*asked) and not engines.configs
    monkeypatch.setattr(command, "CHAT_MODEL", tiny_model)
    assert main(asked) == 0 and str(tiny_model) in capsys.readouterr().out


REFUSED = {
    "--rate 0.5": "--rate and --drafter need --trace",
    "--methods sorcery": "--methods must be none, ngram, ngram_gpu, early_exit, cascade, prompt_lookup, ",
    "--methods none": "--methods must name a method besides none",
    "--methods ngram:65": "--methods: K must be 1 to 64, as in ngram:5, not 'ngram:65'",
    "--methods {": "--methods must be names or JSON, not '{'",
    '--methods {"method":"prompt_lookup","max_ngram":99}': "max_ngram must be an integer from 1 to 16",
    "--workloads prose": "--workloads must be of edit, summary, retrieval, translation, extraction, maths, chat, "
    "agent, not 'prose'",
    "--dataset-path nowhere.jsonl": "--dataset-path must be readable files, not nowhere.jsonl",
    "--dataset-path .": "--dataset-path must be readable files, not . (Is a directory)",
    "--model ./nowhere": "a folder with a config.json, not './nowhere'",
    "--max-concurrency 1,none": "--max-concurrency: must be an integer from 1 to 4096, not 'none'",
    "--temperature -1": "--temperature: must be numbers from 0 to 10, not '-1'",
    "--output-len 500": "--output-len must be at most 480 with these prompts, not 500",
    "--output-json nowhere/a": "--output-json must be a file in an existing folder, not nowhere/a",
    "--engine-args []": "--engine-args: must be a JSON object, not '[]'",
}


@pytest.mark.parametrize("options", REFUSED)
def test_refused(options: str, asked: list[str], engines: Any, refused: Any) -> None:
    """Kills: a check that is left out, a traceback, an engine that is started first, another exit status."""
    assert REFUSED[options] in refused(*asked, *options.split()) and not engines.configs


def test_quickstart(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program with which the README begins. Kills: a flag of `bench`, or a field of its traffic, that has another
    name there."""
    import quickstart

    monkeypatch.setattr(quickstart, "replayed", lambda *_: {5: 1.25})  # compiles vLLM's n-gram
    model, file = Path(quickstart.ROOT) / "examples" / "demo" / "model", tmp_path / "figures.json"
    asked = ["--model", str(model), "--minutes", "0", "--output-len", "31", "--output-json", str(file)]
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *asked])
    assert quickstart.main() == 0
    assert json.loads(file.read_text())["ngram"] == {"5": 1.25}
    assert "1.25x at K = 5" in " ".join(capsys.readouterr().out.split())
    assert {traffic.output_lengths for sent in engines.asked.values() for traffic in sent} == {31, 64}
