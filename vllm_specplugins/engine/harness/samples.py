"""Runs engines that answer many requests at once and count drafts, without timing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from operator import sub
from pathlib import Path
from typing import Any

from vllm_specplugins.engine.harness.process import EngineProcess, build_llm, totals

# Arguments of `vllm.LLM` for a tiny model and many requests in a step.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_model_len": 64,
    "max_num_seqs": 256,
    "block_size": 32,
}


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and keyword arguments of SamplingParams, including `n`."""

    prompt: list[int]
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The outputs of requests that were served together, with their draft tokens, or vLLM's refusal of the
    parameters."""

    token_ids: list[list[list[int]]] = field(default_factory=list)  # of each output of each request
    num_drafted: int = 0
    num_accepted: int = 0
    refusal: str | None = None


Draw = Callable[[Sequence[Request]], Drawn]


def draw(llm: Any, requests: Sequence[Request]) -> Drawn:
    """Serves all requests at once in this process. Raises if a step fails; the engine then cannot serve any more
    requests."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    before = totals(llm)
    params = [SamplingParams(**request.params, detokenize=False) for request in requests]
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    try:
        results = llm.generate(prompts, params, use_tqdm=False)
    except (ValueError, VLLMValidationError) as error:
        if llm.llm_engine.has_unfinished_requests():  # not a refusal: a step has failed
            raise
        return Drawn(refusal=str(error).strip().splitlines()[0])
    token_ids = [[list(output.token_ids) for output in result.outputs] for result in results]
    _, drafted, accepted = map(sub, totals(llm), before)
    return Drawn(token_ids, drafted, accepted)


@contextmanager
def sampling_engine(
    blame: str, log: Path, model: Path | str, speculative_config: Any = None, settings: Mapping[str, Any] = SETTINGS
) -> Iterator[Draw]:
    """Runs `draw` in another process. Raises ConfigError, beginning with `blame`, if the engine fails."""
    with EngineProcess(log, blame, _draw_all, {"model": str(model), **settings}, speculative_config) as process:
        process.receive()
        yield process.ask


def _draw_all(pipe: Connection, arguments: dict[str, Any], config: dict[str, Any] | None) -> None:
    llm = build_llm(arguments, config)
    pipe.send(None)
    while (requests := pipe.recv()) is not None:
        pipe.send(draw(llm, requests))
