"""The gate on a text that copies, then misleads, then copies again: a recorded trace, and its plot.

    python tests/bench/bench_gate_trace.py --out FOLDER [--step-ms 28 --token-ms 1.3]

The text is replayed against a real cascade (two prompt lookups): a draft is accepted as far as the text goes on like
it. Its middle is made of the first part's tokens, so that every token has occurred before, and no two of them stand
behind each other a second time, so that whatever followed is wrong. A step costs --step-ms, and --token-ms for each
draft token verified (the defaults were measured on the widened demo model). The bars: off within 64 tokens of the
change, on again within 32.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))
from prompts import load_prompts
from transformers import AutoTokenizer

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.tools.replay.costs import CostTable
from vllm_specplugins.tools.replay.data import Traffic
from vllm_specplugins.tools.replay.simulate import Load, simulate

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
K = 6
PART = 200  # tokens of each of the three parts
OFF_WITHIN, ON_WITHIN = 64, 32
CONFIG = {
    "method": "cascade",
    "num_speculative_tokens": K,
    "stages": [{"method": "prompt_lookup", "min_ngram": 5}, {"method": "prompt_lookup", "min_ngram": 1}],
}


def text() -> tuple[list[int], list[int]]:
    """(prompt, output): held-out code; its repetition, its tokens in an order that never was, its repetition again."""
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    code = [token for prompt in load_prompts("continue", 2) for token in tokenizer.encode(prompt)][:PART]
    rng = random.Random(0)
    followed = set(itertools.pairwise(code))
    middle = code[-1:]
    while len(middle) <= PART:
        token = rng.choice(code)
        if (middle[-1], token) not in followed:
            followed.add((middle[-1], token))
            middle.append(token)
    return code, [*code, *middle[1:], *code]


class Noisy:
    """A cascade that is told times which vary, and writes down what became of its drafts."""

    def __init__(self, context: ProposerContext):
        self._cascade, self._rng = build_proposer(parse_config(CONFIG), context), random.Random(1)
        self.steps: list[tuple[int, int, int]] = []
        self._place = 0

    def propose(self, batch: DraftBatch) -> Draft:
        return self._cascade.propose(batch)

    def observe(self, feedback: Feedback) -> None:
        if feedback.step_ms is None:  # the prompt's
            return
        num_draft, num_accepted = int(feedback.num_draft[0]), int(feedback.num_accepted[0])
        self.steps.append((self._place, num_draft, num_accepted))
        self._place += 1 + num_accepted
        self._cascade.observe(replace(feedback, step_ms=feedback.step_ms * self._rng.lognormvariate(0, 0.03)))

    def forget(self, request_ids: Sequence[str]) -> None:
        self._cascade.forget(request_ids)


def played(step_ms: float, token_ms: float) -> list[tuple[int, int, int]]:
    """For each step: tokens of the output before it, tokens drafted, tokens accepted."""
    traffic, made = Traffic(), []
    traffic.add(*text())

    def build(context: ProposerContext) -> Noisy:
        made.append(Noisy(context))
        return made[0]

    simulate(traffic, build, K, Load(CostTable.line(step_ms, token_ms)))
    return made[0].steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gate_trace.json and gate_trace.png")
    parser.add_argument("--step-ms", type=float, default=28.0)
    parser.add_argument("--token-ms", type=float, default=1.3)
    args = parser.parse_args()
    steps = played(args.step_ms, args.token_ms)
    off = next(place for place, num_draft, _ in steps if place >= PART and not num_draft) - PART
    drafted_late = sum(num for place, num, _ in steps if PART + OFF_WITHIN <= place < 2 * PART)
    on = next(place for place, num_draft, _ in steps if place >= 2 * PART and num_draft >= 3) - 2 * PART
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gate_trace.json").write_text(json.dumps(steps))
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.add_subplot()
    places, drafted, accepted = zip(*steps, strict=True)
    axes.step(places, drafted, where="post", label="drafted", color="tab:orange")
    axes.fill_between(places, accepted, step="post", alpha=0.5, label="accepted", color="tab:green")
    for border, name in zip((0, PART, 2 * PART), ("copies", "misleads", "copies again"), strict=True):
        axes.axvline(border, color="gray", linewidth=0.8)
        axes.text(border + 3, K + 0.3, name)
    axes.set(xlabel="tokens of the output", ylabel="tokens a step", ylim=(0, K + 1), title="What the gate lets through")
    axes.legend(loc="center")
    figure.savefig(args.out / "gate_trace.png", dpi=100)
    print(f"off {off} tokens after the text began to mislead (bar: {OFF_WITHIN}); {drafted_late} tokens drafted in the "
          f"{PART - OFF_WITHIN} after the bar; on {on} tokens after it copied again (bar: {ON_WITHIN})")  # fmt: skip
    return 0 if off <= OFF_WITHIN and on <= ON_WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
