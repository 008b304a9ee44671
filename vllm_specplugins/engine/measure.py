"""Runs an engine in a process of its own, one request at a time, and times it; for `calibrate`.

The calling process never imports vLLM.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_specplugins.config import ConfigError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that measures
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Arguments of `vllm.LLM` that the engines of a calibration share."""

    model: str
    dtype: str
    max_model_len: int
    enforce_eager: bool


@dataclass(frozen=True, slots=True)
class Served:
    """One request: its output, and its time after the first token.

    Args:
        token_ids: [num_tokens] of the output.
        step_ms: mean of a step.
        propose_ms: mean share of a step that is drafting; 0 without speculation.
    """

    token_ids: list[int]
    step_ms: float
    propose_ms: float


def serve_all(
    settings: EngineSettings,
    speculative_config: Mapping[str, Any] | None,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    log: Path,
    advance: Callable[[], None],
) -> list[Served]:
    """Greedy answers to prompts (token ids) by one engine, from its start to its end.

    The first prompt is answered once before, unmeasured. `advance` is called when the engine is up, and after every
    prompt; the engine's output goes to `log`.

    Raises:
        ConfigError: the engine failed.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    work = (settings, speculative_config, prompts, max_tokens)
    process = context.Process(target=_serve, args=(sender, log, *work))
    process.start()
    sender.close()
    try:
        served: list[Served] = []
        while len(served) < len(prompts):
            message = _receive(receiver, log)
            advance()
            if message is not None:
                served.append(message)
        process.join(timeout=30)
        return served
    finally:
        process.kill()


def _receive(receiver: Connection, log: Path) -> Served | None:
    try:
        message = receiver.recv()
    except EOFError:
        message = "it ended without a word"
    if isinstance(message, str):
        raise ConfigError(f"MODEL must be one that vLLM can serve with these options; its log is {log} ({message}).")
    return message


def _serve(sender: Connection, log: Path, settings: EngineSettings, *work: Any) -> None:
    """The engine's process: sends None when it is up, then a Served for each prompt, or a sentence on what failed."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= ENVIRONMENT
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    try:
        _answer(sender, settings, *work)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        sender.send(lines[0].rstrip(".") if lines else type(error).__name__)


def _answer(
    sender: Connection,
    settings: EngineSettings,
    speculative_config: Mapping[str, Any] | None,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        **asdict(settings),
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=dict(speculative_config) if speculative_config else None,
    )
    if speculative_config:
        llm.collective_rpc(_wait_for_device)
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)

    def answer(prompt: Sequence[int]) -> list[int]:
        [result] = llm.generate([{"prompt_token_ids": list(prompt)}], greedy, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    answer(prompts[0])
    sender.send(None)
    for prompt in prompts:
        before = _totals(llm, bool(speculative_config))
        token_ids = answer(prompt)
        spent = {name: total - before[name] for name, total in _totals(llm, bool(speculative_config)).items()}
        step_ms = spent["decode_ms"] / max(spent["decode_steps"], 1)
        sender.send(Served(token_ids, step_ms, spent["propose_ms"] / max(spent["request_steps"], 1)))


def _totals(llm: Any, speculating: bool) -> dict[str, float]:
    """Running totals: of vLLM, over steps after a request's first token; and of our proposer, over all steps."""
    latency = next(metric for metric in llm.get_metrics() if metric.name == "vllm:inter_token_latency_seconds")
    totals = {"decode_ms": latency.sum * 1000, "decode_steps": latency.count, "propose_ms": 0, "request_steps": 0}
    if speculating:
        [stats] = llm.collective_rpc("specplugins_stats")
        totals.update({name: stats[name] for name in ("propose_ms", "request_steps")})
    return totals


def _wait_for_device(worker: Any) -> None:
    """On a GPU, lets drafting end before it counts as ended: its kernels outlive the call that launched them."""
    if worker.device.type != "cuda":
        return
    import torch

    barrier = worker._barrier
    propose, counters = barrier.propose, barrier.counters

    def propose_and_wait(*args: Any) -> Any:
        torch.cuda.synchronize()
        start, total = time.perf_counter(), counters.propose_ms
        draft = propose(*args)
        torch.cuda.synchronize()
        counters.propose_ms = total + (time.perf_counter() - start) * 1000
        return draft

    barrier.propose = propose_and_wait
