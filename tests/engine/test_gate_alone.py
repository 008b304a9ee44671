"""A gate before every method that is alone: drafts that are never right are not made for long, and change nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from cases import generate
from conftest import RUNNER
from parts import HIDDEN, K, medusa

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext

NUM_TOKENS, PROMPTS = 24, slice(0, 16)
NEVER = 2  # the demo model pads with it


class Wrong:
    """Drafts what the model never says."""

    def __init__(self, options: dict[str, Any], context: ProposerContext): ...

    def propose(self, batch: DraftBatch) -> Draft:
        limits = batch.max_num_draft
        return Draft(np.full((len(limits), max(limits, default=0)), NEVER, np.int32), limits.copy())

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Any) -> None: ...


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One of the user's own, and Medusa heads that know one token."""
    known = {"lm_head.weight": torch.zeros(1, HIDDEN), "token_map": torch.tensor([NEVER])}
    custom = {"method": "custom", "proposer": "test_gate_alone:Wrong"}
    return {"custom": custom, "medusa": medusa(tmp_path_factory.mktemp("heads"), **known)}


@pytest.mark.parametrize("name", ["custom"] + ["medusa"] * (RUNNER == "v1"))  # on V2 the scheduler chooses for medusa
def test_drafts_that_are_never_right(engine: Any, prompts: Any, expected: Any, methods: Any, name: str) -> None:
    """Kills: a method that has no gate alone; a length that goes on being verified."""
    llm = engine({**methods[name], "num_speculative_tokens": K, "gate": "auto"})
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    [stats] = llm.collective_rpc("specplugins_stats")
    [(stage_name, stage)] = stats["stages"].items()
    assert stage_name == f"0 {name}" and stage["drafted"] > 0
    assert stats["accepted_tokens"] == 0 and stats["faults"] == stage["faults"] == {}
    assert stats["drafted_tokens"] < 0.25 * K * stats["request_steps"], stats["draft_lengths"]
