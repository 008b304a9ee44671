"""Engines that answer one request at a time and are timed, each in a process of its own; for `calibrate`."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from vllm_specplugins.engine.measure.process import EngineProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Arguments of `vllm.LLM` that the engines of a calibration share."""

    model: str
    dtype: str
    max_model_len: int
    enforce_eager: bool


@dataclass(frozen=True, slots=True)
class Served:
    """One request: its output, and the steps after the one that gave the first token.

    Args:
        token_ids: [num_tokens] of the output.
        step_ms: [num_steps] of each step.
        propose_ms: [num_steps] how much of it was drafting; 0 without speculation.
        emitted: [num_steps] tokens that came out.
        drafted: [num_steps] draft tokens that were verified.
    """

    token_ids: list[int]
    step_ms: list[float]
    propose_ms: list[float]
    emitted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


class Engine:
    """One engine for as long as a `with` block lasts; its output goes to `log`.

    Raises:
        ConfigError: from every method, if the engine failed.
    """

    def __init__(
        self, settings: EngineSettings, speculative_config: Mapping[str, Any] | None, max_tokens: int, log: Path
    ):
        blame = "MODEL must be one that vLLM can serve with these options"
        self._process = EngineProcess(log, blame, _answer_all, settings, speculative_config, max_tokens)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def wait(self) -> None:
        """Returns when the engine is up."""
        self._process.receive()

    def answer(self, prompt: Sequence[int]) -> Served:
        """The greedy answer to a prompt of token ids, timed."""
        self._process.send(prompt)
        served: Served = self._process.receive()
        return served


def _answer_all(
    pipe: Connection, settings: EngineSettings, speculative_config: Mapping[str, Any] | None, max_tokens: int
) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        **asdict(settings),
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=dict(speculative_config) if speculative_config else None,
    )
    if speculative_config:
        llm.collective_rpc(_time_drafting)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
    pipe.send(None)
    for number in itertools.count():
        prompt = pipe.recv()
        if prompt is None:
            return
        llm.llm_engine.add_request(str(number), {"type": "token", "prompt_token_ids": list(prompt)}, params)
        pipe.send(_run_request(llm, bool(speculative_config)))
        if speculative_config and number == 0:  # unmeasured, and asked again: nothing is drafted from its answer
            llm.collective_rpc("specplugins_store", args=("reset",))


def _run_request(llm: Any, speculating: bool) -> Served:
    """Steps through the one request of an engine."""
    served = Served([], [], [])
    while llm.llm_engine.has_unfinished_requests():
        before, totals, start = len(served.token_ids), _totals(llm, speculating), time.perf_counter()
        outputs = llm.llm_engine.step()
        elapsed = (time.perf_counter() - start) * 1000
        if outputs:
            served.token_ids[:] = outputs[0].outputs[0].token_ids
        if before:
            propose_ms, drafted = (now - then for now, then in zip(_totals(llm, speculating), totals, strict=True))
            served.step_ms.append(elapsed)
            served.propose_ms.append(propose_ms)
            served.drafted.append(int(drafted))
            served.emitted.append(len(served.token_ids) - before)
    return served


def _totals(llm: Any, speculating: bool) -> tuple[float, float]:
    """Our proposer's: ms of drafting, and draft tokens verified."""
    if not speculating:
        return 0.0, 0.0
    stats = llm.collective_rpc("specplugins_stats")[0]
    return float(stats["propose_ms"]), float(stats["drafted_tokens"])


def _time_drafting(worker: Any) -> None:
    """Counts all of drafting in `propose_ms`, to the end of its kernels.

    They outlive the call that launches them, and a recorded graph does not pass our fault barrier, which counts.
    """
    import torch

    runner, counters = worker.model_runner, worker._barrier.counters
    v2 = hasattr(runner, "speculator")
    owner, name = (runner.speculator, "propose") if v2 else (runner, "propose_draft_token_ids")
    propose = getattr(owner, name)

    def wait() -> None:
        if worker.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(*args: Any, **kwargs: Any) -> Any:
        wait()
        start, total = time.perf_counter(), counters.propose_ms
        drafts = propose(*args, **kwargs)
        wait()
        counters.propose_ms = total + (time.perf_counter() - start) * 1000
        return drafts

    setattr(owner, name, timed)
