"""The prompts of a benchmark: tasks of this package, text that is on every machine, and the files of the user."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.engine.harness.traffic import Forced
from vllm_specplugins.tools.bench.library import edit_prompt, is_held_out, library_files, snippets
from vllm_specplugins.tools.data import rows_of, samples

# Eight rows of messages for each task; a conversation of several turns is a prompt for each of its answers.
PROMPTS = Path(__file__).with_name("prompts.jsonl")
TASKS = "edit", "summary", "retrieval", "translation", "extraction", "maths", "chat", "agent"
DEFAULT = "edit", "summary", "maths", "chat"
# Spec-Bench (Xia et al. 2024) takes these categories of its questions from MT-Bench, and reports them as one task.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of text.

    Args:
        prompts: token ids of each.
        repeats: whether all rounds ask the same, so that methods know the outputs of earlier rounds.
        log: the outputs that engines are forced to emit, one for each prompt; all rounds ask all of its prompts.
    """

    name: str
    prompts: list[list[int]]
    repeats: bool = False
    log: Forced | None = None

    def take(self, count: int, start: int = 0) -> list[list[int]]:
        """So many prompts, from the start again where there are fewer."""
        return [self.prompts[index % len(self.prompts)] for index in range(start, start + count)]

    def is_short(self, count: int) -> bool:
        """Whether some of so many prompts come again although they should not."""
        return not (self.repeats or self.log) and len(self.prompts) < count

    def rounds(self, count: int, num_rounds: int) -> list[list[list[int]]]:
        """Each round's own prompts, so many, or the same in all of them."""
        if self.log:
            return [self.prompts] * num_rounds
        return [self.take(count, 0 if self.repeats else count * index) for index in range(num_rounds)]


def make_workload(name: str, tokenizer: Any, count: int, num_tokens: int) -> Workload:
    """A built-in workload, the same one each time on the same Python.

    Args:
        name: one of TASKS or of BUILT_IN.
        count: number of prompts; of a task at most the eight that there are.
        num_tokens: length of a prompt that is cut or generated; a task's prompts are whole.

    Raises:
        ConfigError: no such workload, or too little text on this machine.
    """
    if name not in BUILT_IN and name not in TASKS:
        raise ConfigError(f"--workloads must be of {', '.join((*TASKS, *BUILT_IN))}, not {brief(name)}.")
    if name in TASKS:
        return next(task for task in read_workloads(PROMPTS, tokenizer, count, num_tokens) if task.name == name)
    prompts = list(islice(BUILT_IN[name](tokenizer, num_tokens, random.Random(0)), count))
    if not prompts:
        raise ConfigError(f"--workloads: there is no text for {name} with prompts of {num_tokens} tokens here.")
    return Workload(name, prompts, repeats=name == REPEAT)


def read_workloads(file: Path, tokenizer: Any, count: int, num_tokens: int) -> list[Workload]:
    """The workloads of a file: one for each `task` of its rows and each task of Spec-Bench's questions, or one in all.

    Args:
        count: most prompts of a workload, the first ones of the file.
        num_tokens: of a prompt that is cut from a text.

    Raises:
        ConfigError: see samples; a file without a prompt.
    """
    prompts: dict[str, list[list[int]]] = {}
    for sample in samples([file], lambda: tokenizer, len(tokenizer)):
        own = prompts.setdefault(_task(sample.row) or file.stem, [])
        cut = isinstance(sample.row.get("text"), str) and not sample.prompt
        asked = rows_of([sample.row["text"]], tokenizer, num_tokens) if cut else [sample.prompt]
        own += [prompt for prompt in asked if prompt][: max(0, count - len(own))]
    found = [Workload(name, own) for name, own in prompts.items() if own]
    if not found:
        raise ConfigError(f"--data must hold prompts, not {file}.")
    return found


def _task(row: Mapping[str, Any]) -> str | None:
    """The task that a row names, or that Spec-Bench counts its category to."""
    match row:
        case {"task": str() as task}:
            return task
        case {"turns": _, "category": str() as category}:
            return "mt_bench" if category in MT_BENCH else category
    return None


def _code(tokenizer: Any, num_tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Beginnings of files, and of their longer functions and classes."""
    for text in _texts(rng, 20, 200):
        ids: list[int] = tokenizer(text)["input_ids"]
        if len(ids) > num_tokens:
            yield ids[:num_tokens]


def _copy(tokenizer: Any, num_tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Edit tasks, most of whose answer stands in the prompt."""
    made = (tokenizer(edit_prompt(text, rng))["input_ids"] for text in _texts(rng, 10, 60))
    return (ids for ids in made if len(ids) <= 2 * num_tokens)


def _random(tokenizer: Any, num_tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Tokens that mean nothing: what a lookup finds there is chance."""
    usual = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    while True:
        yield rng.choices(usual, k=num_tokens)


REPEAT = "repeat"  # the same requests in every round, as of agents that ask again
BUILT_IN: dict[str, Callable[[Any, int, random.Random], Iterator[list[int]]]] = {
    "code": _code,
    "copy": _copy,
    "random": _random,
    REPEAT: _code,
}


def _texts(rng: random.Random, min_lines: int, max_lines: int) -> Iterator[str]:
    """Functions and classes of held-out files, one of each file in turn, until there are no more."""
    files = [list(snippets(text, min_lines, max_lines)) for source, text in library_files() if is_held_out(source)]
    for found in files:
        rng.shuffle(found)
    rng.shuffle(files)
    while any(files):
        yield from [found.pop() for found in files if found]
