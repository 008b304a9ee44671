"""The gate's costs over a restart, and files that cannot be used."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.draft import DraftBatch, Feedback, ProposerContext
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.proposers.cascade import Cascade
from vllm_specplugins.proposers.cost_table import SAVE_EVERY_S, CostTable, written

K = 4
TEXT = np.array([1, 2, 3, 4, 5] * 8, np.int32)


def cascade(path: Path, setting: str = "a model", **context: Any) -> Cascade:
    config = {"method": "cascade", "policy": "first", "stages": [{"method": "prompt_lookup"}], "cost_table": str(path)}
    own = ProposerContext(9, 99, 2, K, lambda text: [], setting=setting, **context)
    proposer = build_proposer(parse_config(config), own)
    assert isinstance(proposer, Cascade)
    return proposer


def step(proposer: Cascade, request_id: str = "a") -> int:
    """How many tokens were drafted; all are accepted."""
    draft = proposer.propose(DraftBatch([request_id], [TEXT], np.array([K], np.int32), [{}]))
    proposer.observe(Feedback([request_id], draft.num_draft, draft.num_draft, step_ms=10 + 0.1 * draft.num_draft[0]))
    return int(draft.num_draft[0])


def saved(path: Path) -> None:
    """A file of what a cascade learned, saved while it serves."""
    proposer = cascade(path)
    assert step(proposer) == 0
    for _ in range(20):
        step(proposer)
    table = proposer._cost_table
    assert table is not None and not path.exists()
    table._next_at -= SAVE_EVERY_S
    step(proposer)
    table.finish()
    assert path.exists() and not table.is_due


def test_a_restart_does_not_learn_again(tmp_path: Path) -> None:
    """The first step drafts at once. Fails if nothing is saved, nothing is read, or a field is lost on the way."""
    path = tmp_path / "costs.json"
    saved(path)
    proposer = cascade(path)
    assert proposer._gate is not None
    assert proposer._gate.costs == json.loads(path.read_text())["costs"]
    assert step(proposer) == K


def flipped(words: str) -> str:
    place = words.index("mean_ms") + 11
    return words[:place] + ("1" if words[place] != "1" else "2") + words[place + 1 :]


DAMAGE = {
    "cut": lambda words: words[: len(words) // 2],
    "empty": lambda words: "",
    "another digit": flipped,
    "a list": lambda words: "[]",
    "not text": lambda words: "\0\1",
    "deep": lambda words: "[" * 100_000,
    "large": lambda words: words + " " * (1 << 20),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One sentence, and costs are learned anew and saved over it. Fails if a file is believed that has no digest of
    what it holds, or if an exception leaves."""
    path = tmp_path / "costs.json"
    saved(path)
    path.write_text(DAMAGE[kind](path.read_text()))
    caplog.clear()
    assert step(cascade(path)) == 0
    assert caplog.messages == [f"cost_table: {path} is no table of costs, or damaged; costs are learned anew."]
    saved_over = cascade(path)._cost_table
    assert saved_over is not None
    saved_over.save({"steps": {}, "drafts": {}})
    saved_over.finish()
    assert json.loads(path.read_text())["costs"] == {"steps": {}, "drafts": {}}


def test_files_of_another_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if the costs of another model are believed."""
    path = tmp_path / "costs.json"
    saved(path)
    caplog.clear()
    assert step(cascade(path, "another")) == 0
    [words] = caplog.messages
    assert f"{path} is of another setting (a model, first of prompt_lookup, 4 tokens, not another, " in words


def test_a_crash_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The old file stays whole. Fails if it is written in its place, or a failure stops the thread of the engine."""
    path = tmp_path / "costs.json"
    saved(path)
    before = path.read_text()

    def failing(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    table = CostTable(path, "a model")
    for _ in range(2):
        table.save({"steps": {}, "drafts": {}})
        table.finish()
    assert path.read_text() == before
    assert caplog.messages[-1:] == [f"cost_table: costs cannot be saved to {path} (No space left on device)."]
    assert [level for _, level, _ in caplog.record_tuples].count(logging.WARNING) == 1


def test_ranks_take_rank_0s(tmp_path: Path) -> None:
    """Fails if another rank goes by a file of its own, or saves one."""
    path, costs = tmp_path / "costs.json", {"steps": {}, "drafts": {"0": 3.0}}
    asked = []

    def agreed(value: Any) -> Any:
        asked.append(value)
        return costs

    path.write_text(written("a model", {"steps": {}, "drafts": {"0": 1.0}}))
    proposer = cascade(path, rank=1, num_ranks=2, agreed=agreed)
    assert asked == [None] and proposer._cost_table is None
    assert proposer._gate is not None and proposer._gate.costs == costs
