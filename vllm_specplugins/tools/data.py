"""The user's texts and traffic, from files and pipes. One reader for all commands; `formats.py` knows the rows.

A file holds JSON lines if it is called so, or if its first line is a JSON object; else it is one text. It is read by
lines, of bounded length: what never ends is refused.
"""

import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from select import select
from typing import Any, BinaryIO

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.tools.formats import FORMATS, Tokenizer, parsed

STDIN = Path("-")
JSON_SUFFIXES = (".jsonl", ".ndjson")
MAX_LINE, MAX_TEXT = 1 << 26, 1 << 30  # letters
PIPE_S = 30  # for which a pipe's first letter is waited for; standard input is waited for without end
MIN_ROW_TOKENS = 8  # what is left of a text after its last whole row counts from here on


@dataclass(frozen=True, slots=True)
class Sample:
    """A request, or a text.

    Args:
        place: where it stands, as in "line 3 of FILE".
        row: the JSON object that it was read from.
        prompt: token ids; none of a text.
        output: token ids of what was answered, or of the text; None where nothing was.
    """

    place: str
    row: Mapping[str, Any]
    prompt: list[int]
    output: list[int] | None


def samples(files: Sequence[Path], tokenizer: Tokenizer, vocab_size: int = 1 << 31) -> Iterator[Sample]:
    """All that the files hold, in order; the file "-" is standard input. A conversation is a sample for each answer in
    it, and one for an answer that is still to come.

    Raises:
        ConfigError: a file that cannot be read, or a line that holds nothing of FORMATS: it is named.
    """
    for place, row in _with_answers(chain.from_iterable(map(_rows, files))):
        try:
            for prompt, output in parsed(row, tokenizer):
                if (highest := max((*prompt, *(output or ())), default=0)) >= vocab_size:
                    raise ConfigError(f"must hold token ids below {vocab_size}, not {highest}.")
                yield Sample(place, row, prompt, output)
        except ConfigError as error:
            is_of_model = str(error).startswith("MODEL")  # whose tokenizer was loaded for this text
            raise ConfigError(f"{error}" if is_of_model else f"--data: {place} {error}") from None


def answered(files: Sequence[Path], tokenizer: Tokenizer, vocab_size: int = 1 << 31) -> Iterator[Sample]:
    """The samples that have an output.

    Raises:
        ConfigError: see samples; a line without an answer.
    """
    last: Mapping[str, Any] | None = None
    for sample in samples(files, tokenizer, vocab_size):
        if sample.output is None and sample.row is not last:
            raise ConfigError(f"--data: {sample.place} must hold an answer, as in {FORMATS}, not {brief(sample.row)}.")
        last = sample.row
        if sample.output:
            yield sample


def token_rows(files: Sequence[Path], tokenizer: Any, row_tokens: int) -> list[list[int]]:
    """All that the files hold as rows; see rows_of. Of a conversation that is its last answer, with all before it."""
    by_row = {id(sample.row): sample for sample in list(samples(files, lambda: tokenizer, len(tokenizer)))}
    return _cut(([*sample.prompt, *(sample.output or ())] for sample in by_row.values()), tokenizer, row_tokens)


def rows_of(texts: Iterable[str], tokenizer: Any, row_tokens: int) -> list[list[int]]:
    """Rows of MIN_ROW_TOKENS to `row_tokens` token ids, cut from each text in order.

    Every row begins with the tokenizer's <bos>, if it has one; no row spans two texts.
    """
    return _cut((tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts), tokenizer, row_tokens)


def _cut(texts: Iterable[list[int]], tokenizer: Any, row_tokens: int) -> list[list[int]]:
    prefix: list[int] = [tokenizer.bos_token_id] if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else []
    length = row_tokens - len(prefix)
    rows: list[list[int]] = []
    for text in texts:
        ids = text[len(prefix) :] if prefix and text[:1] == prefix else text
        cuts = (prefix + ids[start : start + length] for start in range(0, len(ids), length))
        rows += [row for row in cuts if len(row) >= MIN_ROW_TOKENS]
    return rows


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each JSON object of a file stands, and the object; a text is one. Empty lines are left out."""
    name = "standard input" if file == STDIN else str(file)
    lines = _lines(file, name)
    begun: list[str] = []  # up to the first line that is not empty
    while not (begun and begun[-1].strip()):
        if (line := next(lines, None)) is None:
            raise ConfigError(f"--data must be files with text in them, not {name}, which is empty.")
        begun.append(line)
    if file.suffix == ".json" and begun[-1].lstrip().startswith("["):  # one array
        yield from _entries(_whole(chain(begun, lines), name), name)
        return
    if file.suffix not in JSON_SUFFIXES and _object(begun[-1]) is None:
        yield name, {"text": _whole(chain(begun, lines), name)}
        return
    for number, line in enumerate(chain(begun, lines), start=1):
        if line.strip():
            if (row := _object(line)) is None:
                raise ConfigError(f"--data: line {number} of {name} must be a JSON object, not {brief(line.strip())}.")
            yield f"line {number} of {name}", row


def _entries(text: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON array."""
    for number, row in enumerate(json.loads(text) if _is_json(text) else [None], start=1):
        if not isinstance(row, dict):
            raise ConfigError(f"--data: {name} must be a JSON array of objects, which entry {number} is not.")
        yield f"entry {number} of {name}", row


def _with_answers(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows; a question of BFCL gets the answer of its id, which stands in a later file."""
    asked: dict[Any, tuple[str, dict[str, Any]]] = {}
    for place, row in rows:
        match row:
            case {"id": str() as name, "question": list()}:
                asked[name] = place, row
            case {"id": str() as name, "ground_truth": list() as calls} if name in asked:
                place, question = asked.pop(name)
                yield place, {**question, "ground_truth": calls}
            case _:
                yield place, row
    yield from asked.values()


def _lines(file: Path, name: str) -> Iterator[str]:
    """The lines of a UTF-8 file, each with its end; a byte order mark is no part of them."""
    try:
        with nullcontext(sys.stdin.buffer) if file == STDIN else _opened(file) as stream:
            lines = TextIOWrapper(stream, "utf-8-sig")
            while line := lines.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    raise ConfigError(
                        f"--data must be files whose lines have at most {MAX_LINE:,} letters, not {name}."
                    )
                yield line
    except UnicodeDecodeError:
        raise ConfigError(f"--data must be UTF-8 text files, not {name}.") from None
    except OSError as error:
        raise ConfigError(f"--data must be readable files, not {name} ({error.strerror}).") from None


def _opened(file: Path) -> BinaryIO:
    """A file to read; ConfigError for a pipe to which nobody writes."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    stream = open(descriptor, "rb")  # noqa: SIM115
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and not select([stream], [], [], PIPE_S)[0]:
        stream.close()
        raise ConfigError(f"--data must be files with text in them, not {file}, to which nothing wrote for {PIPE_S} s.")
    os.set_blocking(descriptor, True)
    return stream


def _whole(lines: Iterator[str], name: str) -> str:
    """One text of all lines."""
    found, size = [], 0
    for line in lines:
        found.append(line)
        size += len(line)
        if size > MAX_TEXT:
            raise ConfigError(f"--data must be texts of at most {MAX_TEXT:,} letters, not {name}.")
    return "".join(found)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _object(line: str) -> dict[str, Any] | None:
    row = json.loads(line) if _is_json(line) else None
    return row if isinstance(row, dict) else None
