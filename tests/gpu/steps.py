"""Decoding steps of one engine: the time of the engine's thread (host) beside wall time, in cells of requests.

    python tests/gpu/steps.py CONFIG --model MODEL --plain FILE --cells copy,8 copy,64,churn random,8,T=0.7 copy,8,8k

CONFIG: a --speculative-config, or `null`, which is run first: FILE keeps its speed, cell by cell. The engine lives in
this process and has it for itself. A cell: a workload, how many requests decode at once, and what else: `churn`, where
a new request comes whenever one ends; a temperature; 8k tokens of context. A step counts if all requests decoded in it,
under churn if as many as can. Prints a line for each cell: speed-up over no speculation; tokens a step; ms a step of
the engine's thread, and by the wall clock; ms between the outputs of a request, median and 99th percentile.
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

from arm import QUIET, Findings, describe

from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.workloads import make_workload

WARM_UP = 4  # steps after the last request's first token that say nothing; of each cell a whole round does
SHORT, LONG = 256, 7680  # tokens of a prompt
CHURNED = 3  # requests in all under churn, for each that decodes at once
CELLS = (
    "copy,1 copy,8 copy,32 copy,64 copy,8,T=0.7 copy,64,T=0.7,churn copy,8,8k "
    "random,1 random,8 random,32 random,64 random,64,churn"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is asked of an engine at once."""

    name: str
    workload: str
    num_reqs: int
    temperature: float = 0.0
    is_long: bool = False
    churns: bool = False

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """As the module says.

        >>> Cell.parse("copy,8,T=0.7,churn")
        Cell(name='copy,8,T=0.7,churn', workload='copy', num_reqs=8, temperature=0.7, is_long=False, churns=True)
        """
        workload, num_reqs, *rest = text.split(",")
        heat = next((float(own[2:]) for own in rest if own.startswith("T=")), 0.0)
        return cls(text, workload, int(num_reqs), heat, "8k" in rest, "churn" in rest)

    def rounds(self, tokenizer: Any, num_rounds: int) -> list[list[list[int]]]:
        """Prompts of each round, all its own; a long one is made of several."""
        count = self.num_reqs * (CHURNED if self.churns else 1)
        if not self.is_long:
            workload = make_workload(self.workload, tokenizer, count * num_rounds, SHORT)
            return [workload.take(count, count * index) for index in range(num_rounds)]
        short = make_workload(self.workload, tokenizer, 64, SHORT).prompts
        flat = [token for prompt in short for token in prompt]
        flat *= 1 + (LONG + 100 * count * num_rounds) // len(flat)
        starts = [[100 * (count * turn + index) for index in range(count)] for turn in range(num_rounds)]
        return [[flat[start : start + LONG] for start in own] for own in starts]


