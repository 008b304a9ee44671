"""Reads the prompts of a benchmark: tasks of this package, the user's files, or a log (`bench --trace`) whose outputs
all engines must emit (engine/harness/forced.py)."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.engine.harness.traffic import Forced
from vllm_specplugins.methods import runs_target
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.tools.base_model import load_config
from vllm_specplugins.tools.data import Sample, accepted_lengths, answered, rows_of, samples
from vllm_specplugins.tools.picker import Config, is_ours

# Eight rows of messages for each task; a conversation of several turns is a prompt for each of its answers.
PROMPTS = Path(__file__).with_name("prompts.jsonl")
TASKS = "edit", "summary", "retrieval", "translation", "extraction", "maths", "chat", "agent"
DEFAULT = "edit", "summary", "maths", "chat"
# Spec-Bench (Xia et al. 2024) takes these categories of its questions from MT-Bench, and reports them as one task.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompts: list[list[int]]  # token ids
    log: Forced | None = None  # outputs that engines must emit; all rounds have all prompts

    def take(self, count: int, start: int = 0) -> list[list[int]]:
        """Returns `count` prompts; a shorter list starts again."""
        return [self.prompts[index % len(self.prompts)] for index in range(start, start + count)]

    def is_short(self, count: int) -> bool:
        """Returns whether some of `count` prompts repeat, although they should not."""
        return not self.log and len(self.prompts) < count

    def rounds(self, count: int, num_rounds: int) -> list[list[list[int]]]:
        """Yields `count` new prompts for each round, or all prompts of a log."""
        if self.log:
            return [self.prompts] * num_rounds
        return [self.take(count, count * index) for index in range(num_rounds)]


def make_workload(name: str, tokenizer: Any, count: int) -> Workload:
    """Returns the first `count` prompts of one of TASKS. Raises ConfigError for another name."""
    if name not in TASKS:
        raise ConfigError(f"--workloads must be of {', '.join(TASKS)}, not {brief(name)}.")
    return next(task for task in read_workloads(PROMPTS, tokenizer, count, 0) if task.name == name)


def read_workloads(file: Path, tokenizer: Any, count: int, num_tokens: int) -> list[Workload]:
    """Returns the workloads of a file, each with its first `count` prompts: one for each `task` of its rows or of
    Spec-Bench's questions, otherwise a single one. A text is cut into prompts of `num_tokens`."""
    by_task: dict[str, list[list[int]]] = {}
    for sample in samples([file], lambda: tokenizer, len(tokenizer)):
        prompts = by_task.setdefault(_task(sample.row) or file.stem, [])
        is_text = "text" in sample.row and not sample.prompt
        asked = rows_of([sample.output or []], tokenizer, num_tokens) if is_text else [sample.prompt]
        prompts += [prompt for prompt in asked if prompt][: max(0, count - len(prompts))]
    workloads = [Workload(name, prompts) for name, prompts in by_task.items() if prompts]
    if not workloads:
        raise ConfigError(f"--dataset-path must have prompts, not {file}.")
    return workloads


def _task(row: Mapping[str, Any]) -> str | None:
    match row:
        case {"task": str() as task}:
            return task
        case {"turns": _, "category": str() as category}:
            return "mt_bench" if category in MT_BENCH else category
    return None


def read_log(args: argparse.Namespace, configs: Mapping[str, Config | None]) -> Workload:
    """Returns the requests of a log, with the outputs that engines must emit. Raises ConfigError for a method, a
    temperature or a log that does not allow it."""
    _check_forced(args, configs)
    vocab_size, count, rows = load_config(args.model).vocab_size, max(args.num_prompts, *args.max_concurrency), []
    for sample in islice((sample for sample in _of_log(args.trace) if sample.prompt), count):
        output = (sample.output or [])[: args.output_len]
        if (highest := max([*sample.prompt, *output])) >= vocab_size:
            raise ConfigError(f"--trace: {sample.place} must have token ids below {vocab_size}, not {highest}.")
        try:
            lengths = accepted_lengths(sample.row, args.drafter) if args.drafter else {}
        except ConfigError as error:
            raise ConfigError(f"--trace: {sample.place} {error}") from None
        rows.append((sample.prompt, output, lengths.get(args.drafter, [])))
    if not rows:
        raise ConfigError(f"--trace must be a file with a prompt and an output, not {args.trace}.")
    prompts, outputs, accepted = map(list, zip(*rows, strict=True))
    return Workload(args.trace.stem, prompts, log=Forced(outputs, accepted if args.drafter else None))


def _of_log(file: Path) -> Iterator[Sample]:
    try:
        yield from answered([file], _no_tokenizer)
    except ConfigError as error:
        raise ConfigError(f"{error}".replace("--dataset-path", "--trace", 1)) from None


def _no_tokenizer() -> NoReturn:
    raise ConfigError('must have "prompt" and "output" as token ids to be forced, not as text.')


def _check_forced(args: argparse.Namespace, configs: Mapping[str, Config | None]) -> None:
    if args.temperature != [0.0]:
        raise ConfigError(f"--temperature must be 0 with --trace, which forces greedy choices, not {args.temperature}.")
    if args.engine_args.get("enable_batch_sharded_sampling"):
        raise ConfigError("--engine-args: enable_batch_sharded_sampling must be false with --trace, not true.")
    for name, config in configs.items():
        if config and is_ours(config) and runs_target(parse_config(config)):
            raise ConfigError(
                f"--methods: {name} must not read the target's layers with --trace: an early exit, a jump or Medusa "
                "drafts with real weights, which a log cannot replace."
            )
