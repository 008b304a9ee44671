"""The user's files: text as rows of token ids, and folders to write to. Knows nothing of models."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_specplugins.config import ConfigError, shown

MIN_ROW_TOKENS = 8  # what is left of a file after its last whole row counts from here on


def token_rows(files: Sequence[Path], tokenizer: Any, row_tokens: int) -> list[list[int]]:
    """See rows_of.

    Raises:
        ConfigError: a file that cannot be read, is not UTF-8, or holds nothing.
    """
    return rows_of(map(read_text, files), tokenizer, row_tokens)


def rows_of(texts: Iterable[str], tokenizer: Any, row_tokens: int) -> list[list[int]]:
    """Rows of MIN_ROW_TOKENS to `row_tokens` token ids, cut from each text in order.

    Every row begins with the tokenizer's <bos>, if it has one; no row spans two texts.
    """
    prefix: list[int] = [tokenizer.bos_token_id] if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else []
    width = row_tokens - len(prefix)
    rows: list[list[int]] = []
    for text in texts:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        cuts = (ids[start : start + width] for start in range(0, len(ids), width))
        rows += [prefix + cut for cut in cuts if len(prefix) + len(cut) >= MIN_ROW_TOKENS]
    return rows


STDIN = Path("-")


def read_text(file: Path) -> str:
    """The text of a UTF-8 file, or of standard input where that is "-".

    Raises:
        ConfigError: it cannot be read, is not UTF-8, or holds nothing but white space.
    """
    name = "standard input" if file == STDIN else str(file)
    try:
        text = (sys.stdin.buffer.read() if file == STDIN else file.read_bytes()).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"--data must be UTF-8 text files, not {name}.") from None
    except OSError as error:
        raise ConfigError(f"--data must be readable files, not {name} ({error.strerror}).") from None
    if not text.strip():
        raise ConfigError(f"--data must be files with text in them, not {name}, which is empty.")
    return text.replace("\r\n", "\n")


def json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each JSON object of a file stands, as in "line 3 of FILE", and the object; empty lines are left out.

    Raises:
        ConfigError: see read_text; a line that holds something else.
    """
    name = "standard input" if file == STDIN else str(file)
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"--data: line {number} of {name} must be a JSON object, not {shown(line)}.")
        yield f"line {number} of {name}", row


def every_nth(count: int, wanted: int) -> list[int]:
    """`wanted` indices spread evenly over range(count), or all if there are fewer.

    >>> every_nth(10, 3)
    [1, 5, 8]
    """
    wanted = min(count, wanted)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def make_folder(path: Path) -> Path:
    """The folder at `path`, made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out must be a folder that can be written, not {path} ({error.strerror}).") from error
    return path


def save_whole(folder: Path, save: Callable[[Path], None]) -> None:
    """Has `save` write files into a folder, all or none: they are written beside, and moved there when they are whole.

    Raises:
        ConfigError: the folder cannot be written, or the disk is full.
    """
    partial = make_folder(folder) / ".partial"
    try:
        save(make_folder(partial))
        for file in sorted(partial.iterdir()):
            os.replace(file, folder / file.name)
    except (OSError, RuntimeError) as error:  # of torch where it cannot write on
        cause = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(f"--out must be a folder on a disk with room, not {folder} ({cause}).") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
