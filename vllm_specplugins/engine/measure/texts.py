"""Texts that a served model writes itself: many prompts continued at once, by an engine in a process of its own."""

from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from vllm_specplugins.engine.measure.process import EngineProcess

AT_A_TIME = 64  # requests


def continued(
    model: str,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    temperature: float,
    seed: int,
    log: Path,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[list[int]]:
    """Each prompt of token ids and what the model says behind it, up to its end or to `num_tokens` together.

    Args:
        temperature: 0 is greedy; no other sampling parameter is set.
        seed: of the engine.
        log: file for the engine's output.
        advance: called with the number of prompts that are done.

    Raises:
        ConfigError: the engine failed.
    """
    process = EngineProcess(log, "MODEL must be one that vLLM can serve", _continue_all, model, num_tokens, seed)
    process.start()
    try:
        process.receive()
        for start in range(0, len(prompts), AT_A_TIME):
            some = prompts[start : start + AT_A_TIME]
            process.send((some, temperature))
            for prompt, output in zip(some, process.receive(), strict=True):
                yield [*prompt, *output]
            advance(start + len(some))
    finally:
        process.stop()


def _continue_all(pipe: Connection, model: str, num_tokens: int, seed: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    own = {"dtype": "float32", "enforce_eager": True} if on_cpu else {}
    llm = LLM(model, max_model_len=num_tokens + 1, max_num_seqs=AT_A_TIME, seed=seed, disable_log_stats=True, **own)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        prompts, temperature = asked
        params = [
            SamplingParams(temperature=temperature, max_tokens=num_tokens - len(prompt), detokenize=False)
            for prompt in prompts
        ]
        tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results = llm.generate(tokens, params, use_tqdm=False)
        pipe.send([list(result.outputs[0].token_ids) for result in results])
