"""How near the cascade of a lookup and a recorded drafter comes to an oracle, on logs of SpecDecode-Bench.

    python benchmarks/bench_choosing.py combined_{instructcoder,cnn,sharegpt,gsm8k}.jsonl [--ids odd --batches 1 8 32]
        [--runner v2]

The oracle knows how many tokens each draft would bring. At each step it drafts the better of two: these tokens of a
lookup's copy, or all K of the drafter, which then runs for all requests. Steps cost what they cost the cascade (the
H100 of tools/replay/costs.py; the drafter costs one of K passes for each token, and one for none; lookups and the host
cost nothing). `better stage` is the faster one of the lookup and the drafter, each alone; `lookup` is the speed of
suffix_lookup relative to the best of none and vLLM's ngram_gpu at K = 5, 15 and 31. Outputs above 1,500 tokens are left
out. It returns 1 where a bar is missed: 0.85 of the oracle and 0.88 in the mean at one request, 0.98 of the better
stage at more, and for a lookup 1.15 in each cell and 1.28 in their geometric mean."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, ProposerContext
from vllm_specplugins.proposers.prompt_lookup import PromptLookup
from vllm_specplugins.stage import StageProposer
from vllm_specplugins.structures.arrays import Ints
from vllm_specplugins.tools.replay.candidates import (
    FIXED,
    GATED,
    NGRAM_GPU,
    NGRAM_GPU_LENGTHS,
    RUNNERS,
    V1,
    Candidate,
    Drafter,
    Fixed,
    beside,
)
from vllm_specplugins.tools.replay.costs import LLAMA_3_1_8B, Load
from vllm_specplugins.tools.replay.data import Chosen, Traffic, number_of, read_traffic
from vllm_specplugins.tools.replay.simulate import simulate

DRAFTER, NUM_DRAFT = "eagle:2.14:0.00084:5", 31
LEAST, MEAN, BETTER, LOOKUP, LOOKUP_MEAN = 0.85, 0.88, 0.98, 1.15, 1.28


class Oracle(StageProposer):
    """Plays the oracle in place of a cascade; `tokens_per_ms` is the rate at which it emits."""

    def __init__(self, drafter: Drafter, traffic: Traffic, tokens_per_ms: float, context: ProposerContext):
        self._drafter, self._traffic, self._rate = drafter, traffic, tokens_per_ms
        self._lookup, self._width = PromptLookup(PromptLookupConfig(), context), context.max_num_draft
        self._draft = Draft.empty(0)

    def offer_length(self, batch: DraftBatch, num_accepted: Int32Array) -> int:
        """Chooses the drafts of this step; returns how many tokens the drafter drafts for them."""
        texts, limits = batch.token_ids, batch.max_num_draft.astype(np.int64)
        truth = np.full((batch.num_reqs, self._width), -1, np.int32)
        for row, name, text in zip(truth, batch.request_ids, texts, strict=True):
            rest = self._traffic.histories[number_of(name)][len(text) : len(text) + self._width]
            row[: len(rest)] = rest
        copied = np.minimum(num_right(self._lookup.draft(batch, None, limits).token_ids, truth), limits)
        offered, limits = truth.copy(), np.minimum(limits, self._drafter.num_draft)
        offered[:, : self._drafter.num_draft] = self._drafter.draft(self._traffic, batch.request_ids, texts)
        more = np.maximum(np.minimum(num_right(offered, truth), limits) - copied, 0)
        K = self._drafter.num_draft
        saved_ms = self._drafter.step_ms(batch.num_reqs, K) - self._drafter.step_ms(batch.num_reqs, 0)
        asks = bool(more.sum() > self._rate * saved_ms)
        is_offered = asks & (more > 0)
        token_ids = np.where(is_offered[:, None], offered, np.maximum(truth, 0))
        self._draft = Draft(token_ids, np.where(is_offered, limits, copied).astype(np.int32))
        return K if asks else 0

    def propose(self, batch: DraftBatch) -> Draft:
        return self._draft

    def forget(self, request_ids: Sequence[str]) -> None:
        self._lookup.forget(request_ids)


def num_right(token_ids: Int32Array, truth: Int32Array) -> Ints:
    """[num_reqs]: how many of the first tokens are the output's."""
    right: Ints = (token_ids == truth).cumprod(axis=1).sum(axis=1)
    return right


def speed(traffic: Traffic, load: Load, candidate: Candidate | None) -> float:
    """Tokens a ms."""
    if candidate is None:
        return simulate(traffic, None, 0, load).tokens_per_ms
    return simulate(
        traffic, candidate.build, candidate.num_draft, load, drafter=candidate.drafter, lengths=candidate.lengths
    ).tokens_per_ms


def oracle_speed(traffic: Traffic, load: Load, drafter: Drafter, rate: float) -> float:
    """The rate at which the oracle emits is measured by playing it."""
    for _ in range(2):
        build = partial(Oracle, drafter, traffic, rate)
        rate = speed(traffic, load, Candidate("oracle", FIXED, NUM_DRAFT, build, None, drafter))
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--ids", choices=["even", "odd", "all"], default="odd")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of each file, at most")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--runner", choices=RUNNERS, default=V1)
    args = parser.parse_args()
    drafter, missed = Drafter.parse(DRAFTER), list[str]()
    eagle = Candidate(drafter.name, FIXED, drafter.num_draft, partial(Fixed, 0, 0), None, drafter)
    rivals = [Candidate("ngram_gpu", FIXED, number, partial(Fixed, *NGRAM_GPU)) for number in NGRAM_GPU_LENGTHS]
    lookups = [
        Candidate.ours(name, GATED, {"method": name, "num_speculative_tokens": NUM_DRAFT}, runner=args.runner)
        for name in ("prompt_lookup", "suffix_lookup")
    ]
    columns = "eagle", "prompt_lookup", "suffix_lookup", "cascade", "of oracle", "of better stage", "lookup"
    table, shares, gains = Table("file, requests", *columns), list[float](), list[float]()
    for file in args.files:
        chosen = Chosen(args.requests, args.ids, 1500, drafter.name)
        traffic = read_traffic([file], lambda: None, chosen)
        for batch in args.batches:
            load, cell = Load(LLAMA_3_1_8B, batch, 0.0), f"{file.stem}, {batch}"
            plain = speed(traffic, load, None)
            alone, prompt, suffix = (speed(traffic, load, one) / plain for one in (eagle, *lookups))
            both = speed(traffic, load, beside(drafter, args.runner)) / plain
            share = both * plain / oracle_speed(traffic, load, drafter, 2 * plain)
            better, gain = (
                both / max(alone, prompt),
                suffix / max(1.0, *(speed(traffic, load, r) / plain for r in rivals)),
            )
            gains.append(gain)
            shares += [share] * (batch == 1)
            if (batch == 1 and share < LEAST) or (batch > 1 and better < BETTER) or gain < LOOKUP:
                missed.append(cell)
            table.add_row(cell, *(f"{value:.3f}" for value in (alone, prompt, suffix, both, share, better, gain)))
            print(cell, alone, prompt, suffix, both, share, better, gain, flush=True)
    mean, lookup_mean = statistics.mean(shares or [1.0]), statistics.geometric_mean(gains)
    Console(width=150).print(table)
    print(f"{mean:.3f} of the oracle in the mean at one request; lookup {lookup_mean:.3f} in the geometric mean")
    print(f"bars missed: {', '.join(missed) or 'none'}")
    return int(bool(missed) or mean < MEAN or lookup_mean < LOOKUP_MEAN)


if __name__ == "__main__":
    sys.exit(main())
