"""`calibrate` with engines that are made up, and everything else real."""

import json
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from vllm_specplugins.__main__ import main
from vllm_specplugins.engine.harness.traffic import Answer, Turn
from vllm_specplugins.tools.calibrate import exit_rows

pytest.importorskip("vllm")


@pytest.fixture(scope="session")
def idle_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with later layers that add nothing: its first exit is the full model."""
    folder = tmp_path_factory.mktemp("idle")
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    return folder


@cache
def greedy(model: Path, prompts: tuple[tuple[int, ...], ...], num_tokens: int) -> list[list[int]]:
    """What a real engine would answer, each time that it is asked."""
    full = LlamaForCausalLM.from_pretrained(model)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = full.generate(ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def ask(engine: Any, message: object) -> Turn:
    """A step takes 10 ms; with K drafts it emits 1 + K / 2 tokens; if slow, one."""
    num_draft = 0 if engine.config is None or engine.slow else engine.config.get("num_speculative_tokens", 1)
    answers = []
    for output in greedy(engine.model, tuple(map(tuple, engine.traffic.prompts)), engine.traffic.output_lengths):
        num_steps = (len(output) - 1) / (1 + num_draft / 2)
        answers.append(Answer(output, 10.0, [10.0 * num_steps / 8] * 8, 1))
    seconds = sum(answer.first_ms + sum(answer.step_ms) for answer in answers) / 1000
    return Turn(seconds, answers, seconds, 8, 8, 4)


@pytest.fixture
def engines(made_up: Any) -> Any:
    return made_up(ask, slow=False)


def run(model: Path, files: list[Path], *options: str) -> int:
    few = ("--num-prompts", "3", "--rounds", "3", "--output-len", "24", "--prompt-tokens", "32", "--max-draft", "4")
    also = () if "--also" in options else ("--also", "none")
    return main(["calibrate", str(model), "--dataset-path", *map(str, files), *few, *also, *options])


def test_an_exit_that_is_the_model(
    idle_model: Path, text_files: list[Path], engines: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything matches, and the best K is the longest; what is served is what `bench` would measure. Kills: bits off
    by a token, a drafted first token, the wrong K, an exit that is guessed to be dear and served, an engine that is
    measured against another's rounds, or served twice.
    """
    file = tmp_path / "calibration.json"
    assert run(idle_model, text_files, "--exits", "1", "--output-json", str(file)) == 0
    found = json.loads(file.read_text())
    first, second = found["exits"]
    assert first["match_rate"] == 1.0 and first["overlap"] == pytest.approx(1.0, abs=1e-4)
    assert (first["num_draft"], first["tokens_per_step"]) == (4, 5.0)
    assert first["guess"] == pytest.approx(5 / (1 + 4 / 3)) and second["guess"] == pytest.approx(5 / (1 + 8 / 3))
    plain, exit_1 = found["rows"]
    assert (plain["method"], exit_1["method"], exit_1["num_different"]) == ("none", "exit 1", 0)
    assert exit_1["ratio"]["rounds"] == pytest.approx([240 / (10 + 230 / 3)] * 3)
    chosen = {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 4}
    assert found["chosen"] == found["methods"]["exit 1"] == chosen and engines.configs == [None, chosen]
    output = capsys.readouterr().out
    assert f"--speculative-config '{json.dumps(chosen)}'" in output and "100.0%" in output
    assert max(map(len, output.splitlines())) <= 100


def test_speculation_that_does_not_pay(
    idle_model: Path, text_files: list[Path], engines: Any, tmp_path: Path, capsys: Any
) -> None:
    """Kills: a configuration recommended although it is no faster; one from too few rounds."""
    file = tmp_path / "calibration.json"
    for engines.slow, rounds in ((True, "3"), (False, "2")):
        assert run(idle_model, text_files, "--output-json", str(file), "--rounds", rounds) == 0
        output = capsys.readouterr().out
        advice = "Serve without speculation" if engines.slow else "No advice: it needs 3 rounds"
        assert advice in output and "--speculative-config" not in output
        assert json.loads(file.read_text())["chosen"] is None


