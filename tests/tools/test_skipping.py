"""`calibrate --layers`: agreement by its definition, token by token, and a search that finds what adds nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from vllm_specplugins.__main__ import main
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.tools import skipping
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.skipping import HIGHEST, Answer, dropped_one, score
from vllm_specplugins.tools.training.kinds import skipping_guesser
from vllm_specplugins.tools.training.scores import Text

LAYERS = [0, 2]
ROW = [0, 40, 50, 60, 300, 301, 7, 90, 12, 15, 40, 50]
OPTIONS = ["--num-prompts", "6", "--output-len", "24", "--prompt-tokens", "32", "--max-draft", "4"]


@pytest.fixture(scope="session")
def idle_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a middle layer that adds nothing."""
    folder = tmp_path_factory.mktemp("idle")
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> BaseModel:
    return BaseModel.load(str(tiny_model), "cpu")


@torch.no_grad()
def served(base: BaseModel, newest: int, num_draft: int) -> torch.Tensor:
    """Logits of a draft of ROW after its token `newest`, as an engine makes it: a token after the other, on the keys
    and values that the whole model left."""
    cache, body, logits = DynamicCache(), base.cut(LAYERS), []
    base.model.base_model(torch.tensor([ROW[:newest]]), past_key_values=cache, use_cache=True)
    for place in range(newest, newest + num_draft):
        states = body(
            torch.tensor([ROW[place : place + 1]]),
            attention_mask=torch.zeros(1, 1, 1, place + 1),
            position_ids=torch.tensor([[place]]),
            past_key_values=cache,
        ).last_hidden_state[0]
        logits.append(base.logits(states)[0])
    return torch.stack(logits)


def test_unrolls_as_it_serves(base: BaseModel) -> None:
    """Fails if a pass sees the text's keys of the layers alone, text that its draft replaces, or stands elsewhere."""
    [states] = base.hidden_states([ROW])
    guesses = list(skipping_guesser(base, LAYERS)(states, 3))
    for newest in (1, 4, 8):
        drafted = torch.stack([guess.logits[newest] for guess in guesses])
        torch.testing.assert_close(drafted, served(base, newest, 3), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(guesses[0].logits[8], base.logits(states[-1])[8], atol=0.1), "the other layer matters"


@torch.no_grad()
def test_answers(base: BaseModel) -> None:
    """Kills: a token that is compared with the one before it, its own key left out, or an answer that keeps the keys of
    an earlier trial."""
    begin = 5
    answer = Answer(base, Text(ROW, begin, 0.0, 0))
    rows = [served(base, newest, 1)[0] for newest in range(begin - 1, len(ROW) - 1)]
    logprobs = torch.stack(rows).log_softmax(-1)[torch.arange(len(rows)), torch.tensor(ROW[begin:])]
    answer.logprobs([1])
    torch.testing.assert_close(answer.logprobs(LAYERS), logprobs, atol=1e-4, rtol=1e-4)
    assert score([answer, answer], LAYERS) == pytest.approx(float(logprobs.mean()), abs=1e-4)
    whole = [served(base, newest, 3).argmax(-1) == torch.tensor(ROW[newest + 1 : newest + 4]) for newest in range(4, 9)]
    assert torch.equal(answer.matches(LAYERS, 3), torch.stack(whole).T.float())


@torch.no_grad()
def test_in_bfloat16(tiny_model: Path) -> None:
    """As on a GPU. Fails if the head or the layers get states of another dtype."""
    base = BaseModel.load(str(tiny_model), "cpu")
    base.model.bfloat16()
    [states] = base.hidden_states([ROW])
    drafted = [guess.logits for guess in skipping_guesser(base, LAYERS)(states, 2)]
    assert {logits.dtype for logits in (*drafted, *Answer(base, Text(ROW, 5, 0.0, 0)).drafts(LAYERS, 2))} == {
        torch.float32
    }


def test_the_best_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the score of those left. Fails if the worst one goes, or a layer is tried that cannot be the best."""
    seen = list[list[int]]()
    known = {(1, 2): -0.4, (0, 2): -0.1, (0, 1): -0.3, (2,): -0.5, (0,): -0.35}

    def scored(_: Any, layers: list[int]) -> float:
        seen.append(layers)
        return known[tuple(layers)]

    monkeypatch.setattr(skipping, "score", scored)
    state = dropped_one([], [], [HIGHEST] * 3)
    assert state == {"dropped": [1], "scores": [-0.4, -0.1, -0.3]}
    assert seen == [[1, 2], [0, 2], [0, 1]]
    state = dropped_one([], **state)
    assert state == {"dropped": [1, 2], "scores": [-0.4, -0.1, -0.35]}
    assert seen[3:] == [[0]], "without layer 0 it was -0.4"


def test_command(
    idle_model: Path, text_files: list[Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer that adds nothing goes first, and the others draft all tokens; a search that was interrupted goes on.
    Fails if held-out answers are scored with other layers, or if the state of another search is taken."""
    file, trials, run = tmp_path / "found.json", [], dropped_one

    def counted(*arguments: Any, **state: Any) -> Any:
        trials.append(state["dropped"])
        if len(trials) == 2:
            raise KeyboardInterrupt
        return run(*arguments, **state)

    monkeypatch.setattr(skipping, "dropped_one", counted)
    command = ["calibrate", str(idle_model), "--dataset-path", *map(str, text_files), *OPTIONS, "--layers", "1,2"]
    assert main([*command, "--output-json", str(file)]) == 130
    assert main([*command, "--output-json", str(file)]) == 0
    assert trials == [[], [1], [1]]
    one, two = json.loads(file.read_text())["subsets"]
    assert two["layers"] == LAYERS and two["match_rate"] == 1.0 and two["tokens_per_step"] == two["num_draft"] + 1 == 5
    assert two["guess"] == pytest.approx(5 / (1 + 4 * 2 / 3)) and len(one["layers"]) == 1
    printed = capsys.readouterr().out
    assert "100.0%" in printed and "--speculative-config '" in printed
    best = json.loads(printed.rpartition("--speculative-config '")[2].partition("'")[0])
    assert parse_config(best).method_config.exit_layer == 2 or two["guess"] < one["guess"]
    other = [name if name != "24" else "20" for name in command]
    assert main([*other, "--output-json", str(file)]) == 0 and trials[3:] == [
        [],
        [json.loads(file.read_text())["dropped"][0]],
    ]


def test_refused(tiny_model: Path, text_files: list[Path], capsys: Any) -> None:
    assert main(["calibrate", str(tiny_model), "--dataset-path", str(text_files[0]), *OPTIONS, "--layers", "1,3"]) == 2
    assert "error: --layers must be from 1 to 2 for this model, not [1, 3].\n" in capsys.readouterr().err
