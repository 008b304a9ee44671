"""Texts that are made to be copied wrongly, and how much slower they make a request than no speculation.

    python benchmarks/bench_lures.py [--requests 32 --tokens 500]

An attacker who knows the lookup writes them. `deviate` copies 1 to 8 tokens and then differs by one. In `lure` the next
token is never that of the copy, though there is always one. `bait` copies 24 tokens and then lures for 24. `half` goes
on like the copy every other time. `random` has a small vocabulary, so that any token has an earlier match. Requests of
one kind are played together at the costs of an H100; drafting and the host cost nothing. The figure is the speed after
the first 100 tokens, relative to no speculation. It returns 1 where that is below 0.98."""

import argparse
import sys
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.methods import behind_gate, build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.prompt_lookup import PromptLookup
from vllm_specplugins.structures.arrays import view
from vllm_specplugins.tools.replay.costs import LLAMA_3_1_8B, Load
from vllm_specplugins.tools.replay.data import Traffic
from vllm_specplugins.tools.replay.simulate import simulate

LEAST, FIRST_TOKENS = 0.98, 100
PROMPT, VOCABULARY, RUN = 200, 50, 24
KINDS = "deviate", "lure", "bait", "half", "random"
METHODS = "prompt_lookup", "suffix_lookup"
NUM_DRAFT = 31


def goes_on(kind: str, rng: np.random.Generator, place: int, run: list[int]) -> bool:
    """Whether the output goes on like the copy; `run` holds how many tokens it still does."""
    match kind:
        case "deviate":
            run[0] = run[0] - 1 if run[0] else int(rng.integers(1, 9))
            return run[0] > 0
        case "bait":
            return place // RUN % 2 == 0
        case "half":
            return bool(rng.random() < 0.5)
    return False


def text(kind: str, seed: int, num_tokens: int) -> tuple[list[int], list[int]]:
    """A prompt and an output."""
    rng = np.random.default_rng(seed)
    lookup = PromptLookup(PromptLookupConfig(), ProposerContext(1 << 18, 1 << 16, 1, 1, lambda words: []))
    tokens, run = rng.integers(0, VOCABULARY, PROMPT).tolist(), [0]
    for place in range(num_tokens):
        new = int(rng.integers(0, VOCABULARY))
        if kind != "random":
            history = [view(np.array(tokens, np.int32))]
            draft = lookup.propose(DraftBatch(["request-0"], history, np.ones(1, np.int32), [{}]))
            copied = int(draft.token_ids[0, 0]) if draft.num_draft[0] else -1
            right = goes_on(kind, rng, place, run) and copied >= 0
            new = copied if right else (new + (new == copied)) % VOCABULARY
        tokens.append(new)
    return tokens[:PROMPT], tokens[PROMPT:]


def speed_after(texts: list[tuple[list[int], list[int]]], batch: int, config: dict[str, Any] | None) -> float:
    """Tokens a ms, after each request's first ones."""
    build = None if config is None else partial(build_proposer, behind_gate(parse_config(config)))
    sums = []
    for num_tokens in (FIRST_TOKENS, len(texts[0][1])):
        traffic = Traffic()
        for prompt, output in texts[:batch]:
            traffic.add(prompt, output[:num_tokens])
        totals = simulate(traffic, build, NUM_DRAFT if build else 0, Load(LLAMA_3_1_8B, batch, 0.0))
        sums.append((totals.emitted, totals.ms))
    (tokens, ms), (all_tokens, all_ms) = sums
    return (all_tokens - tokens) / (all_ms - ms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500)
    args = parser.parse_args()
    batches = sorted({1, min(8, args.requests), args.requests})
    table, missed = Table("text", "method", *(f"{batch} at a time" for batch in batches)), False
    for kind in KINDS:
        texts = [text(kind, seed, args.tokens) for seed in range(args.requests)]
        plain = {batch: speed_after(texts, batch, None) for batch in batches}
        for method in METHODS:
            config = {"method": method, "num_speculative_tokens": NUM_DRAFT}
            ratios = [speed_after(texts, batch, config) / plain[batch] for batch in batches]
            missed |= min(ratios) < LEAST
            table.add_row(kind, method, *(f"{ratio:.3f}" for ratio in ratios))
    Console().print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
