"""Engines that draw many samples and count their drafts; for `verify-lossless`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.measure.process import EngineProcess

# Arguments of `vllm.LLM` beside the model: a tiny one, many requests in a step.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "max_model_len": 64,
    "max_num_seqs": 256,
    "block_size": 32,
}
METRICS = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids and keyword arguments of SamplingParams, `n` among them."""

    prompt: list[int]
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What became of some requests that were served together.

    Args:
        token_ids: of each output of each request; empty if vLLM refused the parameters, or failed.
        num_drafted: draft tokens that were verified.
        num_accepted: how many of them were accepted.
        refusal: vLLM's sentence.
        failure: of an engine that died.
    """

    token_ids: list[list[list[int]]] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    refusal: str | None = None
    failure: str | None = None


class Samples:
    """Draws with an engine of this process."""

    def __init__(self, llm: Any):
        self._llm = llm

    def draw(self, requests: Sequence[Request]) -> Drawn:
        """Serves all requests at once.

        Raises:
            Exception: a step of the engine failed; it serves nothing any more.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        before = self._totals()
        params = [SamplingParams(**request.params, detokenize=False) for request in requests]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        try:
            results = self._llm.generate(prompts, params, use_tqdm=False)
        except (ValueError, VLLMValidationError) as error:
            if self._llm.llm_engine.has_unfinished_requests():  # no refusal: a step has failed
                raise
            return Drawn(refusal=str(error).strip().splitlines()[0])
        token_ids = [[list(output.token_ids) for output in result.outputs] for result in results]
        after = self._totals()
        return Drawn(token_ids, after[0] - before[0], after[1] - before[1])

    def _totals(self) -> tuple[int, int]:
        """vLLM's running totals of drafted and accepted tokens."""
        values = {metric.name: int(metric.value) for metric in self._llm.get_metrics() if metric.name in METRICS}
        return values.get(METRICS[0], 0), values.get(METRICS[1], 0)


class SamplingEngine:
    """`Samples` in a process of its own, for as long as a `with` block lasts; another one where it dies.

    Args:
        name: of the method, for the sentence if the engine does not start.
        logs: folder for the engines' output.

    Raises:
        ConfigError: it does not start.
    """

    def __init__(self, model: Path, speculative_config: Mapping[str, Any] | None, seed: int, name: str, logs: Path):
        self._logs = logs
        self._work = (f"{name} could not be verified", _draw_all, model, speculative_config, seed)
        self._process: EngineProcess | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.stop()

    def _start(self) -> EngineProcess:
        log = self._logs / f"engine-{len(list(self._logs.glob('engine-*.log')))}.log"
        process = self._process = EngineProcess(log, *self._work)
        process.start()
        process.receive()
        return process

    def draw(self, requests: Sequence[Request]) -> Drawn:
        """See Samples."""
        process = self._process or self._start()
        process.send(requests)
        try:
            drawn: Drawn = process.receive()
        except ConfigError as error:
            process.stop()
            self._process = None
            return Drawn(failure=str(error))
        return drawn


def _draw_all(pipe: Connection, model: Path, speculative_config: Mapping[str, Any] | None, seed: int) -> None:
    from vllm import LLM

    config = dict(speculative_config) if speculative_config else None
    samples = Samples(LLM(model=str(model), seed=seed, speculative_config=config, **SETTINGS))
    pipe.send(None)
    while (requests := pipe.recv()) is not None:
        pipe.send(samples.draw(requests))
