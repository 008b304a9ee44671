"""Runs engines in processes of their own, one request at a time, and times them; for `calibrate`.

The calling process never imports vLLM.
"""

import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

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
    """One request: its output, and the steps after the one that gave the first token.

    Args:
        token_ids: [num_tokens] of the output.
        step_ms: [num_steps] of each step.
        propose_ms: [num_steps] how much of it was drafting; 0 without speculation.
    """

    token_ids: list[int]
    step_ms: list[float]
    propose_ms: list[float]


class Engine:
    """One engine for as long as a `with` block lasts; its output goes to `log`.

    Raises:
        ConfigError: from every method, if the engine failed.
    """

    def __init__(
        self, settings: EngineSettings, speculative_config: Mapping[str, Any] | None, max_tokens: int, log: Path
    ):
        self._log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        arguments = (self._theirs, log, settings, speculative_config, max_tokens)
        self._process = context.Process(target=_serve, args=arguments)

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # it may have ended
            self._pipe.send(None)
        self._process.join(timeout=30)
        self._process.kill()

    def wait(self) -> None:
        """Returns when the engine is up."""
        self._receive()

    def answer(self, prompt: Sequence[int]) -> Served:
        """The greedy answer to a prompt of token ids, timed."""
        self._pipe.send(prompt)
        served: Served = self._receive()
        return served

    def _receive(self) -> Any:
        try:
            message = self._pipe.recv()
        except EOFError:
            message = "it ended without a word"
        if isinstance(message, str):
            sentence = "MODEL must be one that vLLM can serve with these options"
            raise ConfigError(f"{sentence}; its log is {self._log} ({message}).")
        return message


def _serve(pipe: Connection, log: Path, *work: Any) -> None:
    """The engine's process: sends None when it is up, then a Served for each prompt, or a sentence on what failed."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= ENVIRONMENT
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    try:
        _answer_all(pipe, *work)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        pipe.send(lines[0].rstrip(".") if lines else type(error).__name__)


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


def _run_request(llm: Any, speculating: bool) -> Served:
    """Steps through the one request of an engine."""
    token_ids: list[int] = []
    step_ms, propose_ms = [], []
    while llm.llm_engine.has_unfinished_requests():
        decoding, drafted, start = bool(token_ids), _propose_ms(llm, speculating), time.perf_counter()
        outputs = llm.llm_engine.step()
        elapsed = (time.perf_counter() - start) * 1000
        if outputs:
            token_ids = list(outputs[0].outputs[0].token_ids)
        if decoding:
            step_ms.append(elapsed)
            propose_ms.append(_propose_ms(llm, speculating) - drafted)
    return Served(token_ids, step_ms, propose_ms)


def _propose_ms(llm: Any, speculating: bool) -> float:
    """Our proposer's running total."""
    return float(llm.collective_rpc("specplugins_stats")[0]["propose_ms"]) if speculating else 0.0


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
