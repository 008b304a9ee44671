"""On a CUDA device, compiled: our methods on Model Runner V2 in float32, where outputs can be compared."""

from typing import Any

import pytest
from cases import PROMPT_LOOKUP, generate, mixed_prompts
from conftest import DEMO_MODEL, RUNNER

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(RUNNER != "v2", reason="V2 is where GPUs are"),
]
EARLY_EXIT = {"method": "early_exit", "exit_layer": 2, "num_speculative_tokens": 3}


@pytest.mark.parametrize("config", [PROMPT_LOOKUP, EARLY_EXIT], ids=lambda config: config["method"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("eager", [True, False])
def test_identity(engine: Any, config: Any, asynchronous: bool, eager: bool) -> None:
    prompts = mixed_prompts(str(DEMO_MODEL), 24)
    expected = generate(engine(enforce_eager=eager), prompts, [8])
    llm = engine(config, enforce_eager=eager, async_scheduling=asynchronous)
    assert generate(llm, prompts, [8]) == expected
