"""What the engines are asked: the user's own prompts, one JSON object a line. The format is found by its keys."""

from pathlib import Path
from typing import Any

from vllm_specplugins.config import ConfigError, shown
from vllm_specplugins.tools.bench.workloads import Workload, chat_prompt
from vllm_specplugins.tools.files import json_lines

# Spec-Bench (Xia et al. 2024) takes these categories of its questions from MT-Bench, and reports them as one task.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
FORMATS = '{"prompt": text or token ids}, {"messages": [...]} as for chat, or a question of Spec-Bench'


def read_workloads(file: Path, tokenizer: Any, count: int) -> list[Workload]:
    """The workloads of a file: one with its name, or one for each task of Spec-Bench's question file.

    Of Spec-Bench's questions the first turn is asked: a later one needs an answer to the one before.

    Args:
        count: most prompts of a workload, the first ones of the file.

    Raises:
        ConfigError: a file that cannot be read, or a line that holds nothing of FORMATS.
    """
    prompts: dict[str, list[list[int]]] = {}
    for place, row in json_lines(file):
        name = _task(row) or file.stem
        if len(prompts.setdefault(name, [])) < count:
            prompts[name].append(_prompt(row, tokenizer, f"--data: {place}"))
    return [Workload(name, found) for name, found in prompts.items()]


def _task(row: dict[str, Any]) -> str | None:
    """The task of a question of Spec-Bench."""
    if "turns" not in row or not isinstance(row.get("category"), str):
        return None
    category: str = row["category"]
    return "mt_bench" if category in MT_BENCH else category


def _prompt(row: dict[str, Any], tokenizer: Any, place: str) -> list[int]:
    prompt, messages, turns = row.get("prompt"), row.get("messages"), row.get("turns")
    ids: list[int] = []
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        ids = prompt
    elif isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages):
        ids = chat_prompt(tokenizer, messages)
    elif isinstance(turns, list) and turns and isinstance(turns[0], str):
        ids = chat_prompt(tokenizer, [{"role": "user", "content": turns[0]}])
    if not ids:
        raise ConfigError(f"{place} must hold {FORMATS}, not {shown(row)}.")
    return ids
