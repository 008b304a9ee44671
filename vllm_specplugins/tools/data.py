"""Reads the user's texts and traffic from files and pipes: rows in this package's form, chats, or rows of benchmarks. A
file contains JSON lines if its name ends accordingly or its first line is a JSON object; otherwise it is one text."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, dropwhile
from pathlib import Path
from typing import Any

from vllm_specplugins.config import ConfigError, brief, error_text

FORMATS = (
    '{"prompt": text or token ids, "output": text or token ids}, {"messages": [...]} as for chat, with answers of the '
    'assistant or "choices" as in an answer of OpenAI\'s API, a row of Spec-Bench, SpecDecode-Bench or tau-bench, or '
    '{"text": text}'
)
Tokenizer = Callable[[], Any]  # loads a tokenizer of transformers; called for the first text
Pairs = Iterator[tuple[list[int], list[int] | None]]  # prompts and outputs; None without an answer
STDIN = Path("-")
JSON_SUFFIXES = (".jsonl", ".ndjson")
MAX_LINE = 1 << 26  # characters
MIN_ROW_TOKENS = 8  # shortest row that is cut from a text; a shorter rest is dropped


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of the data: a request or a text."""

    place: str  # as in "line 3 of FILE"
    row: Mapping[str, Any]  # the JSON object that it was read from
    prompt: list[int]  # token ids; empty for a text
    output: list[int] | None  # token ids of the answer, or of the text; None without an answer


def samples(files: Sequence[Path], tokenizer: Tokenizer, vocab_size: int = 1 << 31) -> Iterator[Sample]:
    """Yields all samples of the files, in order; the file "-" is standard input. A conversation gives one sample for
    each answer, and one more if it ends with a question. Raises ConfigError if a file cannot be read, or a line has
    none of the FORMATS."""
    for place, row in chain.from_iterable(map(_rows, files)):
        try:
            for prompt, output in parsed(row, tokenizer):
                if (highest := max((*prompt, *(output or ())), default=0)) >= vocab_size:
                    raise ConfigError(f"must have token ids below {vocab_size}, not {highest}.")
                yield Sample(place, row, prompt, output)
        except ConfigError as error:
            is_of_model = str(error).startswith("MODEL")  # its tokenizer is loaded at the first text
            raise ConfigError(f"{error}" if is_of_model else f"--dataset-path: {place} {error}") from None


def answered(files: Sequence[Path], tokenizer: Tokenizer, vocab_size: int = 1 << 31) -> Iterator[Sample]:
    """Yields the samples with an output. Raises ConfigError like `samples`, and for a line without an answer."""
    last: Mapping[str, Any] | None = None
    for sample in samples(files, tokenizer, vocab_size):
        if sample.output is None and sample.row is not last:
            raise ConfigError(
                f"--dataset-path: {sample.place} must have an answer, as in {FORMATS}, not {brief(sample.row)}."
            )
        last = sample.row
        if sample.output:
            yield sample


def token_rows(files: Sequence[Path], tokenizer: Any, row_tokens: int) -> list[list[int]]:
    """Returns all texts of the files as rows (rows_of). A conversation gives its last answer, with everything before
    it."""
    by_row = {id(sample.row): sample for sample in list(samples(files, lambda: tokenizer, len(tokenizer)))}
    return rows_of(([*sample.prompt, *(sample.output or ())] for sample in by_row.values()), tokenizer, row_tokens)


def rows_of(texts: Iterable[list[int]], tokenizer: Any, row_tokens: int) -> list[list[int]]:
    """Yields rows of MIN_ROW_TOKENS to `row_tokens` token ids, cut from each text in order. No row spans two texts, and
    each begins with the tokenizer's <bos>, if any."""
    prefix: list[int] = [tokenizer.bos_token_id] if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else []
    length = row_tokens - len(prefix)
    rows: list[list[int]] = []
    for text in texts:
        ids = text[len(prefix) :] if prefix and text[:1] == prefix else text
        cuts = (prefix + ids[start : start + length] for start in range(0, len(ids), length))
        rows += [row for row in cuts if len(row) >= MIN_ROW_TOKENS]
    return rows


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each JSON object of a file with its place; a text counts as one object. It skips empty lines."""
    name = "standard input" if file == STDIN else str(file)
    rest = dropwhile(lambda line: not line[1].strip(), enumerate(_lines(file, name), start=1))
    if (first := next(rest, None)) is None:
        raise ConfigError(f"--dataset-path must be non-empty files, not {name}, which is empty.")
    lines = chain([first], rest)
    if file.suffix == ".json" and first[1].lstrip().startswith("["):  # one array
        for number, row in enumerate(_json("".join(line for _, line in lines)) or [None], start=1):
            if not isinstance(row, dict):
                raise ConfigError(
                    f"--dataset-path: {name} must be a JSON array of objects; entry {number} is not an object."
                )
            yield f"entry {number} of {name}", row
    elif file.suffix not in JSON_SUFFIXES and not isinstance(_json(first[1]), dict):
        yield name, {"text": "\n" * (first[0] - 1) + "".join(line for _, line in lines)}
    else:
        for number, line in lines:
            if line.strip():
                if not isinstance(row := _json(line), dict):
                    words = brief(line.strip())
                    raise ConfigError(f"--dataset-path: line {number} of {name} must be a JSON object, not {words}.")
                yield f"line {number} of {name}", row


def _lines(file: Path, name: str) -> Iterator[str]:
    try:
        with nullcontext(sys.stdin.buffer) if file == STDIN else file.open("rb") as stream:
            lines = TextIOWrapper(stream, "utf-8-sig")
            while line := lines.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    limit = f"lines have at most {MAX_LINE:,} characters"
                    raise ConfigError(f"--dataset-path must be files in which {limit}, not {name}.")
                yield line
    except UnicodeDecodeError:
        raise ConfigError(f"--dataset-path must be UTF-8 text files, not {name}.") from None
    except OSError as error:
        raise ConfigError(f"--dataset-path must be readable files, not {name} ({error.strerror}).") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the token ids of a conversation up to the model's next turn, formatted by the tokenizer's chat template,
    if any."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    turns = [f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages]
    return tokenizer("".join(turns) + "Assistant:")["input_ids"]


def token_ids(value: Any, key: str, tokenizer: Tokenizer, is_start: bool = False) -> list[int]:
    """Returns the token ids of a text that may begin a request, and token ids unchanged. Raises ConfigError for other
    types."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ConfigError(f"must have text without lone surrogates as {key}, not {brief(value)}.")
        return tokenizer()(value, add_special_tokens=is_start)["input_ids"]
    if _are_counts(value):
        return value
    raise ConfigError(f"must have text or token ids as {key}, not {brief(value)}.")


