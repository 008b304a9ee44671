"""Recorded traffic, one JSON object a line: prompts and what was answered to them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.config import ConfigError, said, shown
from vllm_specplugins.draft import Int32Array
from vllm_specplugins.tools.bench.workloads import chat_prompt
from vllm_specplugins.tools.files import json_lines

FORMATS = (
    '{"prompt": text or token ids, "output": text or token ids} or {"messages": [...]} with answers of the assistant, '
    'or with "choices" as in an answer of OpenAI\'s API'
)
LARGE_VOCABULARY = 1 << 18  # as large as that of any model of today
Tokenizer = Any  # of transformers


@dataclass(slots=True)
class Traffic:
    """Requests in the order in which they were made, by number.

    Args:
        histories: prompt and output of each.
        prompt_lengths: how much of that is prompt.
        start_ms: when each came, since the beginning; all 0 where nobody wrote it down.
        options: of each, what `SamplingParams.extra_args["specplugins"]` held.
    """

    histories: list[Int32Array] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    start_ms: list[float] = field(default_factory=list)
    options: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, prompt: Sequence[int], output: Sequence[int], start_ms: float = 0.0, **options: Any) -> None:
        """One request more; its output holds a token or more."""
        self.histories.append(np.array([*prompt, *output], np.int32))
        self.prompt_lengths.append(len(prompt))
        self.start_ms.append(start_ms)
        self.options.append(options)

    def first(self, count: int) -> "Traffic":
        """The first requests alone."""
        return Traffic(self.histories[:count], self.prompt_lengths[:count], self.start_ms[:count], self.options[:count])

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.histories)) - sum(self.prompt_lengths)

    @property
    def max_model_len(self) -> int:
        """The least context that holds all of it."""
        return max(map(len, self.histories), default=0) + 1

    @property
    def vocab_size(self) -> int:
        """A vocabulary that holds all of it, and what a proposer may have from elsewhere."""
        return max(LARGE_VOCABULARY, *(1 + int(history.max()) for history in self.histories))


def read_traffic(
    files: Sequence[Path], tokenizer: Callable[[], Tokenizer], most: int, advance: Callable[[], None] = lambda: None
) -> Traffic:
    """The requests of the files, lines behind the first `most` left out; the file "-" is standard input.

    Args:
        tokenizer: loads it; called at the first text.
        advance: called for every line.

    Raises:
        ConfigError: a file that cannot be read, or a line that holds nothing of FORMATS: it is named.
    """
    traffic = Traffic()
    for file in files:
        for place, row in json_lines(file):
            if len(traffic.histories) >= most:
                return traffic
            try:
                start_ms = _start_ms(row, traffic)
                for prompt, output in _requests(row, tokenizer):
                    traffic.add(prompt, output, start_ms, **_options(row, tokenizer))
            except ConfigError as error:
                raise ConfigError(f"--data: {place} {error}") from None
            advance()
    if not traffic.histories:
        raise ConfigError("--data must hold a request whose output is not empty.")
    return traffic


def _requests(row: Mapping[str, Any], tokenizer: Callable[[], Tokenizer]) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and output of each request of a line; one without output is left out."""
    if "messages" in row:
        yield from _conversation(row, tokenizer)
        return
    if not {"prompt", "output"} <= set(row):
        raise ConfigError(f"must hold {FORMATS}, not {shown(dict(row))}.")
    prompt, output = (_ids(row[key], key, tokenizer, is_start=key == "prompt") for key in ("prompt", "output"))
    if output:
        yield prompt, output


def _ids(value: Any, key: str, tokenizer: Callable[[], Tokenizer], is_start: bool) -> list[int]:
    if isinstance(value, str):
        ids: list[int] = tokenizer()(value, add_special_tokens=is_start)["input_ids"]
        return ids
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        return value
    raise ConfigError(f"must hold text or token ids as {key}, not {shown(value)}.")


def _conversation(row: Mapping[str, Any], tokenizer: Callable[[], Tokenizer]) -> Iterator[tuple[list[int], list[int]]]:
    """Each answer of the assistant with all that stands before it as its prompt; the last alone, where a log of
    requests holds it apart, as "choices": what was answered before is in the lines before, too."""
    messages = row["messages"]
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise ConfigError(f"must hold messages that have a role and a content, not {shown(messages)}.")
    turns = [{"role": message["role"], "content": _text(message)} for message in messages]
    ends = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if "choices" in row:
        turns.append({"role": "assistant", "content": _chosen(row["choices"])})
        ends = [len(turns) - 1]
    if not ends:
        raise ConfigError("must hold an answer: a message of the assistant, or choices.")
    for end in ends:
        output: list[int] = tokenizer()(turns[end]["content"], add_special_tokens=False)["input_ids"]
        if output:
            yield _rendered(tokenizer(), turns[:end]), output


def _rendered(tokenizer: Tokenizer, turns: list[dict[str, str]]) -> list[int]:
    try:
        return chat_prompt(tokenizer, turns)
    except Exception as error:  # whatever a template raises
        raise ConfigError(f"must hold messages that the tokenizer's chat template takes ({said(error)}).") from error


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and len(message) > 1


def _chosen(choices: Any) -> str:
    """The text of the first choice."""
    match choices:
        case [{"message": dict() as message}, *_]:
            return _text(message)
    raise ConfigError(f"must hold a message in its first choice, not {shown(choices)}.")


def _text(message: Mapping[str, Any]) -> str:
    """What a message says: its text, or its parts' texts, and its calls of tools as JSON."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise ConfigError(f"must hold text, or a list of parts, as content, not {shown(content)}.")
    calls = message.get("tool_calls") or []
    called = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    return "\n".join([*([content] if content else []), *(json.dumps(call, ensure_ascii=False) for call in called)])


def _start_ms(row: Mapping[str, Any], traffic: Traffic) -> float:
    if "time" not in row:
        return 0.0
    seconds, earliest = row["time"], traffic.start_ms[-1] / 1000 if traffic.start_ms else 0.0
    if not (isinstance(seconds, int | float) and earliest <= seconds < 1e9):
        raise ConfigError(f"must hold a time in seconds, not before the last line's, not {shown(seconds)}.")
    return 1000.0 * seconds


def _options(row: Mapping[str, Any], tokenizer: Callable[[], Tokenizer]) -> Mapping[str, Any]:
    """A request's own, and whose it is, as the engine tells a proposer."""
    options, tenant = row.get("options", {}), row.get("tenant", "")
    if not isinstance(options, dict):
        raise ConfigError(f"must hold a JSON object as options, not {shown(options)}.")
    if not isinstance(tenant, str):
        raise ConfigError(f"must hold text as tenant, not {shown(tenant)}.")
    if "reference" in options:
        options = {**options, "reference": _ids(options["reference"], "reference", tokenizer, is_start=False)}
    return {**options, "tenant": tenant.encode(errors="replace")} if tenant else options
