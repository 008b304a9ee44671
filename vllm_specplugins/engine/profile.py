"""Measures the time of a step by its number of tokens at the engine's start, for a gate on the host (gate/profile.py).
Model Runner V2's device methods use vLLM's profile instead (adaptive/budget.py)."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.random import fork_rng

from vllm_specplugins.engine.hooks import replaced
from vllm_specplugins.isolation.faults import cause_text

SECONDS = 2.0  # no number of tokens begins after this time
REPEATS = 3  # steps of each number, of which the fastest one counts
MAX_TOKENS = 512  # a step of more of them counts as extended by the last slope
LOGITS_ROWS = 64  # rows of logits at a time, for which memory is left

logger = logging.getLogger("vllm.specplugins")


def numbers(limit: int) -> Iterator[int]:
    """Yields numbers of tokens from 1 to `limit`: powers of 2, `limit`, and then the numbers between powers.

    >>> list(numbers(20))
    [1, 2, 4, 8, 16, 20, 3, 6, 12]
    """
    powers = [1 << power for power in range(limit.bit_length())]
    yield from powers
    if limit not in powers:
        yield limit
    yield from (3 * power // 2 for power in powers[1:] if 3 * power // 2 < limit)


def measure(step: Callable[[int], Any], limit: int) -> dict[int, float]:
    """Returns the ms of a step by its number of tokens, up to `limit` of them."""
    began, ms = time.perf_counter(), dict[int, float]()
    for number in numbers(limit):
        if time.perf_counter() - began > SECONDS and len(ms) > 1:
            break
        step(number)  # the first one may compile
        ms[number] = min(_timed(step, number) for _ in range(REPEATS))
    seconds = time.perf_counter() - began
    logger.info(
        "Measured steps of 1 to %d tokens in %.1f s: %.1f to %.1f ms.", max(ms), seconds, ms[1], max(ms.values())
    )
    return ms


def _timed(step: Callable[[int], Any], number: int) -> float:
    began = time.perf_counter()
    step(number)
    return (time.perf_counter() - began) * 1000


def profile_of(runner: Any, max_num_tokens: int) -> dict[int, float]:
    """Returns the ms of a decoding step by number of tokens, without a context, drafting and sampling. It is empty if
    the gate must learn these times from steps: with several ranks, since one that fails would leave the others in a
    collective; with LoRA, since vLLM's dummy step makes adapters each time; and after an exception, such as one of
    memory."""
    parallel = runner.vllm_config.parallel_config
    if runner.lora_config is not None or parallel.world_size * parallel.data_parallel_size > 1:
        return {}
    device, rows = runner.device, max(LOGITS_ROWS, runner.max_num_reqs)

    def step(number: int) -> None:
        hidden_states = runner._dummy_run(number, skip_eplb=True, randomize_inputs=True)[0][:number]
        for at in range(0, number, rows):
            runner.model.compute_logits(hidden_states[at : at + rows])
        if device.type != "cpu":
            torch.accelerator.synchronize()

    limit = min(max_num_tokens, runner.max_num_tokens, MAX_TOKENS)
    no_drafter = {name: None for name in ("speculator", "drafter", "speculative_config") if hasattr(runner, name)}
    try:
        with fork_rng([] if device.type == "cpu" else [device]), torch.inference_mode(), replaced(runner, no_drafter):
            return measure(step, limit)
    except Exception as error:
        logger.warning("The start cannot measure steps (%s), so the gate learns their times later.", cause_text(error))
        if (connector := getattr(runner, "kv_connector", None)) is not None:
            connector.set_disabled(False)  # the dummy step that failed has disabled it
        return {}
