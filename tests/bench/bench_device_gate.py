"""What is decided on the device, one step late, against what a host would decide that waits: on a simulated H100.

    python tests/traces/exits.py --out FILE; python tests/bench/bench_device_gate.py FILE [--batch 1,4,32,128]

Each cell plays recorded texts (tests/traces/exits.py) behind drafts of a lookup, or of it and an exit after a quarter
of the layers. Costs are those of Llama 2 7B (tools/replay/costs.py: kernels recorded on an H100 by others), padded to
the sizes of vLLM's graphs; the exit's are its share of them, and the head's bytes for each of its tokens. Speeds are
to nothing drafted: all tokens drafted and verified; the host's cascade and gate, told these costs, which know a draft
when they plan, their time not counted; and the device's. The bars: at least HOST of the host's choice, never below
NONE of no speculation; 1 where one is missed.
"""

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "traces"))
from device_choices import LOOKUP, Nothing, OnDevice, OnHost
from exits import Said, load
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import build_cost_tables_from_curves

from vllm_specplugins.tools.replay.costs import BANDWIDTH, H100

HOST, NONE = 0.97, 0.99
SHARE = 2 / 8  # of the layers, in front of the exit
HEAD_MS = 1000 * 32_000 * 4096 * 2 / BANDWIDTH  # of Llama 2 7B
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # vLLM's graphs
TAIL = [768, 1024, 1536, 2048]  # tokens, behind the largest
POLICIES = ["prompt_lookup", "auto", "verify"]
EXIT = {"method": "early_exit", "exit_layer": 2}


class Costs:
    """ms of steps, as vLLM's tables have them; attention beside that."""

    def __init__(self, num_draft: int):
        exits = [(n, num_draft * (SHARE * H100.step_ms(n, 0) + HEAD_MS)) for n in SIZES]
        verify = [(n, H100.step_ms(n, 0)) for n in SIZES + TAIL]
        self.tables = build_cost_tables_from_curves(exits, verify, 512, 2048, SIZES[-1])
        self.context_ms, self.source = H100.context_ms, H100.source

    def verify_ms(self, num_tokens: int, num_context: int) -> float:
        return float(self.tables[1][num_tokens]) + self.context_ms * num_context

    def exit_ms(self, calls: Sequence[int], num_context: int) -> float:
        """Passes of the exit, by the tokens in each."""
        return sum(SHARE * self.verify_ms(num_tokens, num_context) + HEAD_MS for num_tokens in calls)


@dataclass(slots=True)
class Total:
    emitted: int = 0
    ms: float = 0.0
    steps: int = 0
    deep: int = 0  # tokens of the exit

    def speed(self) -> float:
        return self.emitted / self.ms


def play(texts: Sequence[Said], batch: int, num_requests: int, num_draft: int, costs: Costs, own: Nothing) -> Total:
    """Requests of these texts in turns, so many at a time; each step's drafts are verified in the next one."""
    total, waiting, free = Total(), deque(range(num_requests)), list(range(batch))[::-1]
    running: dict[int, tuple[int, int]] = {}  # by slot: text, length
    drafts: dict[int, Any] = {}
    while waiting or running:
        is_steady = not (waiting and free)
        fates = {}
        if running:
            slots = np.array(sorted(running))
            max_draft = np.array([num_draft if drafts[slot][1] is None else drafts[slot][1] for slot in slots])
            verified = own.trimmed(slots, max_draft)
            for slot, count in zip(slots.tolist(), verified.tolist(), strict=True):
                text, length = running[slot]
                said = texts[text].token_ids
                right = drafts[slot][0][:count][: len(said) - length] == said[length : length + count]
                accepted = int(right.argmin()) if not right.all() else len(right)
                fates[slot] = accepted, count - accepted
            context = sum(length for _, length in running.values())
            step_ms = costs.verify_ms(len(slots) + int(verified.sum()), context)
            total.ms += step_ms
            total.steps += 1
        for slot, (accepted, _) in fates.items():
            text, length = running[slot]
            end = min(length + accepted + 1, len(texts[text].token_ids))
            total.emitted += end - length
            running[slot] = text, end
            if end == len(texts[text].token_ids):
                del running[slot]
                own.stop(slot)
                free.append(slot)
        while waiting and free:
            slot, number = free.pop(), waiting.popleft()
            text = number % len(texts)
            running[slot] = text, texts[text].num_prompt + 1
            fates[slot] = 0, 0
            own.start(slot, text)
        if not running:
            continue
        slots = np.array(sorted(running))
        parts = np.array([[*running[slot], *fates[slot]] for slot in slots])
        told_ms = step_ms if fates and is_steady and total.steps else None
        token_ids, lengths = own.draft(slots, parts[:, 0], parts[:, 1], parts[:, 2] + 1, parts[:, 3], told_ms)
        drafts = {slot: (token_ids[i], int(lengths[i])) for i, slot in enumerate(slots.tolist())}
        total.ms += costs.exit_ms(own.calls, int(parts[:, 1].sum()))
        total.deep += len(own.calls)
    return total


def config_of(policy: str, num_draft: int) -> dict[str, Any]:
    """The lookup alone, or a cascade of it and the exit."""
    own = LOOKUP if policy == "prompt_lookup" else {"method": "cascade", "policy": policy, "stages": [LOOKUP, EXIT]}
    return {**own, "num_speculative_tokens": num_draft}


def cell(texts: Sequence[Said], batch: int, name: str, num_draft: int, costs: Costs, rounds: int) -> Any:
    """Totals by who chose."""
    config, num_requests = config_of(name, num_draft), max(8, rounds * batch)

    def total(own: Nothing) -> Total:
        return play(texts, batch, num_requests, num_draft, costs, own)

    found = {"none": total(Nothing())}
    off = {**config, "gate": "off"} if "stages" in config else config
    found["all"] = total(OnDevice(off, texts, batch, costs, trims=False))
    found["host"] = total(OnHost(config, texts, batch, costs))
    found["device"] = total(OnDevice(config, texts, batch, costs))
    return found


def listed(text: str) -> list[str]:
    return text.split(",")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exits", type=Path, help="what tests/traces/exits.py recorded")
    parser.add_argument("--batch", type=listed, default=["1", "4", "32", "128"])
    parser.add_argument("--kinds", type=listed, default=["edits", "code", "sampled"])
    parser.add_argument("--policies", type=listed, default=POLICIES)
    parser.add_argument("--num-draft", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="requests of a place in the batch")
    args = parser.parse_args()
    costs, texts, holds = Costs(args.num_draft), load(args.exits), True
    table = Table("text", "drafts", "at a time", "all", "host", "device", "of the host's", "depth", "bars")
    for kind in args.kinds:
        for name in args.policies:
            for batch in map(int, args.batch):
                found = cell(texts[kind], batch, name, args.num_draft, costs, args.rounds)
                none, device = found["none"].speed(), found["device"]
                speeds = {who: total.speed() / none for who, total in found.items()}
                of_host = speeds["device"] / speeds["host"]
                is_well = of_host >= HOST and speeds["device"] >= NONE
                holds &= is_well
                figures = [*(speeds[who] for who in ("all", "host", "device")), of_host, device.deep / device.steps]
                cells = [f"{value:.3f}" for value in figures]
                table.add_row(kind, name, str(batch), *cells, "" if is_well else "missed")
                others = {who: round(speed, 3) for who, speed in speeds.items()}
                print(kind, name, batch, others, f"{of_host:.3f}", "" if is_well else "missed", flush=True)
    Console(width=120).print(table, f"K = {args.num_draft}; {costs.source}.")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
