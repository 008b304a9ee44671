"""The user's files as rows of tokens."""

from pathlib import Path
from typing import Any

import pytest

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.data import MIN_ROW_TOKENS, token_rows
from vllm_specplugins.tools.files import every_nth, save_whole


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


def test_rows_hold_every_token_once(tokenizer: Any, text_files: list[Path]) -> None:
    """Kills: a cut that loses or repeats a token, rows without <bos>, rows across files."""
    rows = token_rows(text_files, tokenizer, 64)
    assert {row[0] for row in rows} == {tokenizer.bos_token_id}
    assert max(map(len, rows)) == 64 and min(map(len, rows)) >= MIN_ROW_TOKENS
    whole = [tokenizer(file.read_text(), add_special_tokens=False)["input_ids"] for file in text_files]
    joined = [token for row in rows for token in row[1:]]
    assert len(joined) > sum(map(len, whole)) - 2 * MIN_ROW_TOKENS
    assert joined[: len(whole[0]) // 63 * 63] == whole[0][: len(whole[0]) // 63 * 63]
    assert token_rows(text_files[1:], tokenizer, 64) == rows[-len(token_rows(text_files[1:], tokenizer, 64)) :]


def test_a_short_file_is_one_row(tokenizer: Any, tmp_path: Path) -> None:
    """Kills: a file padded, or joined with its neighbour. A prompt of its own is a file of its own."""
    file = tmp_path / "prompt.txt"
    file.write_text("def add(left, right):\n    return left")
    assert token_rows([file, file], tokenizer, 256) == [tokenizer(file.read_text())["input_ids"]] * 2


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_every_nth(count: int) -> None:
    """Kills: indices that repeat, lie outside, or crowd at one end."""
    for wanted in range(1, count + 3):
        indices = every_nth(count, wanted)
        assert len(set(indices)) == len(indices) == min(count, wanted)
        assert set(indices) <= set(range(count))
        assert abs(indices[0] - (count - 1 - indices[-1])) <= 1


def test_an_error_without_text(tmp_path: Path) -> None:
    """Fails if it ends in a traceback of ours."""

    def fails(folder: Path) -> None:
        raise RuntimeError

    with pytest.raises(
        ConfigError, match=r"^--out must be a folder on a disk with free space, not .*\(RuntimeError\)\.$"
    ):
        save_whole(tmp_path / "part", fails)
