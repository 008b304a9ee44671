"""Run with `pytest` in this folder, after `pip install -e .`."""

import subprocess
import sys

import numpy as np
import pytest
from line_repeat import Config, LineRepeat

from vllm_specplugins.draft import DraftBatch, ProposerContext

NEWLINE = 9


def drafted(tokens: list[int], limit: int = 8) -> list[int]:
    """The draft after these tokens."""
    context = ProposerContext(100, 64, 1, 8, tokenize=lambda text: [NEWLINE])
    batch = DraftBatch(["a"], [np.array(tokens, np.int32)], np.array([limit], np.int32), [{}])
    draft = LineRepeat(Config(), context).propose(batch)
    return draft.token_ids[0, : draft.num_draft[0]].tolist()


def test_drafts_the_rest_of_a_line() -> None:
    assert drafted([1, 2, 3, 4, NEWLINE, 5, 1, 2]) == [3, 4, NEWLINE]


def test_latest_place() -> None:
    assert drafted([1, 2, 3, NEWLINE, 1, 2, 4, NEWLINE, 1, 2]) == [4, NEWLINE]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_no_place(tokens: list[int]) -> None:
    assert drafted(tokens) == []


def test_limit() -> None:
    assert drafted([1, 2, 3, 4, 5, 1, 2], limit=1) == [3]


@pytest.mark.parametrize("value", [0, 17, True, "2", 1.0])
def test_field(value: object) -> None:
    with pytest.raises(ValueError, match="min_match must be an integer from 1 to 16"):
        Config(value)  # type: ignore[arg-type]


def test_in_a_recorded_engine() -> None:
    """The installed method breaks no rule."""
    command = [sys.executable, "-m", "vllm_specplugins", "check", "line_repeat"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
