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
import multiprocessing
import platform
import statistics
import sys
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_engine import prompts_of, serve
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoTokenizer

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


def start(config: dict[str, Any] | None, args: argparse.Namespace) -> Connection:
    """An engine in a process of its own; see bench_engine.serve."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=serve, args=(theirs, config, args), daemon=True).start()
    if ours.recv() != "ready":
        raise SystemExit("an engine did not start")
    return ours


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--method", type=json.loads, default=METHOD, help="JSON: speculative_config")
    args = parser.parse_args()
    args.batch, args.compile = max(BATCHES), False
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    pipes = [start(config, args) for config in tqdm((None, args.method), desc="engines")]

    def seconds(pipe: Connection, prompts: list[list[int]], temperature: float, num_tokens: int, batch: int) -> float:
        pipe.send((prompts, temperature, num_tokens, batch))
        took: float = pipe.recv()[0]
        return took

    table = Table(title=f"speed, of no speculation; {args.rounds} rounds, {args.dtype}")
    table.add_column("traffic")
    for batch in BATCHES:
        table.add_column(f"{batch} at a time", justify="right")
    progress = tqdm(total=len(WORKLOADS) * len(BATCHES) * args.rounds, desc="rounds")
    worst = float("inf")
    for name, (kind, temperature, num_tokens) in WORKLOADS.items():
        cells = []
        for batch in BATCHES:
            count = 2 * batch if batch > 1 else 4
            texts = prompts_of(kind, min(count, 60), vocab_size, PROMPT_LENGTH)
            encoded = [text if isinstance(text, list) else tokenizer.encode(text) for text in texts]
            prompts = [encoded[index % len(encoded)][-PROMPT_LENGTH:] for index in range(count)]
            ratios = []
            for index in range(args.rounds):
                order = pipes if index % 2 else pipes[::-1]  # who goes first may matter
                took = {id(pipe): seconds(pipe, prompts, temperature, num_tokens, batch) for pipe in order}
                ratios.append(took[id(pipes[0])] / took[id(pipes[1])])
                progress.update()
            ratio = statistics.median(ratios)
            worst = min(worst, ratio)
            cells.append(f"{ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
            progress.write(f"{name}, {batch} at a time: {cells[-1]}")
        table.add_row(name, *cells)
    progress.close()
    Console(width=110).print(table)
    print(f"worst median {worst:.2f}; {json.dumps(args.method)}")
    print(f"vllm {version('vllm')}, torch {version('torch')}, {platform.machine()}")
    for pipe in pipes:
        pipe.send(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
