"""`calibrate` with engines that are made up, and everything else real."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from vllm_specplugins.__main__ import main
from vllm_specplugins.engine.measure.engine import Served
from vllm_specplugins.proposers.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.proposers.look_ahead import LookAheadConfig, save_look_ahead
from vllm_specplugins.tools import calibrate, progress, report
from vllm_specplugins.tools.agreement import agreements
from vllm_specplugins.tools.base_model import BaseModel, Exit
from vllm_specplugins.tools.served import methods_to_serve
from vllm_specplugins.tools.speedup import tokens_per_step

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


def greedy(model: Path, prompts: list[list[int]], num_tokens: int) -> list[Served]:
    """What a real engine would answer, at 10 ms a step."""
    full = LlamaForCausalLM.from_pretrained(model)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = full.generate(ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
        answers.append(Served(output[0, len(prompt) :].tolist(), [10.0] * 9, [0.0] * 9))
    return answers


class MadeUpEngine:
    """In place of measure.Engine: a draft token of E layers takes 1 + E / 2 ms, verifying K + 1 takes 10 + K / 2.

    A lookup finds something in every other step, for nothing, of which two tokens are right; a jump's token takes 1 ms,
    and its first one is right.
    """

    configs: ClassVar[list[Any]] = []

    def __init__(self, settings: Any, config: Any, max_tokens: int, log: Path):
        self.configs.append(config)
        self._model, self._config, self._max_tokens = Path(settings.model), config, max_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        pass

    def answer(self, prompt: list[int]) -> Served:
        if self._config is None:
            return greedy(self._model, [prompt], self._max_tokens)[0]
        num_draft = self._config["num_speculative_tokens"]
        if self._config["method"] == "jump":
            steps = [10 + num_draft * 1.5] * 8, [1.0 * num_draft] * 8, [2] * 8, [num_draft] * 8
            return Served([5] * self._max_tokens, *steps)
        if "exit_layer" not in self._config:
            return Served(
                [5] * self._max_tokens, [10.0, 10 + num_draft / 2] * 4, [0.0] * 8, [1, 3] * 4, [0, num_draft] * 4
            )
        propose_ms = num_draft * (1 + self._config["exit_layer"] / 2)
        return Served([5] * self._max_tokens, [10 + num_draft / 2 + propose_ms] * 9, [propose_ms] * 9)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpEngine]:
    monkeypatch.setattr(MadeUpEngine, "configs", [])
    monkeypatch.setattr(calibrate, "Engine", MadeUpEngine)
    return MadeUpEngine


def run(model: Path, files: list[Path], *options: str) -> int:
    few = ("--prompts", "8", "--tokens", "24", "--prompt-tokens", "32", "--max-draft", "4")
    also = () if "--also" in options else ("--also", "none")
    return main(["calibrate", str(model), "--data", *map(str, files), *few, *also, *options])


@pytest.mark.parametrize("options", [[], ["--together"]])
def test_an_exit_that_is_the_model(
    options: list[str],
    idle_model: Path,
    text_files: list[Path],
    engines: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Everything matches, and the speed-up is that of the made-up machine.

    Kills: bits off by a token, a drafted first token, costs of the wrong engine, the wrong K, no word in a file.
    """
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    plot = "--plot", str(tmp_path / "calibration.png")
    assert run(idle_model, text_files, "--out", str(tmp_path), *plot, *options) == 0
    found = json.loads((tmp_path / "calibration.json").read_text())
    first = found["rows"][0]
    assert first["match_rate"] == 1.0 and first["overlap"] == pytest.approx(1.0, abs=1e-4)
    by_hand = {str(k): (k + 1) * 10 / (10 + k / 2 + k * 1.5) for k in range(1, 5)}
    assert first["prediction"]["by_num_draft"] == pytest.approx(by_hand)
    assert found["rows"][1]["draft_ms"] == pytest.approx(2.0)
    chosen = {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 4}
    assert found["chosen"] == chosen
    told = capsys.readouterr()
    output = told.out
    assert f"--speculative-config '{json.dumps(chosen)}'" in output
    assert "100.0%" in output and f"{by_hand['4']:.2f}x" in output
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")
    assert engines.configs[0] is None and len(engines.configs) == 3
    assert re.search(r"^engines(?: \(the last: .*, \d+ tokens a second\))?: \d of 3, ", told.err, re.MULTILINE)


