"""What an engine of this process has recorded: its runner, and the graphs of target and drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import graphs

from vllm_specplugins.gate.budget import Prices


def runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def replays(manager: Any) -> int:
    """Of all graphs of one of vLLM's managers; none without tapes, or where nothing is recorded."""
    graphs = manager.graphs.values() if manager is not None else ()
    return sum(getattr(graph, "num_replays", 0) for graph in graphs)


def drafts_pay(llm: Any, token_ms: float = 0.001) -> None:
    """Costs of steps as of a device on which drafts pay, for who trims them, in place of a simulation's times."""
    verify_ms = [(n, 8 + token_ms * n) for n in range(1, 4097)]
    runner(llm).adaptive_verification.set_cost_curves([(1, 0.1), (8, 0.1)], verify_ms)
    if budget := llm.llm_engine.model_executor.driver_worker.worker._session.budget:
        budget._prices = Prices()  # contexts are free


def on_device(engine: Any, config: dict[str, Any], token_ms: float = 0.001) -> Any:
    """Scheduled asynchronously, lengths trimmed on the device; costs of steps as of a device on which drafts pay."""
    llm = engine(config, **graphs())
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    drafts_pay(llm, token_ms)
    return llm


@contextmanager
def verified(llm: Any) -> Iterator[list[dict[str, int]]]:
    """Of each step, how many tokens of each request are verified."""
    manager, lengths = runner(llm).adaptive_verification, []
    reallocate = manager.reallocate_drafts

    def watched(request_ids: list[str], *args: Any) -> Any:
        result = reallocate(request_ids, *args)
        lengths.append(dict(zip(request_ids, result[0].diff().tolist(), strict=True)))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "reallocate_drafts", watched)
        yield lengths


def check_nothing_found_costs_one_token(llm: Any, **options: Any) -> None:
    """From its second step on, of a request that never copies, with these options, beside one that always does."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": tokens} for tokens in (list(range(10, 60)), [5] * 20)]
    params = [
        SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, allowed_token_ids=allowed, extra_args=own)
        for most, allowed, own in ((4, list(range(100, 300)), options), (16, [5], {}))
    ]
    with verified(llm) as lengths:
        llm.generate(prompts, params, use_tqdm=False)
    both = [own for own in lengths if len(own) == 2][:2]  # later it may repeat itself
    first = min(both[0], key=lambda name: int(name.split("-")[0]))
    assert len(both) >= 2 and all(own[first] == 1 for own in both[1:]), both
    assert any(max(own.values()) > 1 for own in both[1:]), both
