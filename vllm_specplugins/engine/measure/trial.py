"""A configuration tried in an engine of its own, on the model runner that is named; for `check --engine`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.measure.process import EngineProcess
from vllm_specplugins.engine.measure.samples import SETTINGS

NO_TRITON = 0  # sent in place of a trial


@dataclass(frozen=True, slots=True)
class Trial:
    """What an engine made of some prompts at temperature 0, and its worker's counts.

    Args:
        token_ids: of each output.
        stats: of `specplugins_stats`; empty without speculation.
    """

    token_ids: list[list[int]]
    stats: dict[str, Any]


def tried(
    model: Path, config: Mapping[str, Any] | None, runner: str, prompts: Sequence[list[int]], num_tokens: int, log: Path
) -> Trial:
    """Serves all prompts at once.

    Raises:
        ConfigError: the engine failed, or this machine has no such runner.
    """
    process = EngineProcess(log, "check: PROPOSER failed in an engine", _serve, model, config, runner)
    process.start()
    try:
        process.send((prompts, num_tokens))
        trial = process.receive()
    finally:
        process.stop()
    if trial == NO_TRITON:
        raise ConfigError("check: --engine must be v1 here, not v2: Triton has no backend for this device.")
    found: Trial = trial
    return found


def _serve(pipe: Connection, model: Path, config: Mapping[str, Any] | None, runner: str) -> None:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    from vllm import LLM, SamplingParams
    from vllm.triton_utils import HAS_TRITON

    if runner == "v2" and not HAS_TRITON:
        pipe.send(NO_TRITON)
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    llm = LLM(model=str(model), speculative_config=config and dict(config), **SETTINGS)
    prompts, num_tokens = pipe.recv()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    stats = llm.collective_rpc("specplugins_stats")[0] if config else {}
    pipe.send(Trial([list(result.outputs[0].token_ids) for result in results], stats))
