"""Every kind of drafter that vLLM builds in, as a stage in front of prompt lookup, which continues its drafts.

Each costs two engines, so that most are run by SPECPLUGINS_TESTS=all alone.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from built_in_kinds import KINDS, Kind, folder_of, weights_by_name
from cases import generate
from conftest import ALL, RUNNER, spec_metrics

pytestmark = pytest.mark.slow
LOOKUP = {"method": "prompt_lookup", "min_ngram": 1}
K, WIDTH = 4, 6
NUM_TOKENS = 12
ORDINARY = {"v1": ["P-EAGLE"], "v2": []}[RUNNER]
RUN = list(KINDS) if ALL else ORDINARY


@pytest.fixture(autouse=True, scope="module")
def dummy_weights(engine: Any) -> Iterator[None]:
    with weights_by_name():
        yield
        engine.stop()


def stage_of(kind: Kind) -> dict[str, Any]:
    model = {} if kind.model is None else {"model": folder_of(kind.model)}
    return {"method": kind.method, "num_speculative_tokens": K, **kind.settings, **model}


@pytest.mark.parametrize("name", [name for name in RUN if RUNNER in KINDS[name].runners])
def test_a_kind(engine: Any, name: str) -> None:
    """Identical at temperature 0; it drafts, and nothing is at fault."""
    kind = KINDS[name]
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(64, (length,), generator=generator).tolist() * 2 for length in (9, 20, 35)]
    settings = {
        "model": folder_of(kind.target), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256,
    }  # fmt: skip
    expected = generate(engine(**settings), prompts, [3], max_tokens=NUM_TOKENS)
    config = {"method": "cascade", "num_speculative_tokens": WIDTH, "gate": "off", "time_budget_ms": 60_000}
    llm = engine({**config, "stages": [LOOKUP, stage_of(kind)]}, **settings)
    assert generate(llm, prompts, [3], max_tokens=NUM_TOKENS) == expected
    [stats] = llm.collective_rpc("specplugins_stats")
    lookup, model = stats["stages"].values()
    assert stats["faults"] == model["faults"] == {}, model
    assert lookup["asked"] and model["kept"] and (RUNNER == "v2" or model["ms"] > 0), (lookup, model)
    assert len({tuple(tokens) for tokens in expected}) > 1 and spec_metrics(llm)["draft_tokens"] > 0


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if RUNNER not in kind.runners])
def test_what_a_runner_lacks(name: str) -> None:
    """vLLM says so before anything is loaded. Fails if a kind that is said to be another runner's would start."""
    from vllm.engine.arg_utils import EngineArgs

    kind = KINDS[name]
    config = {"method": "cascade", "num_speculative_tokens": WIDTH, "stages": [stage_of(kind), LOOKUP]}
    args = EngineArgs(model=folder_of(kind.target), skip_tokenizer_init=True, speculative_config=config)
    with pytest.raises(ValueError, match="dspark|candidate-head" if RUNNER == "v1" else "parallel drafting"):
        args.create_engine_config()