def accepted_lengths(row: Mapping[str, Any], drafter: str | None) -> dict[str, list[int]]:
    """Maps each drafter to its accepted lengths: one for each number of output tokens so far. A row holds them in our
    form, or in SpecDecode-Bench's, which counts one more token. Raises ConfigError for another form, or if `drafter` is
    given and has no lengths."""
    given = row.get("accepted", {})
    if not isinstance(given, dict):
        raise ConfigError(f"must have a JSON object as accepted, not {brief(given)}.")
    for name, lengths in given.items():
        if not _are_counts(lengths):
            raise ConfigError(f"must have non-negative token counts as accepted[{name!r}], not {brief(lengths)}.")
    theirs = {
        key[4:]: [max(0, length - 1) for length in value["acc_len"]]
        for key, value in row.items()
        if key.startswith("acc_") and isinstance(value, dict) and _are_counts(value.get("acc_len"))
    }
    if drafter is not None and drafter not in theirs | given:
        raise ConfigError(f'must have "accepted": {{"{drafter}": [...]}} for --drafter, not {brief(given or theirs)}.')
    return theirs | given


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 31 for number in value)


def parsed(row: Mapping[str, Any], tokenizer: Tokenizer) -> Pairs:
    """Yields the prompt and the output of each sample of a line, as token ids. Raises ConfigError if the line has none
    of the FORMATS."""
    match row:
        case {"messages": messages}:
            yield from _conversation(messages, row.get("choices"), tokenizer)
        case {"turns": [str() as first, *_]}:  # a later turn needs the answer to the previous turn
            yield _rendered(tokenizer(), [{"role": "user", "content": first}]), None
        case {"prompt_token_ids": prompt, "generated_token_ids": output}:  # SpecDecode-Bench
            yield token_ids(prompt, "prompt_token_ids", tokenizer), token_ids(output, "generated_token_ids", tokenizer)
        case {"traj": messages}:  # tau-bench
            yield from _conversation(messages, None, tokenizer)
        case {"prompt": prompt}:
            output = token_ids(row["output"], "output", tokenizer) if "output" in row else None
            yield token_ids(prompt, "prompt", tokenizer, is_start=True), output
        case {"text": text}:
            yield [], token_ids(text, "text", tokenizer)
        case _:
            raise ConfigError(f"must have {FORMATS}, not {brief(dict(row))}.")


def _conversation(messages: Any, choices: Any, tokenizer: Tokenizer) -> Pairs:
    """Yields each answer of the assistant with everything before it. With `choices`, as in a log of requests, it yields
    only the answer in these, since earlier lines contain the earlier answers."""
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise ConfigError(f"must have messages that have a role and a content, not {brief(messages)}.")
    turns = [{"role": message["role"], "content": _text(message)} for message in messages]
    ends = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    match choices:
        case None:
            pass
        case [{"message": dict() as answer}, *_]:
            ends = [len(turns)]
            turns.append({"role": "assistant", "content": _text(answer)})
        case _:
            raise ConfigError(f"must have a message in its first choice, not {brief(choices)}.")
    for end in ends:
        output = token_ids(turns[end]["content"], "content", tokenizer)
        yield (_rendered(tokenizer(), turns[:end]) if output else []), output
    if not ends:  # the first question of SPEED-Bench; a later one needs the answer to the previous one
        turns = turns[: 1 + next((index for index, turn in enumerate(turns) if turn["role"] == "user"), len(turns))]
    if turns[-1]["role"] != "assistant":
        yield _rendered(tokenizer(), turns), None


def _rendered(tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> list[int]:
    try:
        return chat_prompt(tokenizer, turns)
    except Exception as error:  # a template may raise anything
        raise ConfigError(
            f"must have messages that the tokenizer's chat template accepts ({error_text(error)})."
        ) from error


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and len(message) > 1


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise ConfigError(f"must have text, or a list of parts, as content, not {brief(content)}.")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ConfigError(f"must have a list of calls as tool_calls, not {brief(calls)}.")
    calls = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    return "\n".join([*filter(None, [content]), *(json.dumps(call, ensure_ascii=False) for call in calls)])
