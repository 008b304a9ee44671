"""vLLM's engine on the simulated device: replayed graphs give the outputs of eager steps."""

from pathlib import Path
from typing import Any

import pytest
from cases import early_exit, generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS, counted, graphs, long

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from parts import with_embeddings
from recorded import drafts_pay, replays, runner
from simulated_device.device import Device

NUM_TOKENS = 13  # one from the prompt and three whole steps of K + 1
K = 3
SIZES = (1, 8, 32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 9)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: Any) -> list[list[int]]:
    """Of an eager engine without speculation."""
    return generate(engine(enforce_eager=True), prompts, [8], max_tokens=NUM_TOKENS)


def test_vllm_alone(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """Kills: an operation that a tape forgets, a tensor that a replay reads where it no longer is."""
    config = {**graphs((1, 4, 8))["compilation_config"], "cudagraph_mode": "FULL"}
    llm = engine(enforce_eager=False, compilation_config=config)
    with device.waits_forbidden():
        assert generate(llm, prompts, [3, 6], max_tokens=NUM_TOKENS) == expected
    assert replays(runner(llm).cudagraph_manager) >= 2 * (NUM_TOKENS - 1)


@pytest.fixture
def all_layers(engine: Any, device: Device) -> Any:
    llm = engine(early_exit(NUM_LAYERS, K), **graphs(SIZES))
    drafts_pay(llm)
    return llm


@pytest.mark.parametrize("batch_size", range(1, 9))
def test_all_layers(device: Device, all_layers: Any, prompts: Any, expected: Any, batch_size: int) -> None:
    """Every draft is accepted, by replays alone, without a wait; most batches have padding rows. Kills: a buffer that a
    graph does not read where the step wrote it; rows of padding that write to a request's cache.
    """
    speculator = runner(all_layers).speculator
    before, places = replays(speculator._graphs), device.ledger.places.total()
    few, params = prompts[:batch_size], {"max_tokens": NUM_TOKENS}
    with device.waits_forbidden():
        tokens, drafted, accepted = counted(all_layers, lambda: generate(all_layers, few, [batch_size], **params))
    assert tokens == expected[:batch_size] and drafted == accepted == 9 * batch_size
    assert replays(speculator._graphs) >= before + 3 and device.ledger.places.total() == places
    stats = all_layers.collective_rpc("specplugins_stats")[0]
    assert stats["faults"] == {} and stats["propose_ms"] == 0, "drafting eagerly takes time"


def test_all_layers_asynchronously(engine: Any, device: Device, prompts: Any, expected: Any) -> None:
    """The same with sampled drafts, q = p: all are accepted, one step or none is planned in vain."""
    config = {**early_exit(NUM_LAYERS, K), "draft_sample_method": "probabilistic"}
    llm = engine(config, **graphs(SIZES), async_scheduling=True)
    drafts_pay(llm)
    with device.waits_forbidden():
        assert generate(llm, prompts[:2], [2], max_tokens=NUM_TOKENS) == expected[:2]
        sampling = {"max_tokens": NUM_TOKENS, "temperature": 1.0}
        _, drafted, accepted = counted(llm, lambda: generate(llm, prompts[:2], [2], **sampling))
    assert drafted >= 18 and accepted >= drafted - 2 * K
    assert replays(runner(llm).speculator._graphs) > 0


@pytest.mark.parametrize("method", ["greedy", long("probabilistic")])
def test_one_pass(engine: Any, device: Device, prompts: Any, expected: Any, tmp_path: Path, method: str) -> None:
    """Look-ahead tokens through all layers, K of each request in a graph's one pass, with rows of padding and without:
    the first of a draft is the target's own, so that it is accepted, of whatever it is drawn. Fails if a graph is of
    single tokens, if a request's queries see each other's slots or what stands after them, or if its q is another's.
    """
    config = {**with_embeddings(tmp_path, NUM_LAYERS, K), "draft_sample_method": method}
    llm = engine(config, **graphs((1, 4, 8, 16, 24, 32)))
    drafts_pay(llm)
    graph, places = runner(llm).speculator._graphs_of[K], device.ledger.places.total()
    assert {own.num_tokens // own.num_reqs for own in graph.graphs} == {K}

    def firsts() -> tuple[int, int]:
        """Drafts, and how often their first token was accepted."""
        found = {metric.name: metric for metric in llm.get_metrics()}
        per_place = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        return found["vllm:spec_decode_num_drafts"].value, per_place[0]

    for batch_size in (1, 4, 8):
        few, before, replayed = prompts[:batch_size], firsts(), replays(graph)
        with device.waits_forbidden():
            if method == "greedy":
                assert generate(llm, few, [batch_size], max_tokens=NUM_TOKENS) == expected[:batch_size]
            else:
                generate(llm, few, [batch_size], max_tokens=NUM_TOKENS, temperature=1.0)
        drafts, accepted = (after - own for after, own in zip(firsts(), before, strict=True))
        assert drafts == accepted >= 3 * batch_size
        assert replays(graph) >= replayed + 3
    stats = llm.collective_rpc("specplugins_stats")[0]
    assert stats["faults"] == {} and stats["propose_ms"] == 0, "drafting eagerly takes time"
    assert device.ledger.places.total() == places
