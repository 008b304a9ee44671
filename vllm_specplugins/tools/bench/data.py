"""What the engines are asked: the user's own prompts (tools/data.py)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.bench.workloads import Workload
from vllm_specplugins.tools.data import rows_of, samples

# Spec-Bench (Xia et al. 2024) takes these categories of its questions from MT-Bench, and reports them as one task.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


def read_workloads(file: Path, tokenizer: Any, count: int, num_tokens: int) -> list[Workload]:
    """The workloads of a file: one with its name, or one for each task of Spec-Bench's question file.

    Args:
        count: most prompts of a workload, the first ones of the file.
        num_tokens: of a prompt that is cut from a text.

    Raises:
        ConfigError: see samples; a file without a prompt.
    """
    prompts: dict[str, list[list[int]]] = {}
    for sample in samples([file], lambda: tokenizer):
        own = prompts.setdefault(_task(sample.row) or file.stem, [])
        cut = isinstance(sample.row.get("text"), str) and not sample.prompt
        asked = rows_of([sample.row["text"]], tokenizer, num_tokens) if cut else [sample.prompt]
        own += [prompt for prompt in asked if prompt][: max(0, count - len(own))]
    found = [Workload(name, own) for name, own in prompts.items() if own]
    if not found:
        raise ConfigError(f"--data must hold prompts, not {file}.")
    return found


def _task(row: Mapping[str, Any]) -> str | None:
    """The task of a question of Spec-Bench."""
    if "turns" not in row or not isinstance(row.get("category"), str):
        return None
    category: str = row["category"]
    return "mt_bench" if category in MT_BENCH else category
