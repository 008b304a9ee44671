"""Model Runner V2: seeds of requests, which each rank draws alike, beside a call that a guard has abandoned."""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import RUNNER

pytestmark = pytest.mark.skipif(RUNNER == "v1", reason="V1's adapter draws seeds itself")
WITHOUT_TAPES = "no engine"


def test_seeds_of_ranks() -> None:
    """vLLM's own code draws the seeds, and code of others draws meanwhile on one rank. Kills: seeds from the generator
    that an abandoned call still draws from."""
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    from vllm_specplugins.engine.hooks import wrap
    from vllm_specplugins.engine.v2.runner import _numpy_apart, _with_seeds_apart

    draw = "seed = np.random.randint(_NP_INT64_MIN, _NP_INT64_MAX)"
    assert draw in inspect.getsource(SamplingStates.add_request), "the module's `np` is where vLLM draws"
    seeds = list[list[int]]()
    for is_disturbed in (False, True):
        np.random.seed(3)
        runner: Any = SimpleNamespace(seeds=[])
        places = ("temperature", "top_k", "top_p", "min_p")
        states = SimpleNamespace(**{name: SimpleNamespace(np=np.zeros(1)) for name in places})
        states.seeds = SimpleNamespace(np=np.zeros(1, np.int64))
        states.seeds_set, states.num_logprobs, states.vocab_size = np.zeros(1, bool), np.zeros(1, np.int32), 9
        params = SimpleNamespace(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, logprobs=None)

        def add(scheduler_output: Any, states: Any = states, params: Any = params, runner: Any = runner) -> None:
            SamplingStates.add_request(states, 0, params)
            runner.seeds.append(int(states.seeds.np[0]))

        runner.add_requests = add
        wrap(runner, "add_requests", partial(_with_seeds_apart, _numpy_apart()))
        for _ in range(5):
            if is_disturbed:
                np.random.rand(7)
                np.random.seed(0)
            runner.add_requests(SimpleNamespace(scheduled_new_reqs=[None]))
        seeds.append(runner.seeds)
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 5
