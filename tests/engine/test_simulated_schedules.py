"""Random schedules on the simulated device: arrivals, aborts, preemption and grammars, in any order."""

import random
from typing import Any

import pytest
from cases import PROMPT_LOOKUP, STRESS, SUFFIX_LOOKUP, early_exit, mixed_prompts
from conftest import ALL, DEMO_MODEL, INTERPRETED, graphs, note_launch, spec_metrics

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from shortened import first_layers
from simulated_device.device import Device
from simulated_device.leaks import sizes
from simulated_device.references import patch_kernels
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

NUM_PROMPTS = 8
MAX_TOKENS = 12
MAX_STEPS = 400
NUM_SCHEDULES = 20 if ALL else 5
DRAFTER = {"method": "draft_model", "model": str(first_layers(DEMO_MODEL, 1)), "num_speculative_tokens": 3}


def beside(stage: dict[str, Any]) -> dict[str, Any]:
    return {"method": "cascade", "num_speculative_tokens": 4, "stages": [{"method": "prompt_lookup"}, stage]}


CONFIGS: dict[str, Any] = {
    "early_exit": (early_exit(1), {"async_scheduling": True}),
    "prompt_lookup": (PROMPT_LOOKUP, {}),
    "suffix_lookup": (SUFFIX_LOOKUP, {}),
    "cascade": (beside({"method": "early_exit", "exit_layer": 1}), {}),
    "draft_model": (beside(DRAFTER), {}),
}


def params(grammar: bool, max_tokens: int) -> SamplingParams:
    structured = StructuredOutputsParams(regex="[a-z ]{4,9}[0-9]{40}") if grammar else None
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        structured_outputs=structured,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


BOUNDED = (
    "_rows._free", "_lengths._arriving.request_ids", ".store._texts", "budget._uploaded", "Barrier.emitted[]",
    "tally._over", "tally._over[].request_ids",
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), NUM_PROMPTS)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: Any) -> dict[tuple[int, bool], list[int]]:
    """Of an eager engine without speculation, by prompt and grammar."""
    llm = engine(enforce_eager=True)
    cases = [(index, grammar) for grammar in (False, True) for index in range(NUM_PROMPTS)]
    outputs = llm.generate(
        [{"prompt_token_ids": prompts[index]} for index, _ in cases],
        [params(grammar, MAX_TOKENS) for _, grammar in cases],
        use_tqdm=False,
    )
    return {case: list(output.outputs[0].token_ids) for case, output in zip(cases, outputs, strict=True)}


def play(llm: Any, prompts: Any, seed: int) -> dict[tuple[int, bool], list[list[int]]]:
    """One schedule of some requests; outputs of those that were not aborted, by prompt and grammar."""
    rng, engine = random.Random(seed), llm.llm_engine
    arrivals = [(rng.randrange(15), rng.randrange(NUM_PROMPTS), rng.random() < 0.3) for _ in range(8)]
    cases, outputs = {}, {}
    for step in range(MAX_STEPS):
        for place, (arrives, index, grammar) in enumerate(arrivals):
            if arrives == step:
                name = f"{seed}-{place}"
                cases[name] = index, grammar
                tokens = {"prompt_token_ids": prompts[index]}
                engine.add_request(name, tokens, params(grammar, rng.randint(1, MAX_TOKENS)))
        if cases and rng.random() < 0.08:
            engine.abort_request([rng.choice(list(cases))])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason == "length":
                outputs.setdefault(cases[output.request_id], []).append(list(output.outputs[0].token_ids))
        if step > 15 and not engine.has_unfinished_requests():
            return outputs
    raise AssertionError(f"schedule {seed} does not end")


def kept(llm: Any) -> dict[str, int]:
    """Sizes of all that is ours, behind a request that is the last one; but of free rows, of which there are as many as
    there were ever taken at once, of the last drafts whose lengths were told, which are those of one step, of a store,
    which has a limit, of the places in drafts at which tokens were dropped (K), of shapes of batches, and of the
    counts of requests that ended last, which are one copy."""
    llm.generate({"prompt_token_ids": [5, 6, 7]}, params(False, 3), use_tqdm=False)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    ours = getattr(runner.speculator, "specplugins", runner.speculator)
    roots = ours, runner.draft_tokens_handler, ours.session, runner.rejection_sampler
    return {path: size for path, size in sizes(*roots).items() if not path.endswith(BOUNDED)}


@pytest.mark.slow
@pytest.mark.parametrize("method", CONFIGS if ALL else ["early_exit"])
def test_random_schedules(
    engine: Any, device: Device, prompts: Any, expected: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a copy that is read too early, a graph that reads another's row, a request that is never forgotten."""
    patch_kernels(monkeypatch, note_launch)
    config, arguments = CONFIGS[method]
    llm = engine(config, **STRESS, **graphs((1, 4, 8, 16, 40)), **arguments)
    play(llm, prompts, seed=0)
    before, started = kept(llm), spec_metrics(llm)["preemptions"]
    for seed in range(1, NUM_SCHEDULES + 1):
        for (index, grammar), outputs in play(llm, prompts, seed).items():
            for tokens in outputs:
                assert tokens == expected[index, grammar][: len(tokens)], f"schedule {seed}, prompt {index}"
    assert spec_metrics(llm)["preemptions"] > started or method != "early_exit"
    assert kept(llm) == before
    stats = llm.collective_rpc("specplugins_stats")[0]
    assert stats["faults"] == {} and 0 < stats["accepted_tokens"] <= stats["drafted_tokens"] < 10**6
