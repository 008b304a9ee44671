"""A class of another package drafts on the device, as V2's interpreter runs it; on V1 the same class drafts on the
host."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import generate
from conftest import RUNNER, TAPES

THIRD_PARTY = str(Path(__file__).parents[1] / "third_party")
PROMPTS = [[5, 6, 7, 7], [9, 8, 8], [3, 3, 3, 3, 3]]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(THIRD_PARTY)


def config(fault: str | None = None) -> dict[str, Any]:
    return {"method": "on_device", "num_speculative_tokens": 3, "options": {"fault": fault}}


def outputs(llm: Any) -> list[list[int]]:
    return generate(llm, PROMPTS, [2, 1], temperature=0.0, max_tokens=12, ignore_eos=True)


def stats(llm: Any) -> dict[str, Any]:
    for _ in range(3):
        totals: dict[str, Any] = llm.collective_rpc("specplugins_stats")[0]  # the device's counts arrive a call later
    return totals


def test_drafts(engine: Any) -> None:
    """Outputs are those without drafts. Kills: a class that drafts on V2's host; no drafts at all."""
    llm = engine(config())
    plan = llm.llm_engine.vllm_config.speculative_config.plan
    assert plan.on_device == (RUNNER == "v2")
    mine, totals = outputs(llm), stats(llm)
    assert totals["whole"]["drafted"] > 0 and not totals["switched_off"]
    assert mine == outputs(engine(None))


@pytest.mark.parametrize("fault", ["draft", "start", "shape", "token", "length"])
def test_faults(engine: Any, fault: str, caplog: Any) -> None:
    """A fault costs drafts. Kills: an exception that ends the engine; a token outside of the vocabulary."""
    if RUNNER != "v2":
        pytest.skip("the guard of proposers on the host: tests/isolation")
    llm = engine(config(fault))
    mine, totals = outputs(llm), stats(llm)
    assert totals["switched_off"] == (fault in ("draft", "start", "shape"))
    assert (totals["whole"]["drafted"] > 0) == (fault == "length")
    assert mine == outputs(engine(None))


@pytest.mark.skipif(not TAPES, reason="of graphs")
def test_a_wait_in_a_graph(engine: Any, caplog: Any) -> None:
    """With a class that waits, an engine starts, serves and logs it once. Fails if its first call is within the capture
    of a graph, which then cannot end."""
    caplog.set_level("ERROR", logger="vllm.specplugins")
    llm = engine(config("wait"))
    mine, totals = outputs(llm), stats(llm)
    assert totals["switched_off"] and totals["whole"]["drafted"] == 0 and mine == outputs(engine(None))
    assert len([record for record in caplog.records if "it drafts again after a restart" in record.getMessage()]) == 1


def drafts_of(draft: Any, monkeypatch: Any) -> tuple[Any, list[str]]:
    """The drafts of a class whose `draft` is this one, and what ended: its drafting or the process."""
    from types import SimpleNamespace

    import torch

    from vllm_specplugins.engine.v2.speculators.custom import CustomDrafts

    texts = (SimpleNamespace(gpu=torch.zeros(4, 8, dtype=torch.int32)), SimpleNamespace(gpu=torch.ones(4).int()))
    drafts, ended = CustomDrafts(SimpleNamespace(all_token_ids=texts[0], total_len=texts[1]), 3, 100), list[str]()
    monkeypatch.setattr("os._exit", lambda code: ended.append("process"))
    drafts.proposer, drafts.stop = SimpleNamespace(draft=draft), lambda: ended.append("drafting")
    return drafts, ended


@pytest.mark.parametrize("field", ["token_ids", "num_draft", "confidence"])
@pytest.mark.parametrize("form", ["device", "type", "shape", "list"])
def test_forms(field: str, form: str, monkeypatch: Any) -> None:
    """Kills: a tensor of another device or type that reaches arithmetic outside of the guard, and ends the engine."""
    import torch

    from vllm_specplugins.draft import Draft

    good = Draft(torch.ones(2, 3).int(), torch.ones(2).int(), torch.ones(2))
    tensor = getattr(good, field)
    wrong = {"device": tensor.to("meta"), "type": tensor.bool(), "shape": tensor[:1], "list": tensor.tolist()}[form]
    slots, room = torch.arange(2), torch.full((2,), 3).int()
    for given, expected in ((good, [1, 1]), (replace(good, confidence=None), [1, 1])):
        drafts, ended = drafts_of(lambda *_: given, monkeypatch)  # noqa: B023
        assert drafts.match(slots, room, None)[1].tolist() == expected and not ended
    drafts, ended = drafts_of(lambda *_: replace(good, **{field: wrong}), monkeypatch)
    for _ in range(2):
        assert drafts.match(slots, room, None)[1].tolist() == [0, 0]
    assert ended == ["drafting"]


def test_a_fault_on_one_of_several_ranks(monkeypatch: Any) -> None:
    """Fails if a rank continues without drafts while the other ranks verify theirs."""
    import torch

    drafts, ended = drafts_of(None, monkeypatch)
    drafts.num_ranks = 2
    drafts.match(torch.arange(2), torch.ones(2).int(), None)
    assert ended[0] == "process"


def test_slots() -> None:
    """On the host a request has one slot from its start to its end. Kills: a slot of a live request given again."""
    import numpy as np
    from specplugins_example import OnDevice

    from vllm_specplugins.draft import DraftBatch, ProposerContext

    started: list[tuple[str, int]] = []
    proposer = OnDevice({}, ProposerContext(100, 64, 2, 3, tokenize=lambda text: []))
    proposer.start = lambda request_id, slot, options: started.append((request_id, slot))
    for names in (("a", "b"), ("b", "c"), ("c", "a")):
        texts = [np.array([1, ord(name)], np.int32) for name in names]
        draft = proposer.propose(DraftBatch(names, texts, np.array([1, 2], np.int32), [{}, {}]))
        assert draft.num_draft.tolist() == [1, 2] and draft.token_ids[:, 0].tolist() == [ord(name) for name in names]
        proposer.forget(names[:1])
    assert started == [("a", 0), ("b", 1), ("c", 0), ("a", 1)]
    assert "torch" in sys.modules
