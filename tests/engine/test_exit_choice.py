"""An exit's layer that is chosen while serving: what the shadows say, and that it settles.

On V2 a cascade of it is in test_simulated_cascade.py; SPECPLUGINS_SIMULATED=all runs these there, too.
"""

import os
from typing import Any

import numpy as np
import pytest
from cases import PROMPT_LOOKUP, generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS
from recorded import runner

K, NUM_TOKENS = 4, 20
if INTERPRETED and os.environ.get("SPECPLUGINS_SIMULATED") != "all":
    pytest.skip("V1's are enough", allow_module_level=True)

EXIT = {"method": "early_exit", "exit_layer": [1, NUM_LAYERS], "draft_sample_method": "coupled"}
ALONE = {**EXIT, "num_speculative_tokens": K}
CASCADE = {"method": "cascade", "stages": [{"method": "prompt_lookup"}, EXIT], "num_speculative_tokens": K}
EQUAL, DEAR = (0.1, 0.1), (0.1, 9.0)  # what a token drafted from each layer costs, in steps


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 4 if INTERPRETED else 8)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    return generate(engine(PROMPT_LOOKUP), prompts, [4], max_tokens=NUM_TOKENS)


def exit_of(llm: Any) -> Any:
    proposer: Any = llm.llm_engine.model_executor.driver_worker.worker._barrier.proposer
    return proposer if hasattr(proposer, "chosen") else dict(proposer.named_stages())["1 early_exit"]


def begin(llm: Any, monkeypatch: pytest.MonkeyPatch, costs: tuple[float, float]) -> Any:
    """The choice as at the start, where drafts cost so much."""
    exit_stage = exit_of(llm)
    monkeypatch.setattr(exit_stage.chosen, "shares", lambda forward: np.array(costs))
    if (late := getattr(getattr(runner(llm), "speculator", None), "_layers", None)) is not None:
        monkeypatch.setattr(late, "_shares", np.array(costs))
    choice = exit_stage.chosen.choice
    choice.counts[:], choice._step, choice.layer = 0.5, -1, 1
    exit_stage.exit_layer = 1
    choice.num_steps.update(dict.fromkeys(choice.num_steps, 0))
    return choice


@pytest.mark.parametrize("config", [ALONE, CASCADE], ids=["alone", "cascade"])
def test_settles_and_changes_no_token(
    engine: Any, prompts: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    """Of all layers, which are always right, and one: where both cost the same, all; where all are dear, one. At every
    temperature the shadow of all layers says what came out. Fails if it reads another place, counts what was rejected,
    goes by the noise of another position, or if its slots are another request's."""
    llm = engine(config)
    choice = begin(llm, monkeypatch, EQUAL)
    assert generate(llm, prompts, [4], max_tokens=NUM_TOKENS) == expected
    assert choice.layer == NUM_LAYERS
    assert choice.num_steps[1] <= 8 and choice.num_steps[NUM_LAYERS] >= 4
    one, every = choice.counts
    assert every[:, 0].sum() <= 1 and one[:, 0].sum() > 4, choice.counts
    choice = begin(llm, monkeypatch, DEAR)
    generate(llm, prompts, [4], max_tokens=NUM_TOKENS, temperature=0.9)
    one, every = choice.counts
    assert every[:, 0].sum() <= 1 and one[:, 0].sum() > 4, choice.counts
    assert choice.layer == 1 and choice.num_steps[NUM_LAYERS] == 0
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}
    assert runner(llm).use_aux_hidden_state_outputs
