"""Which trained part drafts fastest? Parts of one model side by side, and what needs no training beside them.

    python examples/demo/train.py --plain --minutes 40 --out .cache/plain/target --state .cache/plain/plain.pt
    python -m vllm_specplugins train-jump .cache/plain/target --inner-size 1024 --steps 250 --row-tokens 256 \\
        --batch-tokens 2048 --learning-rate 0.002 --out .cache/plain/jump
    python -m vllm_specplugins train-exit-head .cache/plain/target --exit-layer 1 --steps 700 --row-tokens 256 \\
        --batch-tokens 2048 --learning-rate 0.002 --out .cache/plain/exit1
    python tests/bench/bench_trained.py --parts .cache/plain --temperature 0.8 \\
        --methods exit1=2 jump=3 medusa=2 lookup=3 lookup+jump=4

The model and its parts are widened (examples/demo/widen.py) into --parts/wide, and an engine for each method serves the
same requests, one at a time, in rounds in which the engines take turns. A method is a folder of --parts, `layerN` (an
exit with the model's own head), `lookup`, or `lookup+` a jump (a cascade without a gate), each with its K.
Prompts are held-out code; they stay in the prefix cache, so that decoding alone is timed. At temperature 0 each output
is cut where the model begins to say 8 tokens for the second time, and more prompts are asked, for as many tokens
together: text that does not loop.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vllm_specplugins.engine.harness.serving import Traffic, Turn, serve_round
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.bench.command import engines_up
from vllm_specplugins.tools.bench.figures import repeated_share
from vllm_specplugins.tools.bench.workloads import make_workload

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
SAMPLED = {"draft_sample_method": "probabilistic"}
LOOKUP = {"method": "prompt_lookup"}
BLOCK_SIZE = 128  # of the KV cache, in tokens; a prompt has one more, which has to be computed
LOOP_TOKENS, NUM_CANDIDATES = 8, 60
Figures = dict[str, float]
Request = tuple[list[int], int]


def config_of(word: str, wide: Path) -> dict[str, Any]:
    """What `name=K` stands for."""
    name, _, num_draft = word.partition("=")
    return {**_method(name, wide), "num_speculative_tokens": int(num_draft)}


def _method(name: str, wide: Path) -> dict[str, Any]:
    folder = wide / name
    if name == "lookup":
        return LOOKUP
    if name.startswith("lookup+"):
        stages = [LOOKUP, _method(name.removeprefix("lookup+"), wide)]
        return {"method": "cascade", "gate": "off", "stages": stages}
    if name.startswith("layer"):
        return {"method": "early_exit", "exit_layer": int(name.removeprefix("layer")), **SAMPLED}
    if (folder / "exit_head.safetensors").exists():
        layer = json.loads((folder / "config.json").read_text())["exit_layer"]
        return {"method": "early_exit", "exit_layer": layer, "exit_head": str(folder), **SAMPLED}
    if (folder / "jump.safetensors").exists():
        return {"method": "jump", "head": str(folder), **SAMPLED}
    return {"method": "medusa", "heads": str(folder), **SAMPLED}


def widened(model: Path, parts: Path) -> Path:
    """The model and its parts, wide; made where they are not there yet."""
    wide = parts / "wide"
    if not wide.exists():
        trained = [str(readme.parent) for readme in sorted(parts.glob("*/README.md"))]
        command = [sys.executable, str(DEMO / "widen.py"), str(model), str(wide), "--parts", *trained]
        subprocess.run(command, check=True)
    return wide


def requests_of(model: Path, args: argparse.Namespace) -> list[Request]:
    """Prompts, each with how many tokens are asked of it."""
    made = make_workload("code", load_tokenizer(str(model)), NUM_CANDIDATES, BLOCK_SIZE + 1).prompts
    if args.temperature:
        return [(prompt, args.tokens) for prompt in made[: args.prompts]]
    base = BaseModel.load(str(model), "cpu")
    rows = base.go_on(torch.tensor(made), BLOCK_SIZE + 1 + args.tokens, lambda logits, _: logits.argmax(-1))
    cut: list[Request] = []
    for prompt, row in zip(made, rows, strict=True):
        length = before_loop(row[BLOCK_SIZE + 1 :])
        if length >= args.tokens / 2 and sum(tokens for _, tokens in cut) < args.prompts * args.tokens:
            cut.append((prompt, length))
    print(f"{len(cut)} outputs, cut to {[tokens for _, tokens in cut]} tokens", flush=True)
    return cut


def before_loop(text: list[int]) -> int:
    """How many tokens stand before LOOP_TOKENS are said for the second time.

    >>> before_loop([9, *range(8), 7, *range(8)])
    10
    """
    ends = range(LOOP_TOKENS, len(text) + 1)
    return next((end - LOOP_TOKENS for end in ends if repeated_share([text[:end]], LOOP_TOKENS)), len(text))


def figures(turns: list[Turn], plain: list[Turn], temperature: float) -> Figures:
    """Of a method's turns, beside those of no speculation in the same round."""
    answers, expected = ([answer for turn in own for answer in turn.answers] for own in (turns, plain))
    said = [answer.token_ids for answer in answers]
    if not temperature and said != [answer.token_ids for answer in expected]:
        raise SystemExit("speculation changed an output")
    if any(turn.num_faults for turn in turns):
        raise SystemExit("a proposer had faults")

    def ratio(clock: str) -> float:
        return sum(getattr(turn, clock) for turn in plain) / sum(getattr(turn, clock) for turn in turns)

    return {
        "wall": ratio("seconds"),
        "cpu": ratio("cpu_seconds"),
        "tokens": sum(len(answer.token_ids) - answer.num_first for answer in answers),
        "steps": sum(len(answer.step_ms) for answer in answers),
        "step_ms": sum(sum(answer.step_ms) for answer in answers),
        "drafts": sum(turn.num_drafts for turn in turns),
        "drafted": sum(turn.num_draft_tokens for turn in turns),
        "accepted": sum(turn.num_accepted_tokens for turn in turns),
        "repeats": repeated_share(said, 4),
    }


