"""Speed of methods in real engines: all engines stay up and take turns, so that a noisy machine is noisy for all.

    python examples/demo/widen.py examples/demo/model .cache/widened
    python tests/bench/bench_engine.py --model .cache/widened [--kind edit|continue|mixed|random] [--batch 1]

First every engine answers once, unmeasured; in float32 at temperature 0 all must give the same tokens, or nothing is
reported. Prints tokens/s and, for each round, the ratio to no speculation, prompts included and for decoding alone:
medians and ranges over the rounds.
Scheduling modes are compared with --arms, for example
    --arms '{"none":null, "sync":{"method":"prompt_lookup"}, "async":{"method":"prompt_lookup","async":true}}'
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))
from prompts import load_prompts

K = 5
ARMS = {
    "none": None,
    "vLLM ngram": {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 8, "prompt_lookup_min": 2},
    "prompt_lookup": {"method": "prompt_lookup", "num_speculative_tokens": K, "max_ngram": 8, "min_ngram": 2},
}
METRICS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
LATENCY = "vllm:inter_token_latency_seconds"  # its sum is the time that decoding took


def serve(pipe: Connection, config: dict[str, Any] | None, args: argparse.Namespace) -> None:
    """An engine's process: answers (prompts, temperature, output tokens, how many requests at a time) with
    (seconds, token ids, metrics)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    config = dict(config) if config else None
    asynchronous = {"async_scheduling": config.pop("async")} if config and "async" in config else {}
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=max(args.batch, 1),
        enforce_eager=not args.compile,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=config,
        **asynchronous,
    )
    tokenizer = llm.get_tokenizer()
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        prompts, temperature, num_tokens, at_a_time = work
        ids = [prompt if isinstance(prompt, list) else tokenizer.encode(prompt) for prompt in prompts]
        # Without a seed: on CPUs vLLM 0.32 dies of a seeded request whose prompt is computed in pieces.
        params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        before = metrics(llm)
        start = time.perf_counter()
        outputs = answers(llm.llm_engine, ids, params, at_a_time)
        seconds = time.perf_counter() - start
        after = metrics(llm)
        pipe.send((seconds, outputs, {name: after[name] - before[name] for name in after}))


def answers(engine: Any, prompts: list[list[int]], params: Any, at_a_time: int) -> list[list[int]]:
    """Output token ids of each prompt; a request that is done makes room for the next one, as in a server."""
    outputs: dict[str, list[int]] = {}
    waiting = list(enumerate(prompts))[::-1]
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < at_a_time:
            index, prompt = waiting.pop()
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        for result in engine.step():
            if result.finished:
                outputs[result.request_id] = list(result.outputs[0].token_ids)
    return [outputs[str(index)] for index in range(len(prompts))]


def metrics(llm: Any) -> dict[str, float]:
    found = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    counts = {name: found[name].value if name in found else 0 for name in METRICS}
    return {**counts, LATENCY: found[LATENCY].sum}


def prompts_of(kind: str, count: int, vocab_size: int, num_random: int = 256) -> list[Any]:
    if kind == "random":
        rng = random.Random(0)
        return [rng.sample(range(10, vocab_size), num_random) for _ in range(count)]
    if kind == "mixed":
        pairs = zip(load_prompts("continue", (count + 1) // 2), load_prompts("edit", (count + 1) // 2), strict=True)
        return [prompt for pair in pairs for prompt in pair][:count]
    return load_prompts(kind, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", choices=["edit", "continue", "mixed", "random"], default="edit")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--prompts", type=int, default=6, help="requests in one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of a request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true", help="without enforce_eager")
    parser.add_argument("--arms", type=json.loads, default=ARMS, help="JSON: name to speculative_config or null")
    args = parser.parse_args()
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    prompts = prompts_of(args.kind, max(args.prompts, args.batch), vocab_size)

    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, config in tqdm(args.arms.items(), desc="engines"):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, config, args), daemon=True).start()
        pipes[name] = ours
        if ours.recv() != "ready":
            return 1

    def round_of(name: str) -> tuple[float, list[list[int]], dict[str, float]]:
        pipes[name].send((prompts, args.temperature, args.tokens, args.batch))
        answer: tuple[float, list[list[int]], dict[str, float]] = pipes[name].recv()
        return answer

    first = {name: round_of(name) for name in pipes}
    expected = next(iter(first.values()))[1]
    identical = {name: outputs == expected for name, (_, outputs, _) in first.items()}
    if args.temperature == 0 and args.dtype == "float32" and not all(identical.values()):
        print(f"outputs differ, nothing is reported: {identical}")
        return 1
    rounds: dict[str, list[Any]] = {name: [] for name in pipes}
    for name in tqdm(list(pipes) * args.rounds, desc="rounds"):
        rounds[name].append(round_of(name))

    num_tokens = sum(len(tokens) for tokens in expected)
    table = Table(title=f"{args.kind}, {args.batch} at a time, temperature {args.temperature:g}, {args.dtype}")
    for column in (
        "method",
        "tokens/s",
        "ratio (range)",
        "decoding only",
        "tokens/step",
        "steps drafted",
        "verified/token",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    base = rounds[next(iter(rounds))]
    for name, results in rounds.items():
        ratios = sorted(plain[0] / result[0] for plain, result in zip(base, results, strict=True))
        decoding = sorted(plain[2][LATENCY] / result[2][LATENCY] for plain, result in zip(base, results, strict=True))
        counts = results[-1][2]
        steps = num_tokens - counts["num_accepted_tokens"]
        table.add_row(
            name,
            f"{num_tokens / statistics.median(seconds for seconds, *_ in results):.1f}",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
            f"{statistics.median(decoding):.2f} ({decoding[0]:.2f}-{decoding[-1]:.2f})",
            f"{num_tokens / steps:.2f}",
            f"{counts['num_drafts'] / steps:.0%}",
            f"{(steps + counts['num_draft_tokens']) / num_tokens:.2f}",
        )
    Console(width=110).print(table)
    versions = ", ".join(f"{name} {version(name)}" for name in ("vllm-specplugins", "torch"))
    print(f"{args.rounds} interleaved rounds of {len(prompts)} requests; {versions}; {platform.machine()}, "
          f"{os.cpu_count()} cores; identical outputs: {all(identical.values())}")  # fmt: skip
    for pipe in pipes.values():
        pipe.send(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
