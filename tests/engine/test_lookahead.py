"""Lookahead decoding on Model Runner V2: outputs are those of no speculation, and steps are those of a play."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from cases import NUM_TOKENS, STRESS, check_ends, generate
from conftest import ALL, RUNNER, spec_metrics
from test_identity import steps_of
from test_trees import attention, check  # noqa: F401

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.files import CHAT_MODEL

pytestmark = pytest.mark.skipif(RUNNER != "v2", reason="trees are V2's")
SMALL = {"method": "lookahead", "window": 3, "ngram": 3, "guesses": 2}
PLAYED = Path(__file__).parents[2] / "docs" / "figures" / "lookahead_answers.jsonl"


def alone(**other: Any) -> dict[str, Any]:
    return {**SMALL, "gate": "off", **other}


def with_lookup(**other: Any) -> dict[str, Any]:
    return {"method": "cascade", "stages": [{"method": "prompt_lookup"}, SMALL], "gate": "off", **other}


@pytest.mark.parametrize(("kind", "asynchronous"), [(alone, False), (with_lookup, True)])
def test_identity(attention: None, engine: Any, prompts: Any, expected: Any, kind: Any, asynchronous: bool) -> None:  # noqa: F811
    """Preemption, prefix-cache hits, chunked prefill, ends and an abort. Kills: a token of the window that comes out,
    keys and values of the window that stay, a window of the request that had the slot before."""
    llm = engine(kind(), **STRESS, async_scheduling=asynchronous)
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    check(llm, 25)
    assert generate(llm, prompts, [3, 5], max_tokens=NUM_TOKENS) == expected, "from the prefix cache"
    assert spec_metrics(llm)["preemptions"] > 0 or not asynchronous, "which takes more blocks"
    check_ends(llm, prompts, expected)
    before = steps_of(llm, "same-id", prompts[2], presence_penalty=0.5)[-1]
    assert steps_of(llm, "same-id", prompts[3], 5)[-1][2] is None
    assert steps_of(llm, "same-id", prompts[2], presence_penalty=0.5)[-1] == before, "a chain in the slot of a tree"


def test_what_the_gate_does(attention: None, engine: Any, prompts: Any, expected: Any, monkeypatch: Any) -> None:  # noqa: F811
    """Trees, the newest guess alone and nothing in turns. Kills: a window that is read in a step without one."""
    llm, turns = engine(with_lookup(gate="auto"), **STRESS, async_scheduling=True), [9, 9, 2, 0, 0, 9, 1]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    class Turns:
        def __getitem__(self, num_reqs: int) -> int:
            turns.append(turns.pop(0))
            return turns[-1]

    monkeypatch.setattr(scheduler, "dynamic_sd_lookup", Turns())
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    check(llm, 10)


@pytest.mark.slow
@pytest.mark.skipif(not CHAT_MODEL.exists(), reason="examples/chat_model.py makes the model")
@pytest.mark.parametrize("has_lookup", [False, True])
def test_as_played(attention: None, engine: Any, has_lookup: bool) -> None:  # noqa: F811
    """Answers of the chat model, by bench_lookahead.py: the same tokens in the same steps. Kills: a mask, a position, a
    pool or a window that is not the play's; a request that gets no tree before its end."""
    config: dict[str, Any] = {"method": "lookahead"}
    if has_lookup:
        config = {"method": "cascade", "stages": [{"method": "prompt_lookup"}, config]}
    settings = {"model": str(CHAT_MODEL), "max_model_len": 512, "max_num_seqs": 4, "async_scheduling": has_lookup}
    llm = engine({**config, "gate": "off"}, **settings)
    for line in PLAYED.read_text().splitlines()[: None if ALL else 1]:  # a step takes half a second
        row = json.loads(line)
        lengths, most = [*accumulate(row["steps"][has_lookup], initial=1)], len(row["output"]) + 3  # a guess's end
        texts = [tokens for tokens, *_ in steps_of(llm, "a", row["prompt"], len(lengths), max_tokens=most)]
        assert texts[-1][: len(row["output"])] == row["output"]
        assert [len(text) for text in texts] == [min(length, most) for length in lengths]


ROTATED_IN_3D = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}}


@pytest.mark.parametrize(
    ("field", "value"), [("kv_cache_dtype", "fp8"), ("tensor_parallel_size", 2), ("hf_overrides", ROTATED_IN_3D)]
)
@pytest.mark.parametrize("kind", [alone, with_lookup])
def test_refusals(kind: Any, field: str, value: Any) -> None:
    """Kills: an engine that would verify by a wrong mask, or with positions that are not of a tree; a sentence about a
    field that the user did not set."""
    from conftest import DEMO_MODEL
    from vllm.engine.arg_utils import EngineArgs

    settings = {"max_model_len": 512, "enforce_eager": True, field: value}
    args = EngineArgs(model=str(DEMO_MODEL), speculative_config=kind(), **settings)
    refusal = (
        r"not a multimodal model\.$"
        if field == "hf_overrides"
        else "remove lookahead: it is not exact, or untested, with"
    )
    with pytest.raises(ConfigError, match=refusal):
        args.create_engine_config()
