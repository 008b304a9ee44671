"""Prompts beside requests that decode: how long a first token takes, and how many tokens a second come out.

    python benchmarks/bench_admission.py [--requests 1 8 32 128 256 --budgets 2048 8192 --seconds 20 --before]

vLLM's scheduler and ours, without a model: a step takes what Llama 3.1 8B takes on an H100 (tools/replay/costs.py). The
requests decode without an end and copy two fifths of their text. Three loads are played: no prompts, prompts of 1,000
tokens at 80 % of the rate at which no speculation admits them, and prompts that always wait. `--before` plays drafts
that take their tokens first, as vLLM plans them. It returns 1 where a first token takes more than 1.05 times as long as
without speculation (median or p99), where fewer tokens come out, or where waiting prompts are admitted at less than
0.95 of the rate."""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "tests/engine", "examples", "examples/demo")]
os.environ |= {"SPECPLUGINS_RUNNER": "v2", "VLLM_LOGGING_LEVEL": "ERROR"}

from played_server import PlayedServer, served  # noqa: E402
from rich.console import Console  # noqa: E402
from simulated_device.device import interpreted  # noqa: E402

from vllm_specplugins.engine.room import MakesRoom  # noqa: E402
from vllm_specplugins.tools.replay.costs import LLAMA_3_1_8B  # noqa: E402

LOAD, LONGEST_DELAY, LEAST_TOKENS, LEAST_ADMITTED = 0.8, 1.05, 1.0, 0.95
Figures = dict[str, float]


def played(drafts: bool, num_reqs: int, budget: int, num_ms: float, rate: float = 0.0, waiting: int = 0) -> Figures:
    config = {"method": "prompt_lookup"} if drafts else None
    return served(PlayedServer(config, LLAMA_3_1_8B, num_reqs, budget), num_ms, waiting, rate)


def cell(num_reqs: int, budget: int, num_ms: float) -> dict[str, float]:
    """Of speculation, relative to none."""
    waiting = [played(drafts, num_reqs, budget, num_ms / 2, waiting=20) for drafts in (False, True)]
    alone = [played(drafts, num_reqs, budget, num_ms / 4) for drafts in (False, True)]
    rate = LOAD * waiting[0]["prompts a second"] / 1000
    arriving = [played(drafts, num_reqs, budget, num_ms, rate) for drafts in (False, True)]
    return {
        "alone, tokens": alone[1]["tokens a second"] / alone[0]["tokens a second"],
        "waiting, admitted": waiting[1]["prompts a second"] / waiting[0]["prompts a second"],
        "waiting, tokens": waiting[1]["tokens a second"] / waiting[0]["tokens a second"],
        "80 %, tokens": arriving[1]["tokens a second"] / arriving[0]["tokens a second"],
        "TTFT p50": arriving[1]["TTFT p50"] / arriving[0]["TTFT p50"],
        "TTFT p99": arriving[1]["TTFT p99"] / arriving[0]["TTFT p99"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048, 8192], help="tokens a step")
    parser.add_argument("--seconds", type=float, default=20, help="of a play, after as many again")
    parser.add_argument("--before", action="store_true")
    given, console, fails = parser.parse_args(), Console(), 0
    if given.before:
        MakesRoom._shorten_drafts = lambda self: None  # type: ignore[method-assign]
    with interpreted():
        for budget in given.budgets:
            for num_reqs in given.requests:
                found = cell(num_reqs, budget, 1000 * given.seconds)
                delayed = max(found["TTFT p50"], found["TTFT p99"]) > LONGEST_DELAY
                fewer = min(found["alone, tokens"], found["80 %, tokens"], found["waiting, tokens"]) < LEAST_TOKENS
                fails += delayed or fewer or found["waiting, admitted"] < LEAST_ADMITTED
                figures = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
                console.print(f"{budget} tokens a step, {num_reqs} requests: {figures}", highlight=False)
    return int(fails > 0)


if __name__ == "__main__":
    sys.exit(main())
