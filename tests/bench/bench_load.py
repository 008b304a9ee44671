"""What a gate makes of load: recorded traffic on a simulated H100, 1 to 128 requests at a time.

    python tests/bench/bench_load.py [--method suffix_lookup] [--batch 1,4,32,128] [--num-draft 8] [--json FILE]

Each cell plays a kind of text (tests/traces) three times: nothing drafted, all that is found drafted, and behind the
gate. The costs of a step are those of tools/replay/costs.py (kernels recorded on an H100 by others); drafting costs
--draft-us for each request and step, whether it finds something or not. The bars: behind the gate at least as fast as
without drafts, but for what its trials cost (TRIALS), and within BEST of the faster of the other two. It returns 1
where one is missed.
--method takes any value of --speculative-config whose proposer reads token ids alone; `play` takes any proposer.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "traces"))
from make import KINDS, trace

from vllm_specplugins.tools.replay.candidates import ALWAYS, GATED, candidates
from vllm_specplugins.tools.replay.costs import H100, CostTable, Load
from vllm_specplugins.tools.replay.data import Traffic
from vllm_specplugins.tools.replay.simulate import Build, Totals, simulate

TRIALS, BEST = 0.99, 0.95
# Beside the H100's a machine without room: a token more costs what a request's own does.
COSTS = {"h100": H100, "compute-bound": CostTable.line(5.0, 5.0)}
OUTPUT = 300  # tokens of an output at most
LEAST, ROUNDS = 20, 8  # requests of a cell; of a place in its batch


@dataclass(frozen=True, slots=True)
class Cell:
    """Speed to nothing drafted, of all drafted and of the gate's choice."""

    kind: str
    batch: int
    always: float
    gated: float
    tokens_per_step: tuple[float, float]

    @property
    def of_best(self) -> float:
        return self.gated / max(1.0, self.always)

    @property
    def holds(self) -> bool:
        """Whether the bars do."""
        return self.gated >= TRIALS and self.of_best >= BEST


def traffic_of(kind: str, batch: int, rounds: int) -> Traffic:
    """Enough requests to fill the batch some times."""
    traffic = Traffic()
    for prompt, output in trace(kind, max(LEAST, rounds * batch), at_a_time=batch, max_output=OUTPUT):
        traffic.add(prompt, output)
    return traffic


def play(kind: str, traffic: Traffic, load: Load, num_draft: int, always: Build, gated: Build) -> Cell:
    """The cell of a proposer as it is and behind whatever gate."""
    found: dict[str, Totals] = {
        name: simulate(traffic, build, num_draft, load)
        for name, build in (("none", None), (ALWAYS, always), (GATED, gated))
    }
    speed = {name: totals.tokens_per_ms / found["none"].tokens_per_ms for name, totals in found.items()}
    steps = tuple(found[name].emitted / found[name].steps for name in (ALWAYS, GATED))
    return Cell(kind, load.batch, speed[ALWAYS], speed[GATED], (steps[0], steps[1]))


def cells(
    method: str, kinds: list[str], batches: list[int], num_draft: int, draft_us: float, gpu: str, rounds: int = ROUNDS
) -> Iterator[Cell]:
    """The cells of a method of ours, with the gate of a cascade.

    Args:
        rounds: requests of a place in the batch; a gate takes some steps to know a batch size.
    """
    always, gated = (candidate.build for candidate in candidates([method], [num_draft]))
    for kind in kinds:
        for batch in batches:
            load = Load(COSTS[gpu], batch, draft_us)
            yield play(kind, traffic_of(kind, batch, rounds), load, num_draft, always, gated)


def listed(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="suffix_lookup")
    parser.add_argument("--batch", type=listed, default=[1, 4, 32, 128])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--num-draft", type=int, default=8)
    parser.add_argument("--draft-us", type=float, default=10.0)
    parser.add_argument("--gpu", default="h100", choices=COSTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console, found = Console(width=110), list[Any]()
    table = Table("kind", "at a time", "always", "gated", "of the best", "tokens/step: always, gated", "bars")
    for cell in cells(args.method, args.kinds.split(","), args.batch, args.num_draft, args.draft_us, args.gpu):
        found.append(cell)
        steps = "{:.2f}, {:.2f}".format(*cell.tokens_per_step)
        figures = (f"{cell.always:.3f}", f"{cell.gated:.3f}", f"{cell.of_best:.3f}", steps)
        table.add_row(cell.kind, str(cell.batch), *figures, "" if cell.holds else "missed")
    console.print(table, f"{args.method}, K = {args.num_draft}, {args.draft_us} us; {COSTS[args.gpu].source}.")
    if args.json:
        args.json.write_text(json.dumps([{name: getattr(cell, name) for name in Cell.__slots__} for cell in found]))
    return 0 if all(cell.holds for cell in found) else 1


if __name__ == "__main__":
    sys.exit(main())
