"""What `suffix_lookup` loses where nobody waits for its store, on Model Runner V2: tokens a step, of the host's.

    python tests/traces/make.py --out FOLDER && python benchmarks/bench_late.py FOLDER/*.jsonl

Played without an engine: the store drafts 3 K + 2 tokens from a text that is one step old, or two; what was emitted
since is dropped where it agrees, and what is left goes before a match in the request's own newest text. Beside that
the speed to no speculation, on an H100. It returns 1 where less than 0.98 is left.
"""

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.tools.replay.costs import H100, LOOKUP, NO_SPECULATION, Load
from vllm_specplugins.tools.replay.data import Chosen, read_traffic
from vllm_specplugins.tools.replay.simulate import simulate

BAR = 0.98


def built(method: str, context: ProposerContext) -> Any:
    return build_proposer(parse_config({"method": method, "gate": "off"}), context)


class Late:
    """So many steps behind."""

    def __init__(self, num_steps: int, context: ProposerContext):
        self._length = 3 * context.max_num_draft + 2
        self._store = built("suffix_lookup", replace(context, max_num_draft=self._length))
        self._store.searches_requests = False
        self._own, self._num_steps = built("prompt_lookup", context), num_steps
        self._made: dict[str, deque[tuple[int, list[int]]]] = {}

    def propose(self, batch: DraftBatch) -> Draft:
        own = self._own.propose(batch)
        for row, (name, text) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            made = self._made.setdefault(name, deque(maxlen=self._num_steps))
            if len(made) < self._num_steps:
                continue
            length, tokens = made[0]
            since = text[length:].tolist()
            left = tokens[len(since) :][: batch.max_num_draft[row]]
            if left and tokens[: len(since)] == since:
                own.token_ids[row, : len(left)], own.num_draft[row] = left, len(left)
        limits = np.where(batch.max_num_draft > 0, self._length, 0).astype(np.int32)
        found = self._store.propose(replace(batch, max_num_draft=limits))
        for name, text, tokens, num in zip(
            batch.request_ids, batch.token_ids, found.token_ids, found.num_draft, strict=True
        ):
            self._made[name].append((len(text), tokens[:num].tolist()))
        return own

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_ids: Sequence[str]) -> None:
        self._store.forget(request_ids)
        self._own.forget(request_ids)
        for name in request_ids:
            self._made.pop(name, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[5, 8, 31])
    parser.add_argument("--batches", type=int, nargs="+", default=[4])
    args, missed = parser.parse_args(), False
    for file, batch in product(args.files, args.batches):
        traffic = read_traffic([file], None, Chosen(10_000))
        plain = simulate(traffic, None, 0, Load(H100, batch, 0.0, NO_SPECULATION)).tokens_per_ms
        for length in args.lengths:
            builds = [partial(built, "suffix_lookup"), *(partial(Late, steps) for steps in (1, 2))]
            totals = [simulate(traffic, build, length, Load(H100, batch, 0.0, LOOKUP)) for build in builds]
            host, *late = (total.emitted / total.steps for total in totals)
            missed |= min(late) < BAR * host
            shares = ", ".join(f"{rate:.2f} ({rate / host:.3f})" for rate in late)
            speeds = " ".join(f"{total.tokens_per_ms / plain:.2f}x" for total in totals)
            print(f"{file.stem}, {batch} at a time, K = {length}: {host:.2f}; late {shares}; {speeds}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
