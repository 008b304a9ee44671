"""Prompts in steps with decoding requests, without a model: drafts take no token that a request or a prompt needs.
benchmarks/bench_admission.py plays a server's sizes, and what a first token waits."""

import pytest
from conftest import ALL, RUNNER
from played_server import PlayedServer, served

from vllm_specplugins.tools.replay.costs import LLAMA_3_1_8B

pytestmark = pytest.mark.skipif(RUNNER != "v2", reason="V1 plans what was drafted")
SIZES = [(512, 64), *([(8192, 200), (2048, 256)] if ALL else [])]  # tokens a step, requests that decode


@pytest.mark.parametrize(("tokens", "num_reqs"), SIZES)
def test_prompts_are_admitted(tokens: int, num_reqs: int) -> None:
    """K = 31 for all requests exceeds a step, or nearly fills it. Fails if planned drafts leave no room for requests or
    prompts (`MakesRoom`), or if a step plans fewer drafts than it could verify."""
    arms = []
    for config in (None, {"method": "prompt_lookup"}):
        loaded = served(PlayedServer(config, LLAMA_3_1_8B, num_reqs, tokens), 400, waiting=5)
        server = PlayedServer(config, LLAMA_3_1_8B, num_reqs, tokens)
        alone = served(server, 300)
        least = min(map(len, server.emitted.values()))
        arms.append((loaded["prompts a second"], alone["tokens a second"], least))
    (rate, speed, steps), (own_rate, own_speed, own_least) = arms
    assert own_rate >= 0.95 * rate > 0 and own_speed > 1.05 * speed and own_least > 0.5 * steps > 0
