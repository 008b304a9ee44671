"""One reader for all commands: every form of text and traffic, and invalid data."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_specplugins.__main__ import main
from vllm_specplugins.tools import data
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.workloads import read_workloads
from vllm_specplugins.tools.data import token_rows
from vllm_specplugins.tools.replay.data import Chosen, read_traffic

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo" / "model"
CODE = "def area(width, height):\n    return width * height\n" * 3
ANSWERED = [{"role": "user", "content": "Write code."}, {"role": "assistant", "content": CODE}]
FORMS: dict[str, tuple[str, str]] = {
    "prompt, output": ("a.jsonl", json.dumps({"prompt": "Write code.", "output": CODE})),
    "token ids": ("a.jsonl", json.dumps({"prompt": [5, 6, 7], "output": list(range(10, 40))})),
    "messages": ("a.jsonl", json.dumps({"messages": ANSWERED})),
    "choices": ("a.jsonl", json.dumps({"messages": ANSWERED[:1], "choices": [{"message": ANSWERED[1]}]})),
    "text lines": ("a.jsonl", json.dumps({"text": CODE}) + "\n" + json.dumps({"text": CODE})),
    "lines under any name": ("a.log", "\n" + json.dumps({"text": CODE})),
    "a plain text": ("a.py", CODE),
    "a byte order mark": ("a.jsonl", "\ufeff" + json.dumps({"text": CODE}) + "\r\n"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(DEMO_MODEL))


@pytest.mark.parametrize("form", FORMS)
def test_every_command_reads_every_form(form: str, tmp_path: Path, tokenizer: Any, capsys: Any) -> None:
    """Kills: a form that one command takes and another refuses; a mark taken for text; an answer left out."""
    name, text = FORMS[form]
    file = tmp_path / name
    file.write_bytes(text.encode())
    [workload] = read_workloads(file, tokenizer, 9, 32)
    assert workload.prompts and all(workload.prompts)
    traffic = read_traffic([file], lambda: tokenizer, Chosen(9))
    assert traffic.num_output_tokens > 10 and min(traffic.prompt_lengths) > 0
    rows = token_rows([file], tokenizer, 64)  # training, calibrate
    assert sum(map(len, rows)) > 20
    if form != "token ids":
        assert "area(width" in tokenizer.decode(rows[0]) + tokenizer.decode(rows[-1])
        assert "\ufeff" not in tokenizer.decode(rows[0])
    out = tmp_path / "store.bin"
    assert main(["build-store", "--tokenizer", str(DEMO_MODEL), "--dataset-path", str(file), "--out", str(out)]) == 0
    assert out.stat().st_size > 100


@pytest.mark.parametrize("digits", ["9" * 5000, "٣" * 5000, "1"])
def test_long_numbers(digits: str, tmp_path: Path, tokenizer: Any) -> None:
    """Kills: an id with more digits than Python reads as an integer, which ends `replay` with a traceback."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": digits, "prompt": "Write code.", "output": CODE}))
    assert len(read_traffic([tmp_path / "a.jsonl"], lambda: tokenizer, Chosen(9, ids="odd")).histories) == 1


def commands(file: str, tmp_path: Path) -> list[list[str]]:
    model = str(DEMO_MODEL)
    return [
        ["replay", "--dataset-path", file, "--tokenizer", model],
        ["bench", "--model", model, "--dataset-path", file],
        ["build-store", "--tokenizer", model, "--dataset-path", file, "--out", str(tmp_path / "store.bin")],
        ["train-jump", model, "--dataset-path", file, "--out", str(tmp_path / "jump"), "--device", "cpu"],
        ["calibrate", model, "--dataset-path", file],
    ]


BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "a lone surrogate": (
        lambda path: written(path, r'{"prompt": "a\ud800", "output": "b"}'),
        "lone surrogates as prompt",
    ),
    "one in messages": (
        lambda path: written(path, r'{"messages": [{"role": "user", "content": "\ud800"}]}'),
        "must have messages that the tokenizer's chat template accepts",
    ),
    "calls of tools that are none": (
        lambda path: written(path, '{"messages": [{"role": "assistant", "content": "x", "tool_calls": 7}]}'),
        "must have a list of calls as tool_calls, not 7",
    ),
    "deep nesting": (lambda path: written(path, "[" * 100_000), "must be a JSON object"),
    "what never ends": (lambda path: "/dev/zero", "--dataset-path must be files in which lines have at most"),
    "nothing": (lambda path: written(path, " \n"), "which is empty"),
    "no UTF-8": (lambda path: written(path, b"\xff\xfe\x00a"), "must be UTF-8"),
}


def written(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize("name", BAD)
def test_one_sentence(name: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a traceback, memory that fills up, a command with a reader of its own; another exit
    status; a store that is begun."""
    monkeypatch.setattr(data, "MAX_LINE", 1 << 20)
    make, words = BAD[name]
    for command in commands(make(tmp_path / "bad.jsonl"), tmp_path):
        assert main(command) == 2
        [error] = re.findall(r"^vllm-specplugins [a-z-]+: (error: .*)$", capsys.readouterr().err, re.MULTILINE)
        assert words in error and error.startswith("error: --dataset-path")
    assert not (tmp_path / "store.bin").exists()


def test_token_ids(tmp_path: Path, refused: Any) -> None:
    """Ids that the model does not have, in commands that hand them to it or save them; `replay` needs no model. Fails
    if training ends in torch's IndexError, or if a store is built of which a server drops what follows such a text."""
    rows = [{"prompt": [1, 2], "output": [*range(10, 40), last]} for last in (40, 1 << 20)]
    file = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    for command in commands(file, tmp_path)[1:]:
        assert f"--dataset-path: line 2 of {file} must have token ids below " in refused(*command)
    assert not (tmp_path / "store.bin").exists()
    written(tmp_path / "a.jsonl", json.dumps({"prompt": [1, 2], "output": [1 << 20]}))
    assert "an output of at least two tokens" in refused("replay", "--dataset-path", file)


def test_deep_arguments(refused: Any) -> None:
    """Kills: a traceback from JSON of an option."""
    deep = '{"a":' * 20_000
    for command in (["check", "a:b", "--options", deep], ["bench", "--model", "M", "--methods", deep]):
        assert refused(*command).startswith("error: --")
