"""A program: engines in processes of their own, one behind the other, and a line of JSON about each.

    python processes.py '[PROMPTS, {NAME: ARGUMENTS OF LLM, ...}]'

Arguments of ours beside vLLM's: "adapters", folders that requests run in turn, after one without; "samples": also say
what seeded requests get at temperature 0.9; "switched": also say what requests get while drafting is switched off and
on; "ends": what becomes of a planted fault, a name in ENDS.

Importing vLLM takes longer than all that they do. So an engine's process is forked from one that has imported it, and
is given its arguments pickled, as where vLLM spawns it; workers are forked from the engine's, as by vLLM on GPUs.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import time
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.lora.request import LoRARequest

SPAWNS_AS = "forkserver" if __name__ == "__main__" else "fork"  # an engine imports this file, too
get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context(SPAWNS_AS if method == "spawn" else method)
COUNTED = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


def all_gatherv(own: CpuCommunicator, inputs: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """What vLLM 0.32 has on GPUs alone, for engines that share experts."""
    if isinstance(inputs, list):
        return [all_gatherv(own, each, dim, sizes) for each in inputs]
    sizes = sizes or [len(inputs)] * own.world_size
    padded = inputs.new_zeros(max(sizes), *inputs.shape[1:])
    padded[: len(inputs)] = inputs
    parts = own.all_gather(padded, dim=0).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(own: CpuCommunicator, whole: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> Any:
    torch.distributed.all_reduce(whole, group=own.device_group)
    return whole.split(sizes or len(whole) // own.world_size)[own.rank_in_group]


CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def params(index: int, temperature: float) -> SamplingParams:
    seed = index if temperature else None
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=21, ignore_eos=True, detokenize=False)


def outputs(llm: LLM, prompts: list[list[int]], adapters: list[str], temperature: float = 0.0) -> list[list[int]]:
    loras = [None, *(LoRARequest(path, number, path) for number, path in enumerate(adapters, 1))]
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [params(index, temperature) for index in range(len(prompts))],
        use_tqdm=False,
        lora_request=[loras[index % len(loras)] for index in range(len(prompts))] if adapters else None,
    )
    return [list(result.outputs[0].token_ids) for result in results]


def steps_of_first_stage(worker: Any) -> int:
    number: int = worker._session.barrier.proposer.stages[0].proposer.step
    return number


def fail_on_rank_1(worker: Any) -> None:
    """The second stage does."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("planted")

    if worker.rank == 1:
        for name in ("propose", "next_tokens", "draft_steps", "continue_steps"):
            setattr(worker._session.barrier.proposer.stages[1].proposer, name, fail)


def die_on_rank_1(worker: Any) -> None:
    """In the middle of a step, as by a signal."""
    if worker.rank == 1:
        worker.model_runner.sample_tokens = lambda *args: os._exit(1)
        worker.model_runner._sample = lambda *args: os._exit(1)


ENDS = {"fails": fail_on_rank_1, "dies": die_on_rank_1}


def end_of(llm: LLM, prompts: list[list[int]], fault: str) -> dict[str, Any]:
    """What a fault on rank 1 is answered with, and when."""
    steps = llm.collective_rpc(steps_of_first_stage) if fault == "fails" else []
    llm.collective_rpc(ENDS[fault])
    start = time.perf_counter()
    try:
        outputs(llm, prompts, [])
        end = "lived"
    except Exception as error:
        end = type(error).__name__
    return {"steps": steps, "end": end, "seconds": time.perf_counter() - start}


