"""A cascade's policies on recorded texts, beside an oracle: no engine, no clock, the same figures on every machine.

    python benchmarks/bench_policies.py [--cells mixed --batches 1 4 16 --machine gpu --stage head]

The texts, and what an exit says behind every token of them, were recorded in a real engine (tests/traces/stages.py). A
step costs what --machine says; the gate is told that with some noise, and what it does until each request could have
begun once is not counted. The oracle knows what will be accepted, and chooses for each request the tokens and for each
step the passes of the exit that gain most, at the rate that it reaches itself; it looks one step ahead. Printed are
speeds, of no speculation, and each policy's share of the oracle's gain. "exit" is the exit of layer 1 of 8; "head"
drafts what the exit of layer 5 says, at the price of a small head; "built_in" offers that at each step.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "traces"))
from played import CELLS, MACHINES, Engine, Machine, Silent, cells, speed_of
from stages import Request, load

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config

LOOKUP = {"method": "prompt_lookup", "min_ngram": 2}
RECORDED = {"method": "early_exit", "draft_sample_method": "greedy"}  # tokens alone; they were drawn with the noise
EXITS = {"exit": {**RECORDED, "exit_layer": 1}, "head": {**RECORDED, "exit_layer": 5},
         "built_in": {"method": "draft_model", "model": "of the trace"}}  # fmt: skip


def settings(stage: str, width: int, most: int, policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Cascades by name: each stage alone, and both by each policy."""
    limited = {**EXITS[stage], "num_speculative_tokens": most}
    config = {"method": "cascade", "num_speculative_tokens": width}
    found = {"lookup alone": {**config, "stages": [LOOKUP]}, f"{stage} alone": {**config, "stages": [limited]}}
    return found | {policy: {**config, "policy": policy, "stages": [LOOKUP, limited]} for policy in policies}


class Oracle:
    """Drafts what will be accepted of what lookup and exit say, if that gains more than it costs at `rate`. The exit
    checks what was looked up in its first pass; behind that, it goes token by token.
    """

    def __init__(
        self,
        context: ProposerContext,
        requests: Sequence[Request],
        layer: int,
        most: int,
        machine: Machine,
        rate: float,
    ):
        self._lookup = build_proposer(parse_config(LOOKUP), context)
        self._requests, self._layer, self._most, self._machine = requests, layer, most, machine
        self._rate, self.passes = rate, list[int]()

    def propose(self, batch: DraftBatch) -> Draft:
        looked_up = self._lookup.propose(batch)
        rows = []
        for row, (name, history) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            request, room = (
                self._requests[int(name.rpartition("-")[2]) % len(self._requests)],
                int(batch.max_num_draft[row]),
            )
            rest = request.text[len(history) : len(history) + room]
            found = looked_up.token_ids[row, : looked_up.num_draft[row]].tolist()
            said = request.drafted(self._layer, len(history))[: self._most]
            num_found, num_said = agreeing(found, rest), agreeing(said, rest)
            behind = request.drafted(self._layer, len(history) + num_found)[: self._most]
            rows.append((rest, num_found, num_said, agreeing(found, said), agreeing(behind, rest[num_found:])))
        best: tuple[float, list[int], list[int]] | None = None
        for depth in range(self._most + 1):
            counts, fed = [], 0
            for _, num_found, num_said, num_guessed, num_behind in rows:
                alone, both = min(num_said, depth + num_guessed) if depth else 0, num_found + min(depth, num_behind)
                counts.append(max(alone, both))
                fed += (counts[-1] > num_found) * (1 + (num_guessed if alone > both else 0))
            passes = [fed] * depth if fed else []
            ms = self._machine.token_ms * sum(counts) + self._machine.passes(passes)
            gain = sum(counts) - self._rate * ms
            if best is None or gain > best[0]:
                best = gain, counts, passes
        assert best is not None
        _, counts, self.passes = best
        token_ids = np.zeros((len(rows), max(counts, default=0)), np.int32)
        for row, ((rest, *_), count) in enumerate(zip(rows, counts, strict=True)):
            token_ids[row, :count] = rest[:count]
        return Draft(token_ids, np.array(counts, np.int32))

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_ids: Sequence[str]) -> None:
        self._lookup.forget(request_ids)


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def speeds_of(
    requests: Sequence[Request], batch: int, machine: Machine, stage: str, own: dict[str, dict[str, Any]]
) -> list[float]:
    """Of each cascade, and of the oracle; of the speed of no speculation."""
    *_, config = own.values()
    width, most = config["num_speculative_tokens"], config["stages"][-1]["num_speculative_tokens"]
    plain = Engine(requests, batch, machine, width, lambda context: Silent()).played()
    speeds = [speed_of(config, requests, batch, machine) for config in own.values()]
    layer, rate = int(stage != "exit"), plain
    for _ in range(2):
        build = partial(Oracle, requests=requests, layer=layer, most=most, machine=machine, rate=rate)
        rate = Engine(requests, batch, machine, width, build).played()
    return [speed / plain for speed in (*speeds, rate)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--machine", choices=MACHINES, default="cpu")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--most", type=int, default=4, help="tokens that the exit drafts")
    parser.add_argument("--stage", choices=EXITS, default="exit")
    parser.add_argument("--policies", nargs="+", default=["verify", "auto"])
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    own, machine = settings(args.stage, args.width, args.most, args.policies), MACHINES[args.machine]
    title = f"speed, of no speculation: {args.machine}, lookup K = {args.width}, {args.stage} K = {args.most}"
    table = Table(title=title)
    for column in ("text", "requests", *own, "oracle", "last / best", "shares of the oracle's gain"):
        table.add_column(column, justify="right")
    trace = cells(load(args.trace) if args.trace else load())
    for cell in args.cells:
        for batch in args.batches:
            speeds = speeds_of(trace[cell], batch, machine, args.stage, own)
            *others, last, oracle = speeds
            shares = " ".join(f"{(speed - 1) / (oracle - 1):4.0%}" for speed in speeds[2:-1])
            table.add_row(cell, str(batch), *(f"{speed:.3f}" for speed in speeds), f"{last / max(others):.3f}", shares)
    Console(width=150).print(table)
    print(machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
