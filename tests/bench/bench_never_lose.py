"""Does speculation ever lose? A gated cascade against no speculation on traffic that gives it nothing, in real engines.

    python examples/demo/widen.py examples/demo/model .cache/widened
    python tests/bench/bench_never_lose.py --model .cache/widened

Three workloads, at 1, 4, 16 and 32 requests at a time: random tokens at temperature 1, held-out code at temperature
1.5, and held-out code with outputs of 16 tokens at temperature 0; prompts of 64 tokens. A request that is done makes
room for the next. Both engines stay up and take turns. A round's ratio is of whole times, prompts included; printed are
medians and ranges over the rounds. The bar: at least 0.97.
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from vllm_specplugins.engine.measure.serving import ServingEngine, Traffic
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.rounds import serve_rounds
from vllm_specplugins.tools.bench.workloads import make_workload

METHOD = {
    "method": "cascade",
    "num_speculative_tokens": 5,
    "policy": "first",
    "stages": [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}],
}
BATCHES = (1, 4, 16, 32)
PROMPT_LENGTH = 64
# name -> kind of prompts, temperature, output tokens
WORKLOADS = {
    "random tokens, temperature 1": ("random", 1.0, 32),
    "code, temperature 1.5": ("mixed", 1.5, 32),
    "code, outputs of 16 tokens": ("mixed", 0.0, 16),
}


def prompts_of(kind: str, tokenizer: Any, count: int) -> list[list[int]]:
    """Ends of prompts, of PROMPT_LENGTH tokens; "mixed" is continuations and edits in turn."""
    names = ("code", "copy") if kind == "mixed" else (kind,)
    made = [make_workload(name, tokenizer, count, 256).take(count) for name in names]
    return [prompt[-PROMPT_LENGTH:] for prompts in zip(*made, strict=True) for prompt in prompts][:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="requests at a time")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--method", type=json.loads, default=METHOD, help="JSON: speculative_config")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    arguments = {
        "model": args.model, "dtype": args.dtype, "max_model_len": 256, "max_num_seqs": max(args.batches),
        "gpu_memory_utilization": 0.45,
    }  # fmt: skip
    logs = Path(tempfile.mkdtemp())

    table = Table(title=f"speed, of no speculation; {args.rounds} rounds, {args.dtype}")
    table.add_column("traffic")
    for batch in args.batches:
        table.add_column(f"{batch} at a time", justify="right")
    progress = tqdm(total=len(args.workloads) * len(args.batches) * (1 + args.rounds), desc="rounds")
    worst = float("inf")
    with ExitStack() as stack:
        engines = {}
        for name, config in (("none", None), ("method", args.method)):
            engines[name] = stack.enter_context(ServingEngine(name, arguments, config, logs / f"{name}.log"))
            engines[name].wait()
        for name in args.workloads:
            kind, temperature, num_tokens = WORKLOADS[name]
            cells = []
            for batch in args.batches:
                traffic = Traffic(
                    prompts=prompts_of(kind, tokenizer, 2 * batch if batch > 1 else 4), temperature=temperature,
                    max_tokens=num_tokens, at_a_time=batch, ignore_eos=True,
                )  # fmt: skip
                turns = serve_rounds(engines, traffic, args.rounds, progress.update)
                pairs = list(zip(turns["none"], turns["method"], strict=True))[1:]  # the first round warms up
                ratios = [plain.seconds / own.seconds for plain, own in pairs]
                worst = min(worst, statistics.median(ratios))
                cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
                progress.write(f"{name}, {batch} at a time: {cells[-1]}")
            table.add_row(name, *cells)
    progress.close()
    Console(width=110).print(table)
    print(f"worst median {worst:.2f}; {json.dumps(args.method)}")
    print(f"vllm {version('vllm')}, torch {version('torch')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
