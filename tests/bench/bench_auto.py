"""The policy `auto` beside fixed policies and single stages, in a real engine.

    python examples/demo/widen.py examples/demo/model .cache/widened
    python tests/bench/bench_auto.py --model .cache/widened --results .cache/auto.json

The texts are those of bench_policies.py: edits, code, both in turn no further than either loops, and both at
temperature 1. One engine, whose proposer is exchanged between turns: each keeps a gate of its own, all make the same
tokens, which is checked. A round's ratio is of whole times, prompts included; the first round warms up. "none" is
verified as the others are, and drafts nothing. Cells that --results holds are not measured again.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "traces"))
from bench_policies import settings
from played import CELLS, Silent
from prompts import load_prompts
from stages import loops_at

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.methods import build_proposer, parse_config

MAX_MODEL_LEN = 1024
BOTH = "edit", "continue"
KINDS = {"copying": BOTH[:1], "continuing": BOTH[1:], "mixed": BOTH, "sampled": BOTH}


class Exchanged:
    """Proposers, one of which drafts."""

    def __init__(self, proposers: dict[str, Any]):
        self._proposers, self._own, self._seen = proposers, next(iter(proposers.values())), set[str]()

    def use(self, name: str) -> None:
        self._own.forget(sorted(self._seen))
        self._seen.clear()
        self._own = self._proposers[name]

    def propose(self, batch: DraftBatch) -> Draft:
        self._seen.update(batch.request_ids)
        draft: Draft = self._own.propose(batch)
        return draft

    def observe(self, feedback: Feedback) -> None:
        self._own.observe(feedback)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._own.forget([name for name in request_ids if name in self._seen])
        self._seen.difference_update(request_ids)


class Server:
    """An engine in this process, and the proposers that it may have."""

    def __init__(self, model: str, own: dict[str, dict[str, Any]], width: int):
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        from vllm import LLM

        self.llm = LLM(
            model, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=16, enforce_eager=True, block_size=128,
            num_gpu_blocks_override=130, gpu_memory_utilization=0.3, enable_prefix_caching=False,
            speculative_config=own["auto"],
        )  # fmt: skip
        context = ProposerContext(3072, MAX_MODEL_LEN, 16, width, lambda text: [])
        proposers = {name: build_proposer(parse_config(config), context) for name, config in own.items()}
        for proposer in proposers.values():
            proposer.fit(MAX_MODEL_LEN)
        self.proposer = Exchanged({"none": Silent(), **proposers})
        self.llm.llm_engine.model_executor.driver_worker.worker._barrier.guard.proposer = self.proposer

    def turn(self, name: str, asked: Sequence[tuple[str, int]], temperature: float, batch: int) -> Any:
        """Seconds by wall clock and of CPU, and the tokens."""
        from vllm import SamplingParams

        self.proposer.use(name)
        engine, waiting, made = self.llm.llm_engine, list(enumerate(asked))[::-1], [list[int]() for _ in asked]
        start, cpu_start = time.perf_counter(), time.process_time()
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < batch:
                index, (prompt, most) = waiting.pop()
                params = SamplingParams(
                    temperature=temperature, seed=index, max_tokens=most, ignore_eos=True, detokenize=False
                )
                engine.add_request(str(index), prompt, params)
            for result in engine.step():
                if result.finished:
                    made[int(result.request_id)] = list(result.outputs[0].token_ids)
        return time.perf_counter() - start, time.process_time() - cpu_start, made


def asked_of(server: Server, cell: str, count: int, num_tokens: int) -> list[tuple[str, int]]:
    """Prompts, and how many tokens of output."""
    kinds = KINDS[cell]
    prompts = [prompt for pair in zip(*(load_prompts(kind, count) for kind in kinds), strict=True) for prompt in pair]
    asked = [(prompt, num_tokens) for prompt in prompts[:count]]
    if cell != "mixed":
        return asked
    *_, made = server.turn("none", asked, 0.0, 16)
    ends = [loops_at(text) for text in made]
    return [(prompt, max(8, min(ends[index // 2 * 2 : index // 2 * 2 + 2]))) for index, (prompt, _) in enumerate(asked)]


def measured(server: Server, names: Sequence[str], cell: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    asked = asked_of(server, cell, max(args.prompts, 2 * batch), args.tokens)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    texts = []
    for index in range(1 + args.rounds):
        for place in range(len(names)):
            name = names[(place + index) % len(names)]  # who goes first may matter
            *times, made = server.turn(name, asked, float(cell == "sampled"), batch)
            texts.append(made)
            if index:
                turns[name].append((times[0], times[1]))
    same = sum(text == texts[0] for text in texts)
    return {"turns": turns, "tokens": sum(map(len, texts[0])), "same": f"{same} of {len(texts)}"}


def row_of(cell: dict[str, Any], clock: int) -> list[str]:
    """Speeds, of "none"; of "auto", the last one, to each other one, in the same round, the smallest."""
    turns = {name: [times[clock] for times in own] for name, own in cell["turns"].items()}
    to_auto = {
        name: [other / own for own, other in zip(turns["auto"], others, strict=True)] for name, others in turns.items()
    }
    speeds = [
        statistics.median(none / own for none, own in zip(turns["none"], turns[name], strict=True)) for name in turns
    ]
    medians = {name: statistics.median(own) for name, own in to_auto.items() if name != "auto"}
    best = min(medians, key=lambda name: medians[name])
    found = to_auto[best]
    return [*(f"{speed:.2f}" for speed in speeds[1:]), f"{medians[best]:.3f} ({min(found):.2f}-{max(found):.2f})"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the demo model, widened")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--most", type=int, default=4, help="tokens that the exit drafts")
    parser.add_argument("--exit-layer", type=int, default=1)
    parser.add_argument("--policies", nargs="+", default=["verify"])
    parser.add_argument("--results", type=Path, help="JSON file: what was measured before, and is kept")
    args = parser.parse_args()
    own = settings("exit", args.width, args.most, [*args.policies, "auto"])
    for config in own.values():
        config["stages"] = [
            {**stage, "exit_layer": args.exit_layer} if "exit_layer" in stage else stage for stage in config["stages"]
        ]
    known = json.loads(args.results.read_text()) if args.results and args.results.exists() else {}
    table, server = Table(title="speed, of drafting nothing: wall clock / CPU time"), None
    for column in ("text", "requests", *own, "auto / best", "same text"):
        table.add_column(column, justify="right")
    for name in args.cells:
        for batch in args.batches:
            key = json.dumps([name, batch, args.model, args.exit_layer, args.rounds, args.prompts, args.tokens, own])
            if key not in known:
                server = server or Server(args.model, own, args.width)
                known[key] = measured(server, ["none", *own], name, batch, args)
                if args.results:
                    args.results.write_text(json.dumps(known))
            cell = known[key]
            both = zip(row_of(cell, 0), row_of(cell, 1), strict=True)
            row = [name, str(batch), *(" / ".join(pair) for pair in both), cell["same"]]
            table.add_row(*row)
            print(*row, flush=True)
    Console(width=200).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
