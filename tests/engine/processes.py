"""A program: engines in processes of their own, one behind the other, and a line of JSON about each.

    python processes.py '[PROMPTS, {NAME: ARGUMENTS OF LLM, ...}]'

Importing vLLM takes longer than all that they do. So an engine's process is forked from one that has imported it, and
is given its arguments pickled, as where vLLM spawns it; workers are forked from the engine's, as by vLLM on GPUs.
"""

import json
import multiprocessing
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

SPAWNS_AS = "forkserver" if multiprocessing.parent_process() is None else "fork"
get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context(SPAWNS_AS if method == "spawn" else method)
COUNTED = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


def outputs(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def steps_of_first_stage(worker: Any) -> int:
    number: int = worker._barrier.proposer._stages[0].step
    return number


def plant(worker: Any) -> None:
    """The second stage fails on rank 1."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("planted")

    if worker.rank == 1:
        for name in ("propose", "choose", "go_on"):
            setattr(worker._barrier.proposer._stages[1], name, fail)


def end_of_a_fault(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    steps = llm.collective_rpc(steps_of_first_stage)
    llm.collective_rpc(plant)
    start = time.perf_counter()
    try:
        outputs(llm, prompts)
        end = "lived"
    except Exception as error:
        end = type(error).__name__
    return {"steps": steps, "end": end, "seconds": time.perf_counter() - start}


def serve(prompts: list[list[int]], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(**arguments)
    try:
        found: dict[str, Any] = {"outputs": outputs(llm, prompts)}
        if arguments["speculative_config"]:
            found["stats"] = llm.collective_rpc("specplugins_stats")
            values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTED}
            found["drafted"], found["accepted"] = (values[name] for name in COUNTED)
        return found | (end_of_a_fault(llm, prompts) if name == "a fault" else {})
    finally:
        llm.llm_engine.engine_core.shutdown()


def main() -> None:
    from vllm.platforms.cpu import CpuPlatform

    multiprocessing.set_forkserver_preload(["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"])
    prompts, runs = json.loads(sys.argv[1])
    for name, arguments in runs.items():
        print("RESULT", json.dumps([name, serve(prompts, name, arguments)]), flush=True)
        CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)  # once is enough: see conftest.py


if __name__ == "__main__":
    main()
