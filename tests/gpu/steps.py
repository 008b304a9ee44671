"""Decoding steps of one engine: the time of the engine's thread (host) beside wall time, by number of requests.

    python tests/gpu/steps.py CONFIG --model MODEL --plain FILE --requests 1 8 32 64 --workloads copy random

CONFIG: a --speculative-config, or `null`, which is run first: FILE keeps its speed. The engine lives in this process
and has it for itself. A step counts if all requests decoded in it and none began or ended. Prints a row of a table:
speed-up over no speculation; tokens a step; ms a step of the engine's thread, and by the wall clock.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.workloads import make_workload

WARM_UP = 4  # steps after the last request's first token that say nothing; of each cell a whole round does


@dataclass(slots=True)
class Steps:
    """What the engine's thread did, by call of its step function, in ms."""

    host_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)

    def timing(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """The engine's own step function, timed."""

        def timed() -> Any:
            wall, host = time.perf_counter(), time.thread_time()
            result = step()
            self.host_ms.append((time.thread_time() - host) * 1000)
            self.wall_ms.append((time.perf_counter() - wall) * 1000)
            return result

        return timed


def emitted(llm: Any, prompts: list[list[int]], num_tokens: int, round_name: str) -> Iterator[list[int]]:
    """Tokens of each request that a call of the step function brought, call by call."""
    from vllm import SamplingParams

    engine, lengths = llm.llm_engine, dict.fromkeys(range(len(prompts)), 0)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{round_name}-{number}", {"type": "token", "prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        new = [0] * len(prompts)
        for output in engine.step():
            number = int(output.request_id.rsplit("-", 1)[1])
            length = len(output.outputs[0].token_ids)
            new[number], lengths[number] = length - lengths[number], length
        yield new


def measured(llm: Any, steps: Steps, prompts: list[list[int]], num_tokens: int, round_name: str) -> dict[str, float]:
    """Medians over the steps in which all requests decoded, and the host's minimum."""
    first = len(steps.wall_ms)
    calls = list(emitted(llm, prompts, num_tokens, round_name))
    totals, begin, end = [0] * len(prompts), 0, len(calls)
    for index, new in enumerate(calls):
        before, totals = totals, [total + more for total, more in zip(totals, new, strict=True)]
        if min(before) == 0:
            begin = index + 1
        if max(totals) >= num_tokens:
            end = index
            break
    begin = min(begin + WARM_UP, max(begin, end - 1))
    host, wall = (times[first:][begin:end] for times in (steps.host_ms, steps.wall_ms))
    tokens = sum(map(sum, calls[begin:end]))
    if not wall:
        return {}
    return {
        "steps": len(wall),
        "host_ms": statistics.median(host),
        "host_min_ms": min(host),
        "wall_ms": statistics.median(wall),
        "tokens_a_step": tokens / len(prompts) / len(wall),
        "tokens_per_s": 1000 * tokens / sum(wall),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=json.loads)
    parser.add_argument("--model", required=True)
    parser.add_argument("--plain", type=Path, required=True, help="speed of no speculation")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--workloads", nargs="+", default=["copy", "random"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--engine-args", type=json.loads, default={})
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM

    options = {"max_model_len": 1024, "max_num_seqs": max(args.requests), "enable_prefix_caching": False}
    llm = LLM(args.model, speculative_config=args.config, **{**options, **args.engine_args})
    core, steps = llm.llm_engine.engine_core.engine_core, Steps()
    core.step_fn = steps.timing(core.step_fn)
    tokenizer, found = load_tokenizer(args.model), dict[str, dict[str, float]]()
    for workload in args.workloads:
        for num_reqs in args.requests:
            num_prompts = num_reqs * (1 + args.rounds)  # each round its own: the first one warms up
            prompts = make_workload(workload, tokenizer, num_prompts, 256).take(num_prompts)
            rounds = [
                measured(llm, steps, prompts[begin : begin + num_reqs], args.tokens, f"{workload}-{num_reqs}-{begin}")
                for begin in range(0, num_prompts, num_reqs)
            ]
            if kept := [its for its in rounds[1:] if its]:
                found[f"{workload}, {num_reqs}"] = {
                    name: statistics.median(its[name] for its in kept) for name in kept[0]
                }
    if args.config is None:
        args.plain.write_text(json.dumps(found))
        print("| |", " | ".join(found), "|\n|---" + "|---" * len(found) + "|")
    plain = json.loads(args.plain.read_text())
    cells = (
        f"{its['tokens_per_s'] / own['tokens_per_s']:.2f}x; {its['tokens_a_step']:.2f}; {its['host_ms']:.2f}, "
        f"{its['wall_ms']:.2f}"
        if (its := found.get(key))
        else "-"
        for key, own in plain.items()
    )
    print(f"| `{json.dumps(args.config)}` |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