def serve(args: argparse.Namespace) -> None:
    """The rounds, in which who is first changes, and their table."""
    wide, requests = widened(args.model, args.parts), requests_of(args.model, args)
    configs = {"none": None, **{word: config_of(word, wide) for word in args.methods}}
    arguments = {
        "model": str(wide), "dtype": "float32", "max_model_len": 4 * BLOCK_SIZE, "max_num_seqs": 1,
        "block_size": BLOCK_SIZE, "num_gpu_blocks_override": 32, "enable_prefix_caching": True,
    }  # fmt: skip
    rounds, begun = list[dict[str, Figures]](), time.perf_counter()
    with engines_up(configs, arguments, print) as (engines, machine):
        print(machine, json.dumps(configs), flush=True)

        def answered(number: int, prompt: list[int], num_tokens: int) -> dict[str, Turn]:
            heat, first, names = args.temperature, number % len(engines), list(engines)
            traffic = Traffic(prompts=[prompt], temperature=heat, max_tokens=num_tokens, at_a_time=1, ignore_eos=True)
            return serve_round({name: engines[name] for name in names[first:] + names[:first]}, traffic)

        for prompt, _ in requests:  # warms up, and computes the prompts
            answered(0, prompt, 4)
        while len(rounds) < args.rounds and time.perf_counter() - begun < 60 * args.minutes:
            turns = [answered(len(rounds) + place, *request) for place, request in enumerate(requests)]
            plain = [found["none"] for found in turns]
            rounds.append({
                name: figures([found[name] for found in turns], plain, args.temperature) for name in engines
            })  # fmt: skip
            print({name: round(own["wall"], 2) for name, own in rounds[-1].items()}, flush=True)
    show(args, rounds)


def show(args: argparse.Namespace, rounds: list[dict[str, Figures]]) -> None:
    """Medians over the rounds, each against no speculation in the same one; tokens and repeats over all of them."""
    columns = "method=K", "decoding alone, wall clock", "CPU time", "tokens/step", "step cost", "repeated 4-grams"
    table = Table(
        *columns, title=f"temperature {args.temperature:g}: {len(rounds)} rounds, {args.tokens} tokens or less"
    )
    for name in rounds[0] if rounds else ():
        own, plain = ([found[method] for found in rounds] for method in (name, "none"))
        costs = [step_ms(found) / step_ms(other) for found, other in zip(own, plain, strict=True)]
        wall = [found["tokens"] / found["steps"] / cost for found, cost in zip(own, costs, strict=True)]
        tokens, steps, repeats = (sum(found[field] for found in own) for field in ("tokens", "steps", "repeats"))
        figures = spread(wall), spread([found["cpu"] for found in own]), f"{tokens / steps:.2f}"
        table.add_row(name, *figures, f"{statistics.median(costs):.2f}", f"{repeats / len(own):.0%}")
    Console(width=140).print(table)
    print(f"vllm {version('vllm')}, torch {version('torch')}")


def step_ms(found: Figures) -> float:
    """Of a mean step; a request's first one is left out, which vLLM fills up with K tokens that mean nothing."""
    return found["step_ms"] / found["steps"]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}x ({min(values):.2f}-{max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=Path, required=True, help="folder of trained parts, one folder each")
    parser.add_argument("--model", type=Path, help="default: --parts/target")
    parser.add_argument("--methods", nargs="+", metavar="NAME=K", default=["jump=3"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60, help="no round begins behind so many")
    args = parser.parse_args()
    args.model = args.model or args.parts / "target"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    serve(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