@dataclass(slots=True)
class Steps:
    """The times of an engine's step function, by call, in ms."""

    host_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)

    def timing(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """The engine's step function, timed."""

        def timed() -> Any:
            wall, host = time.perf_counter(), time.thread_time()
            result = step()
            self.host_ms.append((time.thread_time() - host) * 1000)
            self.wall_ms.append((time.perf_counter() - wall) * 1000)
            return result

        return timed


def emitted(llm: Any, cell: Cell, prompts: list[list[int]], num_tokens: int, name: str) -> Iterator[dict[int, int]]:
    """Tokens that a call of the step function brought, by request; under churn outputs have mixed lengths, and the next
    request comes when one has ended."""
    from vllm import SamplingParams

    engine, lengths, waiting = llm.llm_engine, dict[int, int](), list(enumerate(prompts))

    def add() -> None:
        number, prompt = waiting.pop(0)
        most = num_tokens // (1 + number % 3) if cell.churns else num_tokens
        params = SamplingParams(
            temperature=cell.temperature, seed=number, max_tokens=most, ignore_eos=True, detokenize=False
        )
        engine.add_request(f"{name}-{number}", {"type": "token", "prompt_token_ids": prompt}, params)

    for _ in range(cell.num_reqs):
        add()
    while engine.has_unfinished_requests():
        new = {}
        for output in engine.step():
            number = int(output.request_id.rsplit("-", 1)[1])
            length = len(output.outputs[0].token_ids)
            new[number], lengths[number] = length - lengths.get(number, 0), length
            if output.finished and waiting:
                add()
        yield new


def window(calls: list[dict[int, int]], cell: Cell) -> tuple[int, int]:
    """The first and the last call that count: from when as many decode as can, to when one ends that none follows."""
    seen, last = set[int](), {number: index for index, new in enumerate(calls) for number in new}
    begin = next((i + 1 for i, new in enumerate(calls) if len(seen := seen | new.keys()) >= cell.num_reqs), len(calls))
    end = sorted(last.values())[-cell.num_reqs] if last else 0
    return min(begin + WARM_UP, max(begin, end - 1)), end


def measured(
    llm: Any, steps: Steps, cell: Cell, prompts: list[list[int]], num_tokens: int, name: str
) -> dict[str, float]:
    """Medians over the steps of the window, and the host's minimum."""
    first = len(steps.wall_ms)
    calls = list(emitted(llm, cell, prompts, num_tokens, name))
    begin, end = window(calls, cell)
    host, wall = (times[first:][begin:end] for times in (steps.host_ms, steps.wall_ms))
    if not wall:
        return {}
    tokens, gaps, since = sum(sum(new.values()) for new in calls[begin:end]), list[float](), dict[int, float]()
    for new, took in zip(calls[begin:end], wall, strict=True):
        since = {number: waited + took for number, waited in since.items()}
        gaps += [since[number] for number, count in new.items() if count and number in since]
        since |= {number: 0.0 for number, count in new.items() if count}
    gaps.sort()
    return {
        "steps": len(wall),
        "host_ms": statistics.median(host),
        "host_min_ms": min(host),
        "wall_ms": statistics.median(wall),
        "tokens_a_step": tokens / cell.num_reqs / len(wall),
        "tokens_per_s": 1000 * tokens / sum(wall),
        "gap_ms": statistics.median(gaps) if gaps else 0.0,
        "gap_p99_ms": gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)] if gaps else 0.0,
    }


def line(its: dict[str, float], plain: dict[str, float] | None) -> str:
    """A cell's, as the module says."""
    speed = f"{its['tokens_per_s'] / plain['tokens_per_s']:.2f}x" if plain else f"{its['tokens_per_s']:.0f} tokens/s"
    return (
        f"{speed}; {its['tokens_a_step']:.2f} tokens a step; {its['host_ms']:.2f}, {its['wall_ms']:.2f} ms; "
        f"between outputs {its['gap_ms']:.2f}, {its['gap_p99_ms']:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=json.loads)
    parser.add_argument("--model", required=True)
    parser.add_argument("--plain", type=Path, required=True, help="speed of no speculation")
    parser.add_argument("--cells", type=Cell.parse, nargs="+", default=[Cell.parse(text) for text in CELLS.split()])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--engine-args", type=json.loads, default={})
    args = parser.parse_args()
    os.environ |= QUIET
    from vllm import LLM

    findings = Findings()
    longest = LONG + args.tokens if any(cell.is_long for cell in args.cells) else 1024
    options: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": max(cell.num_reqs for cell in args.cells)}
    options |= {"enable_prefix_caching": False, "disable_log_stats": False}
    llm = LLM(args.model, speculative_config=args.config, **{**options, **args.engine_args})
    core, steps = llm.llm_engine.engine_core.engine_core, Steps()
    core.step_fn = steps.timing(core.step_fn)
    tokenizer, found = load_tokenizer(args.model), dict[str, dict[str, float]]()
    plain = json.loads(args.plain.read_text()) if args.plain.exists() and args.config is not None else {}
    print(f"`{json.dumps(args.config)}`", flush=True)
    for cell in args.cells:
        rounds = [
            measured(llm, steps, cell, prompts, args.tokens, f"{cell.name}-{index}")
            for index, prompts in enumerate(cell.rounds(tokenizer, 1 + args.rounds))  # the first one warms up
        ]
        if its := [own for own in rounds[1:] if own]:
            found[cell.name] = {name: statistics.median(own[name] for own in its) for name in its[0]}
            print(f"* {cell.name}: {line(found[cell.name], plain.get(cell.name))}", flush=True)
        if args.config is None:
            args.plain.write_text(json.dumps(found))
    print("\n".join(f"* {text}" for text in describe(llm, findings)), flush=True)


if __name__ == "__main__":
    main()