def thrown(llm: LLM, prompts: list[list[int]], throws: int = 10) -> dict[str, Any]:
    """Answers by prompt while drafting is switched off and on, which are asked for again and again; how many were asked
    for; draft tokens that were verified while drafting was off, and on, but for steps that may have begun before."""
    engine, num_asked, answers = llm.llm_engine, 0, [list[list[int]]() for _ in prompts]
    counts, is_on = {False: 0, True: 0}, True

    def ask(index: int) -> None:
        nonlocal num_asked
        num_asked += 1
        engine.add_request(f"{num_asked}:{index}:", {"prompt_token_ids": prompts[index]}, params(index, 0.0))

    def step(asks: bool = True) -> None:
        for output in engine.step():
            if output.finished:
                index = int(output.request_id.split(":")[1])
                answers[index].append(list(output.outputs[0].token_ids))
                if asks:
                    ask(index)

    def drafted_after(num_steps: int) -> int:
        """Verified draft tokens once all requests have taken so many steps."""
        last = None
        while True:
            [stats, *_] = llm.collective_rpc("specplugins_stats")
            last = stats["request_steps"] if last is None else last
            if stats["request_steps"] >= last + num_steps * len(prompts):
                return int(stats["drafted_tokens"])
            step()

    for index in range(len(prompts)):
        ask(index)
    for _ in range(throws):
        is_on = not is_on
        states = llm.collective_rpc("specplugins_gate", args=("auto" if is_on else "none",))
        assert len(states) == 2 and len(set(states)) == 1
        counts[is_on] -= drafted_after(4)
        counts[is_on] += drafted_after(2)
    while engine.has_unfinished_requests():
        step(asks=False)
    return {"answers": answers, "num_asked": num_asked, "off": counts[False], "on": counts[True]}


def serve(
    prompts: list[list[int]],
    arguments: dict[str, Any],
    adapters: list[str],
    samples: bool,
    switched: bool,
    ends: str | None,
) -> dict[str, Any]:
    """Of one engine."""
    llm = LLM(**arguments)
    try:
        found: dict[str, Any] = {"outputs": outputs(llm, prompts, adapters)}
        if arguments["speculative_config"]:
            found["stats"] = llm.collective_rpc("specplugins_stats")
            values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTED}
            found["drafted"], found["accepted"] = (values[name] for name in COUNTED)
        if samples:
            found["sampled"] = outputs(llm, prompts, adapters, temperature=0.9)
        if switched:
            found["thrown"] = thrown(llm, prompts)
        return found | (end_of(llm, prompts, ends) if ends else {})
    finally:
        if not ends:  # or else it has shut itself down
            llm.llm_engine.engine_core.shutdown()


async def serve_by_several(prompts: list[list[int]], arguments: dict[str, Any]) -> dict[str, Any]:
    """By engines that share the requests; LLM refuses more than one, and each request says which one it wants."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def ask(index: int, prompt: list[int]) -> list[int]:
        rank, inputs = index % arguments["data_parallel_size"], {"prompt_token_ids": prompt}
        said = llm.generate(inputs, params(index, 0.0), str(index), data_parallel_rank=rank)
        return [list(output.outputs[0].token_ids) async for output in said][-1]

    try:
        found: dict[str, Any] = {"outputs": await asyncio.gather(*(ask(*each) for each in enumerate(prompts)))}
        if arguments["speculative_config"]:
            found["stats"] = await llm.collective_rpc("specplugins_stats")  # vLLM answers with the first engine's
        return found
    finally:
        llm.shutdown()


def tell(prompts: list[list[int]], runs: dict[str, dict[str, Any]]) -> None:
    """Prints what became of each run."""
    from vllm.platforms.cpu import CpuPlatform

    for name, arguments in runs.items():
        own = {"adapters": [], "samples": False, "switched": False, "ends": None}
        own |= {key: arguments.pop(key) for key in own.keys() & arguments.keys()}
        try:
            if arguments.get("data_parallel_size", 1) > 1:
                found = asyncio.run(serve_by_several(prompts, arguments))
            else:
                found = serve(prompts, arguments, **own)
        except Exception as error:  # the other runs go on
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        print("RESULT", json.dumps([name, found]), flush=True)
        CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)  # once is enough: see conftest.py


def main() -> None:
    multiprocessing.set_forkserver_preload(["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"])
    tell(*json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
