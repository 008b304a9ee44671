"""Drafting where vLLM measures, and where nobody can use it: it costs what it will cost, or nothing."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from cases import generate
from conftest import RUNNER
from families import EXIT_LAYER, checkpoint
from recorded import replays

pytestmark = [pytest.mark.skipif(RUNNER != "v2", reason="V1's dummy runs do not draft"), pytest.mark.slow]
K = 3
EXIT = {"method": "early_exit", "exit_layer": EXIT_LAYER, "draft_sample_method": "probabilistic"}
STAGES = [{"method": "prompt_lookup", "min_ngram": 1}, EXIT]
CASCADE = {"method": "cascade", "stages": STAGES, "policy": "verify", "gate": "off"}
PROMPTS = [[5, 9, 4, 5, 9], [7, 7, 3]]


class Layers:
    """Counts how often a speculator runs the target's first layers, and for how many tokens in all."""

    def __init__(self, speculator: Any, monkeypatch: pytest.MonkeyPatch):
        self.num_calls = self.num_tokens = 0
        self._run = speculator.first_layers
        monkeypatch.setattr(speculator, "first_layers", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def __call__(self, end_layer: int, token_ids: Any, *rest: Any, **named: Any) -> Any:
        self.num_calls += 1
        self.num_tokens += len(token_ids)
        return self._run(end_layer, token_ids, *rest, **named)


@pytest.fixture(scope="module", params=[EXIT, CASCADE], ids=lambda config: config["method"])
def llm(request: pytest.FixtureRequest, engine: Any) -> Iterator[Any]:
    """With room for 8 tokens a step, where a cascade may check 4 requests' drafts of 3."""
    config = {**request.param, "num_speculative_tokens": K}
    room = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    yield engine(config, model=str(checkpoint("llama")), skip_tokenizer_init=True, **room)


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def test_dummy_runs_draft(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dummy run has all K steps for the largest number of requests, with attention and without; it does not affect
    requests. Kills: a check of more tokens than there is room for; a dummy run without drafts (memory that nobody has
    counted); one that is counted, or that writes to the KV cache, or that asks for one that is not there yet.
    """
    runner = worker_of(llm).model_runner
    expected = generate(llm, PROMPTS, [2], max_tokens=6)
    before = llm.collective_rpc("specplugins_stats")[0]
    caches = [cache.clone() for cache in runner.kv_caches]
    with monkeypatch.context() as patches:
        layers, replayed = Layers(runner.speculator, patches), replays(runner.speculator._graphs)
        runner._dummy_run(8)
        is_recorded = replays(runner.speculator._graphs) > replayed  # a graph of all K steps
        assert is_recorded or (layers.num_calls >= K and layers.num_tokens >= K * 4)
        layers.num_calls = 0
        patches.delattr(runner.speculator, "block_tables")  # as in the profile run
        runner._dummy_run(8, skip_attn=True, is_profile=True)
        assert layers.num_calls >= K
    null_block = 0
    for cache, kept in zip(runner.kv_caches, caches, strict=True):
        blocks = [part.movedim(0 if part.shape[0] != 2 else 1, 0) for part in (cache, kept)]
        assert (blocks[0][null_block + 1 :] == blocks[1][null_block + 1 :]).all()
    after = llm.collective_rpc("specplugins_stats")[0]
    assert {**after, "propose_ms": 0} == {**before, "propose_ms": 0}
    assert generate(llm, PROMPTS, [2], max_tokens=6) == expected


def test_warm_up_teaches_nothing(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's requests before the first one, by the worker's call that sends them. Kills: counts of them; a warm-up that
    their names decide, or that ends its mark before the call ends or not at all; logits of more rows than vLLM verifies
    at once, when the KV cache has taken the memory."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    from vllm_specplugins.engine.v2 import memory

    worker = worker_of(llm)
    speculator = worker.model_runner.speculator
    before = llm.collective_rpc("specplugins_stats")[0]
    layers, replayed = Layers(speculator, monkeypatch), replays(speculator._graphs)
    steps = worker.execute_model, worker.sample_tokens

    def warm_up(_: Any) -> bool:
        assert speculator.session.is_warming_up
        assert worker.model_runner.scheduler_config.max_num_seqs == 1
        return run_mixed_prefill_decode_warmup(worker.model_runner, *steps, 8, req_id_prefix="any")

    monkeypatch.setattr(memory, "get_max_chunk_logits", lambda vocab_size: 2 * K)  # rows, for less than two requests
    [theirs, *_] = [kind for kind in type(worker).__mro__ if kind.__module__.startswith("vllm.")]
    monkeypatch.setattr(theirs, "compile_or_warm_up_model", warm_up)
    assert worker.compile_or_warm_up_model() is True and not speculator.session.is_warming_up
    assert worker.model_runner.scheduler_config is worker.scheduler_config
    assert layers.num_calls > 0 or replays(speculator._graphs) > replayed
    assert llm.collective_rpc("specplugins_stats")[0] == before


_NUMBERS = count()


@pytest.mark.parametrize("name", ["_v2_", "_warmup_"])
def test_ids_as_in_a_warm_up(llm: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A client's id that begins like those of vLLM's warm-up is an id. Kills: a rehearsal for all requests because the
    first one has such an id: the others got no drafts, or wrong tokens from the q of another step."""

    def stats() -> dict[str, Any]:
        """The counts on the device arrive with the second call."""
        _, [found] = (llm.collective_rpc("specplugins_stats") for _ in range(2))
        return dict(found)

    def outcome(first: str) -> tuple[Any, Any]:
        # A new id each time, as vLLM makes them: the last step of a request may arrive after its end.
        before, ids = stats(), iter([f"{first}{next(_NUMBERS)}", f"b{next(_NUMBERS)}"])
        with monkeypatch.context() as patches:
            processor = llm.llm_engine.input_processor
            patches.setattr(processor, "assign_request_id", lambda request: named(request, next(ids)))
            outputs = generate(llm, PROMPTS, [2], max_tokens=6)
        after = stats()
        return outputs, [after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens")]

    def named(request: Any, request_id: str) -> None:
        request.external_req_id, request.request_id = request.request_id, request_id

    expected = outcome("a")
    assert outcome(f"{name}x") == expected and expected[1][0] > 0


@pytest.mark.parametrize("most", [0, 1])
def test_fewer_than_k(llm: Any, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """vLLM asks for none where no request of a step can use them. Kills: drafts for nobody, or a report of some."""
    speculator = worker_of(llm).model_runner.speculator
    expected = generate(llm, PROMPTS, [2], max_tokens=6)
    layers = Layers(speculator, monkeypatch)
    propose = speculator.propose
    monkeypatch.setattr(
        speculator, "propose", lambda *args, **kwargs: propose(*args, **{**kwargs, "num_speculative_tokens": most})
    )
    reports: list[int] = []
    tell = speculator.report.tell

    def told(lengths: Any, *rest: Any) -> None:
        tell(lengths, *rest)
        reports.extend(num_draft for _, num_draft in lengths.items())

    monkeypatch.setattr(speculator.report, "tell", told)
    monkeypatch.setattr(speculator.report, "trims", lambda: False)  # or nothing reads the lengths
    assert generate(llm, PROMPTS, [2], max_tokens=6) == expected
    assert max(reports) == most
    assert most or layers.num_calls == 0
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


def test_max_model_len_sinks(llm: Any) -> None:
    """vLLM fits it to the memory after the proposer was made. Kills: drafts at positions that have no block."""
    worker = worker_of(llm)
    long = worker.model_config.max_model_len
    try:
        worker.update_max_model_len(64)
        proposers = [proposer for _, proposer in worker._stages()]
        assert [proposer.max_position for proposer in proposers if hasattr(proposer, "max_position")] == [63]
        speculator = worker.model_runner.speculator
        speculator.plan_for(torch.tensor([100]))
        assert speculator.draft_max_seq_len == 64
    finally:
        worker.update_max_model_len(long)
