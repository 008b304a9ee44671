"""What the engines are asked: kinds of text that are on every machine. The user's own is in data.py."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.tools.bench.library import edit_prompt, is_held_out, library_files, snippets
from vllm_specplugins.tools.data import chat_prompt

Make = Callable[[Any, int, random.Random], Iterator[list[int]]]
QUESTIONS = (
    "What does this function do, and what can go wrong in it?",
    "Write a docstring for this code, with its arguments and what it returns.",
    "Explain this code to a beginner, in a few sentences.",
    "Name three tests that this code should pass, and why.",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of text.

    Args:
        prompts: token ids of each.
        keeps: whether what methods learn from a round's outputs is known in the next one.
        repeats: whether all rounds ask the same.
    """

    name: str
    prompts: list[list[int]]
    keeps: bool = False
    repeats: bool = False

    def take(self, count: int, start: int = 0) -> list[list[int]]:
        """So many prompts, from the start again where there are fewer."""
        return [self.prompts[index % len(self.prompts)] for index in range(start, start + count)]

    def is_short(self, count: int) -> bool:
        """Whether some of so many prompts come again although they should not."""
        return not self.repeats and len(self.prompts) < count

    def rounds(self, count: int, num_rounds: int) -> list[list[list[int]]]:
        """Each round's own prompts, so many, or the same in all of them."""
        step = 0 if self.repeats else count
        return [self.take(count, step * index) for index in range(num_rounds)]


def make_workload(name: str, tokenizer: Any, count: int, num_tokens: int) -> Workload:
    """A built-in workload, the same one each time on the same Python.

    Args:
        name: of BUILT_IN.
        count: of the prompts.
        num_tokens: of a prompt where that can be chosen, and half of what others have at most.

    Raises:
        ConfigError: no such workload, or too little text on this machine.
    """
    if name not in BUILT_IN:
        raise ConfigError(f"--workloads must be of {', '.join(BUILT_IN)}, not {brief(name)}.")
    made = BUILT_IN[name](tokenizer, num_tokens, random.Random(0))
    prompts = [prompt for prompt, _ in zip(made, range(count), strict=False)]
    if not prompts:
        raise ConfigError(
            f"--workloads: there is no text for {name} with prompts of {num_tokens} tokens on this machine."
        )
    return Workload(name, prompts, keeps=name == REPEAT, repeats=name == REPEAT)


def _code(tokenizer: Any, num_tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Beginnings of files, and of their longer functions and classes."""
    for text in _texts(rng, 20, 200):
        ids: list[int] = tokenizer(text)["input_ids"]
        if len(ids) > num_tokens:
            yield ids[:num_tokens]


def _copy(tokenizer: Any, num_tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Edit tasks, most of whose answer stands in the prompt."""
    for text in _texts(rng, 10, 60):
        ids: list[int] = tokenizer(edit_prompt(text, rng))["input_ids"]
        if len(ids) <= 2 * num_tokens:
            yield ids


def _chat(tokenizer: Any, num_tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Questions about some code."""
    for text in _texts(rng, 5, 40):
        content = f"{rng.choice(QUESTIONS)}\n\n```python\n{text}```"
        ids = chat_prompt(tokenizer, [{"role": "user", "content": content}])
        if len(ids) <= 2 * num_tokens:
            yield ids


def _random(tokenizer: Any, num_tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Tokens that mean nothing: what a lookup finds there is chance."""
    special = set(tokenizer.all_special_ids)
    usual = [token for token in range(len(tokenizer)) if token not in special]
    while True:
        yield rng.choices(usual, k=num_tokens)


REPEAT = "repeat"  # the same requests in every round, as of agents that ask again
BUILT_IN: dict[str, Make] = {"code": _code, "copy": _copy, "chat": _chat, "random": _random, REPEAT: _code}


def _texts(rng: random.Random, min_lines: int, max_lines: int) -> Iterator[str]:
    """Functions and classes of held-out files, one of each file in turn, until there are no more."""
    files = [list(snippets(text, min_lines, max_lines)) for source, text in library_files() if is_held_out(source)]
    for found in files:
        rng.shuffle(found)
    rng.shuffle(files)
    while any(files):
        yield from [found.pop() for found in files if found]
