"""Does speculation ever lose? A gated cascade against no speculation on traffic that gives it little, in real engines.

    python examples/demo/widen.py examples/demo/model .cache/widened
    python tests/bench/bench_never_lose.py --model .cache/widened

A mixture of experts is made by examples/demo/experts.py; --context puts so many tokens of the same kind in front of all
prompts, which are computed once.

Three workloads, at 1, 4, 16 and 32 requests at a time: random tokens at temperature 1, held-out code at temperature
1.5, and held-out code with outputs of 16 tokens at temperature 0; prompts of 64 tokens. A request that is done makes
room for the next. Both engines stay up and take turns. A round's ratio is of whole times, prompts included; printed are
medians and ranges over the rounds, by wall clock and by CPU time. The bar: at least 0.98, for a mixture of experts
0.95.
"""

import argparse
import json
import statistics
import sys
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from vllm_specplugins.engine.harness.process import EngineProcess
from vllm_specplugins.engine.harness.serving import Traffic, serve_rounds
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.command import engines_up
from vllm_specplugins.tools.bench.workloads import make_workload

METHOD = {
    "method": "cascade",
    "num_speculative_tokens": 5,
    "stages": [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}],
}
BATCHES = (1, 4, 16, 32)
PROMPT_LENGTH = 64
BLOCK_SIZE = 128  # of the KV cache, in tokens
# name -> kind of prompts, temperature, output tokens
WORKLOADS = {
    "random tokens, temperature 1": ("random", 1.0, 32),
    "code, temperature 1.5": ("mixed", 1.5, 32),
    "code, outputs of 16 tokens": ("mixed", 0.0, 16),
}
Cell = dict[str, list[float]]  # clock -> the ratio of each round


def prompts_of(kind: str, tokenizer: Any, count: int, num_context: int) -> list[list[int]]:
    """Ends of prompts, of PROMPT_LENGTH tokens, behind a context that they share; "mixed" is continuations and edits in
    turn."""
    names = ("code", "copy") if kind == "mixed" else (kind,)
    made = [make_workload(name, tokenizer, count, 256).take(count) for name in names]
    prompts = [prompt[-PROMPT_LENGTH:] for prompts in zip(*made, strict=True) for prompt in prompts][:count]
    others = make_workload(names[0], tokenizer, count + num_context // 256 + 1, 256).prompts[count:]
    text = [token for other in others for token in other]
    return [text[:num_context] + prompt for prompt in prompts]


def measured(engines: dict[str, EngineProcess], traffic: Traffic, num_rounds: int) -> Cell:
    progress = tqdm(total=1 + num_rounds, desc="rounds", leave=False)
    turns = serve_rounds(engines, [traffic] * (1 + num_rounds), progress.update)
    progress.close()
    pairs = list(zip(turns["none"], turns["method"], strict=True))[1:]  # the first round warms up
    return {
        "wall": [plain.seconds / own.seconds for plain, own in pairs],
        "cpu": [plain.cpu_seconds / own.cpu_seconds for plain, own in pairs],
        "seconds": [plain.seconds for plain, _ in pairs],
        "drafted": [own.num_draft_tokens for _, own in pairs],
        "accepted": [own.num_accepted_tokens for _, own in pairs],
    }


def shown(cell: Cell) -> str:
    """Wall clock, with its range, and CPU time."""
    wall, cpu = cell["wall"], cell["cpu"]
    return f"{statistics.median(wall):.2f} ({min(wall):.2f}-{max(wall):.2f}), {statistics.median(cpu):.2f}"


def arguments_of(args: argparse.Namespace) -> dict[str, Any]:
    """Of both engines."""
    return {
        "model": args.model, "dtype": args.dtype, "max_model_len": args.context + 192,
        "max_num_seqs": max(args.batches), "gpu_memory_utilization": 0.45, "block_size": BLOCK_SIZE,
        "enable_prefix_caching": args.context > 0,
        "num_gpu_blocks_override": args.context // BLOCK_SIZE + 4 * max(args.batches),  # no more than is used
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="requests at a time")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--prompts", type=int, default=8, help="at least; twice as many as are served at a time")
    parser.add_argument("--context", type=int, default=0, help="tokens in front of all prompts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--method", type=json.loads, default=METHOD, help="JSON: speculative_config")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    table = Table(title=f"speed, of no speculation: wall clock, CPU time; {args.rounds} rounds, {args.dtype}")
    table.add_column("traffic")
    for batch in args.batches:
        table.add_column(f"{batch} at a time", justify="right")
    cells = []
    with engines_up({"none": None, "method": args.method}, arguments_of(args), print) as (engines, _):
        for name in args.workloads:
            kind, temperature, num_tokens = WORKLOADS[name]
            row = []
            for batch in args.batches:
                prompts = prompts_of(kind, tokenizer, max(args.prompts, 2 * batch), args.context)
                traffic = Traffic(
                    prompts=prompts, temperature=temperature, max_tokens=num_tokens, at_a_time=batch, ignore_eos=True
                )
                row.append(measured(engines, traffic, args.rounds))
                print(f"{name}, {batch} at a time: {shown(row[-1])}", flush=True)
            table.add_row(name, *map(shown, row))
            cells += row
    Console(width=140).print(table)
    worst = [min(statistics.median(cell[clock]) for cell in cells) for clock in ("wall", "cpu")]
    print(f"worst median {worst[0]:.3f}, CPU {worst[1]:.3f}; {json.dumps(args.method)}; context {args.context}")
    print(f"vllm {version('vllm')}, torch {version('torch')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
