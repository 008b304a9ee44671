"""Early exit: the handle on the target's layers over its paged KV cache, on both runners."""

from typing import Any

import pytest
from cases import STRESS, generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS, RUNNER, spec_metrics

from vllm_specplugins.config import ConfigError

FEW_LAYERS = NUM_LAYERS // 2
NUM_TOKENS = 21  # one from the prompt and four whole steps of K + 1, so that no draft is cut
ASYNC = [False, True] if RUNNER == "v2" else [False]


def early_exit(layer: int, num_draft: int = 4) -> dict[str, Any]:
    return {"method": "early_exit", "exit_layer": layer, "num_speculative_tokens": num_draft}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 16 if INTERPRETED else 24)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    return generate(engine(), prompts, [8], max_tokens=NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ASYNC)
def test_all_layers_accept_everything(engine: Any, prompts: Any, expected: Any, asynchronous: bool) -> None:
    """The invariant. Kills: a wrong position, slot, block table, norm or token in the draft's forward pass."""
    llm = engine(early_exit(NUM_LAYERS), **({"async_scheduling": True} if asynchronous else {}))
    before = spec_metrics(llm)
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    after = spec_metrics(llm)
    drafted = after["draft_tokens"] - before["draft_tokens"]
    assert drafted >= len(prompts) * 16
    assert after["accepted_tokens"] - before["accepted_tokens"] >= drafted - (
        0 if not asynchronous else len(prompts) * 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ASYNC)
def test_stress(engine: Any, prompts: Any, expected: Any, asynchronous: bool) -> None:
    """Half of the layers draft, under preemption, prefix-cache hits and chunked prefill.

    Kills: drafts that write past their own blocks (no lookahead slots), into another request's.
    """
    llm = engine(early_exit(FEW_LAYERS), **STRESS, **({"async_scheduling": True} if asynchronous else {}))
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected, "the second time from the prefix cache"
    metrics = spec_metrics(llm)
    assert metrics["preemptions"] > 0 and metrics["accepted_tokens"] > 50
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


def test_lookahead_slots(engine: Any) -> None:
    """K slots past the last token are reserved, for methods that write there."""
    config = engine(early_exit(FEW_LAYERS)).llm_engine.vllm_config
    assert config.num_lookahead_tokens == config.num_speculative_tokens == 4


@pytest.mark.parametrize("layer", [0, -1, NUM_LAYERS + 1, "2", 10**9, None, 1.0, True])
def test_bad_layers(layer: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(DEMO_MODEL), max_model_len=512, speculative_config=early_exit(layer))
    with pytest.raises(ConfigError, match=r"^early_exit: exit_layer must be an integer from 1 to .*, not .*\.$"):
        args.create_engine_config()
