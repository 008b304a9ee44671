"""What `bench` asks: its tasks, and the user's files."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from library import edit_prompt

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.figures import repeated_share
from vllm_specplugins.tools.bench.workloads import TASKS, Workload, make_workload, read_workloads
from vllm_specplugins.tools.picker import NAMED, pick_methods


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", TASKS)
def test_tasks(name: str, tokenizer: Any) -> None:
    """Kills: a task without prompts, a prompt that stands twice or is cut, a task that gets another one's."""
    made = make_workload(name, tokenizer, 99)
    assert made.name == name and 8 <= len({tuple(prompt) for prompt in made.prompts}) == len(made.prompts)
    assert all(tokenizer.decode(prompt, skip_special_tokens=True).endswith("Assistant:") for prompt in made.prompts)
    answers_wanted = {"extraction": "JSON", "summary": "three sentences", "translation": "Translate"}
    assert all(answers_wanted.get(name, "") in tokenizer.decode(prompt) for prompt in made.prompts)


def test_edit_prompt() -> None:
    """Kills: a task that names an identifier which is not in the code."""
    prompts = [edit_prompt("def total(items):\n    return sum(items)\n", random.Random(seed)) for seed in range(20)]
    assert all(prompt.endswith("# After:\n") for prompt in prompts)
    assert any(prompt.startswith("# Rename `items` to `") for prompt in prompts)
    assert any(prompt.startswith("# Repeat the code.") for prompt in prompts)


def test_a_chat_template_is_used(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kills: messages of which the template sees only the last, special tokens added twice, no answer begun."""
    file = write_lines(tmp_path / "my chat.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    [without] = read_workloads(file, tokenizer, 9, 64)
    assert without.name == "my chat"
    assert tokenizer.decode(without.prompts[0], skip_special_tokens=True) == "User: Hi\n\nAssistant:"
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    rows = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    [made] = read_workloads(write_lines(tmp_path / "b.jsonl", {"messages": rows}), tokenizer, 9, 64)
    assert tokenizer.decode(made.prompts[0]) == "[system] Be kind.[user] Hi>"


def test_spec_bench(tokenizer: Any, tmp_path: Path) -> None:
    """Kills: its tasks mixed, more prompts than asked for, a second turn asked without its first."""
    rows = [{"question_id": n, "category": "writing", "turns": [f"First {n}", "Second"]} for n in range(3)]
    rows += [{"question_id": 9, "category": "coding", "turns": ["Code"]}]
    rows += [{"question_id": 240, "category": "rag", "turns": ["Find"], "reference": []}]
    made = read_workloads(write_lines(tmp_path / "question.jsonl", *rows), tokenizer, 2, 64)
    assert [(workload.name, len(workload.prompts)) for workload in made] == [("mt_bench", 2), ("rag", 1)]
    assert "First 1" in tokenizer.decode(made[0].prompts[1]) and "Second" not in tokenizer.decode(made[0].prompts[1])


def test_prompts_and_bad_lines(tokenizer: Any, tmp_path: Path) -> None:
    """Kills: token ids read as text; a line that is skipped without a word."""
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "x = 1"}, {"prompt": [5, 6, 7]})
    [made] = read_workloads(file, tokenizer, 9, 64)
    assert made.prompts == [tokenizer("x = 1")["input_ids"], [5, 6, 7]]
    with pytest.raises(ConfigError, match=r"line 2 of .* must have \{\"prompt\""):
        read_workloads(write_lines(file, {"prompt": "x"}, {"words": "y"}), tokenizer, 9, 64)


def test_repeated_share() -> None:
    """Kills: an n-gram found in another output, the first occurrence counted, tokens before the eighth left out."""
    assert repeated_share([list(range(10)), list(range(10))]) == 0
    assert repeated_share([list(range(10)) * 2]) == (20 - 17) / 20
    assert repeated_share([[1] * 18]) == (18 - 8) / 18


def test_methods_by_name_and_value() -> None:
    """Kills: no speculation left out, or twice; two values under one name; one value twice; a K that is not the one
    asked for."""
    values = [
        json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": size}) for size in (2, 4)
    ]
    picked = pick_methods(["prompt_lookup:31,none,ngram:31", *values, "ngram:31"])
    assert list(picked) == ["none", "prompt_lookup:31", "ngram:31", "ngram:3", "ngram:3 #2"] and picked["none"] is None
    assert picked["ngram:3 #2"] == json.loads(values[1])
    assert picked["ngram:31"] == {**NAMED["ngram"], "num_speculative_tokens": 31}
    assert picked["prompt_lookup:31"] == {"method": "prompt_lookup", "num_speculative_tokens": 31}


def test_rounds_have_prompts_of_their_own() -> None:
    """Kills: a round that asks what an earlier one asked; too few, unsaid."""
    prompts = [[number] for number in range(6)]
    assert Workload("a", prompts).rounds(2, 3) == [[[0], [1]], [[2], [3]], [[4], [5]]]
    assert [Workload("a", prompts).is_short(count) for count in (6, 7)] == [False, True]
