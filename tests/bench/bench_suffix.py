"""`suffix_lookup` beside arctic-inference's suffix decoding, on the same traces in the same run.

    python tests/bench/bench_suffix.py --peer FOLDER [--requests 200] [--num-draft 5,8,16] [--json FILE]

FOLDER holds the package arctic_inference with its compiled suffix tree; of its source, csrc/suffix_decoding builds
alone with CMake and nanobind. It is asked as vLLM asks it, with vLLM's defaults (depth 24, 10,000 requests, a match
of n tokens drafts n, probabilities of 0.1 and more). Traces are those of tests/traces. Acceptance: tokens that a step
accepts beside the one that it would say anyway. Step: taking in the newest tokens of each request and drafting for
it; CPU time of the thread by request, in rounds that take turns; of ours all of `propose`, of theirs only its own
calls, and none in which a prompt comes, which ours does not take in. The store of ours is as large as theirs at the
end of the trace, but at least 1 MiB. The bars: acceptance at least theirs, a step at most half of theirs. It returns 1
where one is missed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "traces"))
from make import KINDS, trace

from vllm_specplugins.config import SuffixLookupConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Proposer, ProposerContext
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.proposers.suffix_lookup import SuffixLookup
from vllm_specplugins.structures.suffix.ring import BYTES_PER_TOKEN
from vllm_specplugins.tools.replay.costs import H100, Load
from vllm_specplugins.tools.replay.data import Traffic
from vllm_specplugins.tools.replay.simulate import Totals, simulate

DEPTH, MAX_REQUESTS, FACTOR, MIN_PROBABILITY = 24, 10_000, 1.0, 0.1  # vLLM's
STEP_SHARE = 0.5
ROUNDS = 5
SETTLED = 3  # steps of a request before which it is not timed


class Peer:
    """arctic-inference as a proposer; what it takes itself is timed inside."""

    def __init__(self, context: ProposerContext):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(DEPTH, MAX_REQUESTS)
        self._max_num_draft = context.max_num_draft
        self._known: dict[str, int] = {}
        self.ms: list[float] = []  # by request and step, without those that begin

    def propose(self, batch: DraftBatch) -> Draft:
        token_ids = np.zeros((batch.num_reqs, self._max_num_draft), np.int32)
        num_draft = np.zeros(batch.num_reqs, np.int32)
        for row, (name, history) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            limit = int(batch.max_num_draft[row])
            history = np.array(history)
            if name not in self._known:
                self.cache.start_request(name, history[:-1])
                self._known[name] = len(history) - 1
            new, ending = history[self._known[name] :].tolist(), history[-DEPTH:]
            start = time.thread_time()
            self.cache.add_active_response(name, new)
            found = self.cache.speculate(
                name, ending, max_spec_tokens=limit, max_spec_factor=FACTOR, min_token_prob=MIN_PROBABILITY
            )
            self.ms.append((time.thread_time() - start) * 1e3)
            self._known[name] = len(history)
            num_draft[row] = len(found.token_ids)
            token_ids[row, : num_draft[row]] = found.token_ids
        return Draft(token_ids, num_draft)

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self._known.pop(name, None)
            self.cache.stop_request(name)

    def num_bytes(self) -> int:
        """Of the tree that all requests share."""
        return int(self.cache._global_tree.estimate_memory())


class Timed:
    """A proposer of ours, with the CPU time by request of its steps in which no prompt is taken in."""

    def __init__(self, proposer: Proposer):
        self.proposer = proposer
        self.ms: list[float] = []
        self._known: dict[str, int] = {}  # steps of each request

    def propose(self, batch: DraftBatch) -> Draft:
        for name in batch.request_ids:
            self._known[name] = self._known.get(name, 0) + 1
        start = time.thread_time()
        draft = self.proposer.propose(batch)
        ms = (time.thread_time() - start) * 1e3 / batch.num_reqs
        if all(self._known[name] > SETTLED for name in batch.request_ids):
            self.ms.append(ms)
        return draft

    def observe(self, feedback: Feedback) -> None:
        self.proposer.observe(feedback)

    def forget(self, request_ids: Sequence[str]) -> None:
        self.proposer.forget(request_ids)


def traffic_of(kind: str, num_requests: int) -> Traffic:
    traffic = Traffic()
    for prompt, output in trace(kind, num_requests):
        traffic.add(prompt, output)
    return traffic


def play(traffic: Traffic, make, num_draft: int, batch: int) -> tuple[Totals, object]:
    """What became of the drafts, and the proposer at the end."""
    made = []

    def build(context: ProposerContext):
        made.append(make(context))
        return made[0]

    return simulate(traffic, build, num_draft, Load(H100, batch, 0.0)), made[0]


def suffix(store_bytes: int, context: ProposerContext) -> Timed:
    return Timed(SuffixLookup(SuffixLookupConfig(store_bytes=store_bytes), context))


def lookup(context: ProposerContext) -> Timed:
    return Timed(build_proposer(parse_config({"method": "prompt_lookup"}), context))


def accepted(totals: Totals) -> float:
    return totals.emitted / totals.steps - 1


def compare(kind: str, args: argparse.Namespace) -> list[dict]:
    """Rows by K: all three on a kind of text."""
    traffic = traffic_of(kind, args.requests)
    rows = []
    for num_draft in args.num_draft:
        # The least that a store may have is 1 MiB.
        store_bytes = max(1 << 20, play(traffic, Peer, num_draft, args.batch)[1].num_bytes())
        found, last = {}, {}
        for _ in range(ROUNDS):
            for name, make in (("theirs", Peer), ("ours", partial(suffix, store_bytes)), ("prompt_lookup", lookup)):
                totals, proposer = play(traffic, make, num_draft, args.batch)
                last[name] = totals
                found.setdefault(name, []).append((accepted(totals), 1e3 * statistics.mean(proposer.ms), proposer))
        own = found["ours"][-1][2]
        rows.append(
            {
                "kind": kind,
                "K": num_draft,
                "accepted": {name: rounds[0][0] for name, rounds in found.items()},
                "step_us": {name: statistics.median(us for _, us, _ in rounds) for name, rounds in found.items()},
                "store_bytes": {"theirs": store_bytes / max(1, traffic.num_output_tokens), "ours": BYTES_PER_TOKEN},
                "store": {"theirs": store_bytes, "ours": own.proposer.store.num_bytes},
                "right": {name: totals.accepted / max(1, totals.drafted) for name, totals in last.items()},
            }
        )
    return rows


def missed(row: dict) -> list[str]:
    """The bars that a row misses."""
    words, ours, theirs = [], {}, {}
    for name in ("accepted", "step_us"):
        ours[name], theirs[name] = row[name]["ours"], row[name]["theirs"]
    if ours["accepted"] < theirs["accepted"]:
        words.append("acceptance")
    if ours["step_us"] > STEP_SHARE * theirs["step_us"]:
        words.append("step")
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--num-draft", type=lambda text: [int(part) for part in text.split(",")], default=[5, 8, 16])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(args.peer))
    play(traffic_of("code", 1), partial(suffix, 1 << 20), 5, 1)  # compilers warm up
    rows = [row for kind in args.kinds.split(",") for row in compare(kind, args)]
    names = ("accepted", "right", "step_us", "store_bytes")
    table = Table("kind", "K", *(f"{name}: theirs, ours" for name in names), "prompt_lookup accepted", "missed")
    for row in rows:
        pairs = [f"{row[name]['theirs']:.2f}, {row[name]['ours']:.2f}" for name in names]
        table.add_row(
            row["kind"], str(row["K"]), *pairs, f"{row['accepted']['prompt_lookup']:.2f}", ", ".join(missed(row))
        )
    Console(width=160).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if any(map(missed, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