def test_other_methods(
    tiny_model: Path, text_files: list[Path], engines: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Served beside the exits as they are; a cascade ends with the part that is given, or with the best exit. Kills: a
    part that is missed after the exits were compared."""
    file, K = tmp_path / "calibration.json", {"num_speculative_tokens": 3}
    jump = {"method": "jump", "head": str(tmp_path / "head")}
    trained_exit = {"method": "early_exit", "exit_layer": 2, "exit_head": str(tmp_path / "head")}
    assert run(tiny_model, text_files, "--also", json.dumps(jump | K)) == 2
    refusal = capsys.readouterr()
    assert "jump: head must be a folder with the config.json of a head" in refusal.err and not refusal.out
    sizes = {"early_layers": 0, "late_layer": 1, "num_layers": 2, "inner_size": 1}  # of a jump, and of an exit's head:
    sizes |= {"exit_layer": 2, "vocab_size": 9, "hidden_size": 8, "rms_norm_eps": 0.1}
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(sizes))
    for last in (jump, trained_exit, {"method": "early_exit"}):
        given = [json.dumps(last | K)] if len(last) > 1 else []
        options = ["--also", "prompt_lookup:3,cascade", *given, "--exits", "1", "--output-json", str(file)]
        assert run(tiny_model, text_files, *options) == 0
        methods = json.loads(file.read_text())["methods"]
        names = ["prompt_lookup:3", "cascade", *(f"{last['method']}:3" for _ in given)]
        assert list(methods)[2:] == names and next(iter(methods)) == "none"
        assert not given or methods[names[-1]] == last | K
        lookup, stage = methods["cascade"]["stages"]
        assert lookup == {"method": "prompt_lookup"} and last.items() <= stage.items()
        assert "num_speculative_tokens" not in stage


def test_a_name_that_is_no_method(tiny_model: Path, text_files: list[Path], capsys: Any) -> None:
    """Fails if it is found out by an engine."""
    assert run(tiny_model, text_files, "--also", "prompt_lookup,jumps") == 2
    assert "--also must be none" in capsys.readouterr().err


def test_bits_are_those_of_the_drafts(tiny_model: Path) -> None:
    """Against a draft loop that runs the exit itself. Kills: bits of another token or another layer, a bonus token that
    is forgotten, a step that begins at a wrong place."""
    prompts = [[0, 40, 50, 60], [0, 300, 301]]
    args = Namespace(model=str(tiny_model), output_len=20, max_draft=3)
    [row] = exit_rows(args, [2], prompts)
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    model.model.layers = model.model.layers[:2]
    emitted = {}
    for num_draft in (1, 2, 3):
        num_tokens = num_steps = 0
        for prompt, output in zip(prompts, greedy(tiny_model, tuple(map(tuple, prompts)), 20), strict=True):
            done = 1
            while done + num_draft <= len(output):
                ids = torch.tensor([[*prompt, *output[:done]]])
                draft = model.generate(ids, max_new_tokens=num_draft, do_sample=False, eos_token_id=None)
                right = np.array(draft[0, ids.shape[1] :].tolist()) == np.array(output[done : done + num_draft])
                count = num_draft + 1 if right.all() else int(right.argmin()) + 1
                done, num_tokens, num_steps = done + count, num_tokens + count, num_steps + 1
        emitted[num_draft] = num_tokens / num_steps
    gains = {count: tokens / (1 + count * 2 / 3) for count, tokens in emitted.items()}
    assert row.num_draft == max(gains, key=gains.__getitem__)
    assert row.tokens_per_step == pytest.approx(emitted[row.num_draft]) and row.guess == pytest.approx(
        max(gains.values())
    )
