"""Medusa in the engine: heads without any change and the target's head draft the newest token again."""

from pathlib import Path
from typing import Any

import pytest
from cases import check_counted, progress
from conftest import INTERPRETED, RUNNER, TAPES, spec_metrics
from parts import medusa
from test_exit_sampling import ARGUMENTS, EDITS, PROMPT, answered
from test_exit_sampling import checkpoint as checkpoint

HIDDEN, K = 64, 3


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return medusa(tmp_path_factory.mktemp("heads"), HIDDEN, K)


def config_of(heads: dict[str, Any], method: str) -> dict[str, Any]:
    return {**heads, "draft_sample_method": method}


@pytest.mark.parametrize("method", ["coupled"] if INTERPRETED else ["greedy", "coupled"])
def test_heads_that_repeat(
    method: str, engine: Any, checkpoint: Path, heads: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0 each draft is the newest token, again and again; the output is that without drafts, seeded
    samples, penalties and forbidden tokens included. Kills: hidden states of another row, or of a rejected draft; a
    head that is not the target's.
    """
    from vllm_specplugins.proposers.medusa import Medusa

    drafts = []
    draft_steps = Medusa.draft_steps

    def recorded(self: Medusa, target: Any, *rest: Any, **named: Any) -> Any:
        steps = draft_steps(self, target, *rest, **named)
        drafts.append((target.last_token_ids.clone(), target.sampling.temperature.clone(), steps.token_ids.clone()))
        return steps

    monkeypatch.setattr(Medusa, "draft_steps", recorded)
    arguments = {**ARGUMENTS, "model": str(checkpoint)}
    llm = engine(config_of(heads, method), enforce_eager=True, **arguments)  # in a graph nobody sees the drafts
    asked = [{"temperature": 0.0}] * 3 + [{}, {"top_p": 0.7}, *EDITS]

    def run(llm: Any, **options: Any) -> list[list[int]]:
        prompts = [PROMPT[: 3 + index % 4] for index in range(len(asked))]
        return answered(llm, asked, prompts, extra_args={"specplugins": options})

    before, begun = spec_metrics(llm), progress(llm)
    drafts.clear()  # of dummy runs
    drafted = run(llm)
    check_counted(llm, begun, drafted)
    accepted = spec_metrics(llm)["accepted_tokens"] - before["accepted_tokens"]
    greedy = [
        own == [token] * len(own)  # K, or fewer where no request may emit more
        for newest, heat, token_ids in drafts
        for token, temperature, own in zip(newest.tolist(), heat.tolist(), token_ids.tolist(), strict=True)
        if temperature == 0
    ]
    assert len(greedy) >= 3 * 12 // (K + 1)
    assert all(greedy) and any(token_ids.shape[1] == K for *_, token_ids in drafts)
    assert accepted > 0
    assert drafted == run(llm, max_draft=0)
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}
    if TAPES and method == "coupled":
        assert drafted == run(engine(config_of(heads, method), **arguments)), "in a graph"


@pytest.mark.skipif(RUNNER == "v2", reason="refused in the front end, whatever runs")
def test_refused_at_start(engine: Any, checkpoint: Path, heads: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a head for each of 4 tokens \(num_speculative_tokens, .*, not one with 3"):
        engine({**config_of(heads, "greedy"), "num_speculative_tokens": 4}, model=str(checkpoint), **ARGUMENTS)
    with pytest.raises(ValueError, match="enable_lora must be false, not True: its head was trained without"):
        engine(config_of(heads, "greedy"), model=str(checkpoint), enable_lora=True, **ARGUMENTS)
