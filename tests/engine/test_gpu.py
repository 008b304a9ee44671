"""On a CUDA device, compiled: our methods on Model Runner V2, with CUDA graphs and without.

In float32, where outputs can be compared token for token; in bfloat16, which FlashAttention needs, by what is accepted;
at temperatures by distribution. The other tests of engines run there as well, with SPECPLUGINS_RUNNER=v2.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import PROMPT_LOOKUP, generate, mixed_prompts
from conftest import DEMO_MODEL, NUM_LAYERS, RUNNER, SHARE_OF_GPU, counted
from test_distribution import WARM, Row, judge  # noqa: F401

from vllm_specplugins.tools.lossless.report import PASSED

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(RUNNER != "v2", reason="V2 is where GPUs are"),
]
EARLY_EXIT: dict[str, Any] = {"method": "early_exit", "exit_layer": 2, "num_speculative_tokens": 3}


def cascade(policy: str, gate: str = "auto", method: str = "greedy") -> dict[str, Any]:
    stages = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1, "draft_sample_method": method}]
    return {"method": "cascade", "num_speculative_tokens": 3, "policy": policy, "gate": gate, "stages": stages}


def faults(llm: Any) -> dict[str, int]:
    return llm.collective_rpc("specplugins_stats")[0]["faults"]


@pytest.mark.parametrize("config", [PROMPT_LOOKUP, EARLY_EXIT, cascade("verify")], ids=lambda config: config["method"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("eager", [True, False])
def test_identity(engine: Any, config: Any, asynchronous: bool, eager: bool) -> None:
    prompts = mixed_prompts(str(DEMO_MODEL), 24)
    expected_tokens = generate(engine(enforce_eager=eager), prompts, [8])
    llm = engine(config, enforce_eager=eager, async_scheduling=asynchronous)
    assert generate(llm, prompts, [8]) == expected_tokens
    assert faults(llm) == {}


@pytest.mark.skipif(os.environ.get("VLLM_BATCH_INVARIANT") != "1", reason="wants VLLM_BATCH_INVARIANT=1")
@pytest.mark.parametrize("config", [PROMPT_LOOKUP, EARLY_EXIT, cascade("verify")], ids=lambda config: config["method"])
def test_invariant_in_bfloat16(engine: Any, config: Any) -> None:
    """Outputs are those without speculation in bfloat16, too, and by seed those of any batch, if vLLM's batch-invariant
    kernels do not depend on how many tokens of a request a step verifies, which vLLM does not promise."""
    prompts, given = mixed_prompts(str(DEMO_MODEL), 24), {"dtype": "bfloat16", "enforce_eager": False}
    expected_tokens = generate(engine(**given), prompts, [8])
    llm = engine(config, **given)
    assert generate(llm, prompts, [8]) == generate(llm, prompts, [1, 5]) == expected_tokens
    seeded = [generate(llm, prompts, sizes, temperature=0.8, seed=7) for sizes in ([8], [1, 5])]
    assert seeded[0] == seeded[1] and faults(llm) == {}


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("eager", [True, False])
def test_all_layers_in_bfloat16(engine: Any, method: str, eager: bool) -> None:
    """A draft by all layers is what the target says itself, but for ties that bfloat16 decides by the batch's shape.
    Kills: a wrong position, slot, block table or length in the metadata of FlashAttention, updated in place or not.
    """
    config = {**EARLY_EXIT, "exit_layer": NUM_LAYERS, "draft_sample_method": method}
    llm = engine(config, dtype="bfloat16", enforce_eager=eager)
    prompts, heat = mixed_prompts(str(DEMO_MODEL), 24), float(method != "greedy")
    _, drafted, accepted = counted(llm, lambda: generate(llm, prompts, [8, 1, 5], temperature=heat))
    # What was planned behind the end of an output counts as drafted: up to K tokens a request.
    assert drafted > 300 and accepted >= 0.95 * (drafted - 24 * EARLY_EXIT["num_speculative_tokens"])
    assert faults(llm) == {}


@pytest.mark.parametrize(("policy", "gate"), [("verify", "off"), ("auto", "off"), ("auto", "auto")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sampled_cascade(judge: Any, policy: str, gate: str, asynchronous: bool) -> None:  # noqa: F811
    """Samples of a tiny model against their exact distribution, with drafts that are planned too long. Without top-p:
    attention in TF32 moves logits by a hundredth, and with it the token at which a cut falls."""
    row = Row(cascade(policy, gate, "probabilistic"), WARM, 6000)
    llm, [(judged, verdict)] = judge(row, async_scheduling=asynchronous)
    assert verdict == PASSED and faults(llm) == {}, judged


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("config", [PROMPT_LOOKUP, EARLY_EXIT, cascade("verify")], ids=lambda config: config["method"])
def test_two_ranks(engine: Any, config: Any) -> None:
    prompts = mixed_prompts(str(DEMO_MODEL), 16)
    expected_tokens = generate(engine(tensor_parallel_size=2), prompts, [8])
    llm = engine(config, tensor_parallel_size=2, enforce_eager=False)
    assert generate(llm, prompts, [8]) == expected_tokens
    assert faults(llm) == {}


SAMPLED = cascade("verify", "off", "probabilistic")
SYNC_CHECK = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[3], max_model_len=512, speculative_config=eval(sys.argv[4]), **eval(sys.argv[5]))
prompts = [{"prompt_token_ids": [5, 9, 4, 8, 5, 9, 4]}] * 4
for temperature in (0.0, 1.0):
    llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.parametrize(
    "config",
    [PROMPT_LOOKUP, EARLY_EXIT, cascade("verify", "off", "probabilistic")],
    ids=lambda config: config["method"],
)
def test_waits_are_announced(config: dict[str, Any]) -> None:
    """VLLM_GPU_SYNC_CHECK=error in a separate process, since vLLM reads it at import."""
    folders = [os.path.dirname(__file__), str(Path(__file__).parents[2] / "examples" / "demo")]
    done = subprocess.run(
        [sys.executable, "-c", SYNC_CHECK, *folders, str(DEMO_MODEL), repr(config), repr(SHARE_OF_GPU)],
        env={**os.environ, "VLLM_GPU_SYNC_CHECK": "error"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