def test_speculation_that_does_not_pay(
    idle_model: Path, text_files: list[Path], engines: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kills: a configuration recommended although it is slower."""
    slow = lambda self: 50.0  # noqa: E731
    monkeypatch.setattr("vllm_specplugins.tools.speedup.Timing.draft_ms", property(slow))
    assert run(idle_model, text_files) == 0
    output = capsys.readouterr().out
    assert "does not pay here" in output and "--speculative-config" not in output


@pytest.mark.parametrize(("slowest", "warned"), [(2.0, True), (1.05, False)])
def test_a_busy_machine(
    slowest: float, warned: bool, idle_model: Path, text_files: list[Path], engines: Any, monkeypatch: Any, capsys: Any
) -> None:
    """Kills: figures that cannot be trusted, printed without a word; and a warning about noise of a few per cent."""
    original = MadeUpEngine.answer

    def answer(self: MadeUpEngine, prompt: list[int]) -> Served:
        served = original(self, prompt)
        times = [ms * factor for ms, factor in zip(served.step_ms, np.linspace(1, slowest, 9), strict=True)]
        return replace(served, step_ms=times)

    monkeypatch.setattr(MadeUpEngine, "answer", answer)
    assert run(idle_model, text_files) == 0
    output = capsys.readouterr().out
    assert ("Do not trust the speed-ups" in output) == warned == ("--speculative-config" not in output)


def test_too_few_prompts(
    idle_model: Path, text_files: list[Path], engines: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Kills: a value printed, chosen or drawn from three prompts, without a word; matplotlib where nothing is drawn."""
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert run(idle_model, text_files, "--prompts", "3", "--out", str(tmp_path)) == 0
    output, found = capsys.readouterr().out, json.loads((tmp_path / "calibration.json").read_text())
    assert "fewer than 8 prompts. No advice." in output and "--speculative-config" not in output
    assert found["chosen"] is None and "8 prompts" in found["doubt"]
    assert max(map(len, output.splitlines())) <= 100
    assert run(idle_model, text_files, "--plot", str(tmp_path / "a.png")) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_a_trained_head(tiny_model: Path, text_files: list[Path], engines: Any, tmp_path: Path, capsys: Any) -> None:
    """Kills: a head that is timed or compared as if it were the model's own, or left out of the configuration."""
    options = ["--exit-layer", "1", "--steps", "40", "--row-tokens", "64", "--learning-rate", "0.02"]
    data = ["--data", *map(str, text_files), "--batch-tokens", "256"]
    assert main(["train-exit-head", str(tiny_model), *data, "--out", str(tmp_path / "head"), *options]) == 0
    assert run(tiny_model, text_files, "--exit-head", str(tmp_path / "head"), "--out", str(tmp_path)) == 0
    found = json.loads((tmp_path / "calibration.json").read_text())
    assert [row["exit_layer"] for row in found["rows"]] == [1, 2, 1]
    assert found["rows"][2]["exit_head"] == engines.configs[-1]["exit_head"] == str((tmp_path / "head").resolve())
    assert found["rows"][2]["overlap"] != found["rows"][0]["overlap"]
    assert "1 + head" in capsys.readouterr().out


def test_other_methods(
    tiny_model: Path, text_files: list[Path], engines: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Served once each; fewer tokens cost less to verify, and a jump's to draft, too. The cascade is of a lookup, which
    is the fastest. Fails if steps without a draft are left out, or if a K is printed that is not the best."""
    (tmp_path / "jump").mkdir()
    options = ["--also", "prompt_lookup,cascade", "--jump", str(tmp_path / "jump"), "--out", str(tmp_path)]
    assert run(tiny_model, text_files, *options) == 0
    found = json.loads((tmp_path / "calibration.json").read_text())
    lookup, jump, cascade = found["others"]
    gains = {1: 1.5 * 10 / 10.25, 2: 2 * 10 / 10.5, 3: 2 * 10 / 10.75, 4: 2 * 10 / 11}
    assert lookup["prediction"]["by_num_draft"] == pytest.approx({str(k): gain for k, gain in gains.items()})
    assert (lookup["prediction"]["num_draft"], lookup["share"], lookup["accepted"]) == (2, 0.5, 0.5)
    assert jump["prediction"]["by_num_draft"] == pytest.approx({str(k): 20 / (10 + 1.5 * k) for k in range(1, 5)})
    assert cascade["config"]["stages"] == [{"method": "prompt_lookup"}]
    assert cascade["name"] == "prompt_lookup, gated"
    assert found["chosen"] == {"method": "prompt_lookup", "num_speculative_tokens": 2}
    output = capsys.readouterr().out
    assert "Other methods" in output and f"--speculative-config '{json.dumps(found['chosen'])}'" in output


def test_look_ahead_with_its_head(tmp_path: Path) -> None:
    """Fails if a head of another layer is served with them, or their own is not."""
    made = LookAheadConfig(exit_layer=2, hidden_size=8, num_embeddings=3)
    save_look_ahead(tmp_path / "ahead", made, torch.zeros(3, 8))
    weights = {"norm.weight": torch.ones(8), "head.weight": torch.zeros(16, 8)}
    for layer in (1, 2):
        config = ExitHeadConfig(exit_layer=layer, hidden_size=8, vocab_size=16, rank=0, rms_norm_eps=1e-5)
        ExitHead(config, weights).save(tmp_path / f"head{layer}")
    given = {"max_draft": 8, "also": "none", "jump": None, "look_ahead": tmp_path / "ahead", "medusa": None}
    for layer, heads in ((1, None), (2, str(tmp_path / "head2"))):
        [method] = methods_to_serve(argparse.Namespace(**given, exit_head=tmp_path / f"head{layer}"))
        assert method.config.get("exit_head") == heads and method.config["num_speculative_tokens"] == 4


def test_a_name_that_is_no_method(tiny_model: Path, text_files: list[Path], capsys: Any) -> None:
    """Fails if it is found out by an engine."""
    assert run(tiny_model, text_files, "--also", "prompt_lookup,jump") == 2
    assert "--also must be of prompt_lookup" in capsys.readouterr().err


def test_bits_are_those_of_the_drafts(tiny_model: Path) -> None:
    """Against a draft loop that runs the exit itself. Kills: bits of another token or another layer."""
    prompts = [[0, 40, 50, 60], [0, 300, 301]]
    served = greedy(tiny_model, prompts, 20)
    [agreement] = agreements(BaseModel.load(str(tiny_model), "cpu"), [Exit(2)], prompts, served)
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    model.model.layers = model.model.layers[:2]
    num_tokens = num_steps = 0
    for prompt, answer in zip(prompts, served, strict=True):
        done = 1
        while done + 3 <= len(answer.token_ids):
            ids = [*prompt, *answer.token_ids[:done]]
            draft = model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False, eos_token_id=None)
            right = np.array(draft[0, len(ids) :].tolist()) == np.array(answer.token_ids[done : done + 3])
            emitted = 4 if right.all() else int(right.argmin()) + 1
            done, num_tokens, num_steps = done + emitted, num_tokens + emitted, num_steps + 1
    assert tokens_per_step(agreement.match, 3) == pytest.approx(num_tokens / num_steps)
