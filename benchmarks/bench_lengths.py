"""How long drafts should be: the default behind its gate beside every fixed length, and vLLM's n-gram on a GPU.

    python benchmarks/bench_lengths.py EDITS.jsonl ... [--batches 1 8 32 64 --costs lengths h100]

A file holds whole-file edits, {"prompt", "output"} a line, as tests/traces/edits.py or a git history gives them. Played
at temperature 0, with Mistral's vocabulary of 32 k tokens: the edits, the files' own continuations (the last two thirds
behind the first), batches of which 1 in 8 and 1 in 2 are edits and the others such continuations, and texts that turn
from prose (that is, tokens of other files in an order that never was) to copying after 500 tokens. A step costs what
tools/replay/costs.py says, or, as `lengths`, 5.3 ms, 6 us a token to 180, and 27 us behind. `ngram_gpu` is vLLM's of
Model Runner V2, which verifies K tokens in every step. It returns 1 where a bar is missed.
"""

import argparse
import json
import random
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mistral_common
import sentencepiece
from rich.console import Console
from rich.table import Table

from vllm_specplugins.draft import Draft, DraftBatch, ProposerContext
from vllm_specplugins.methods import behind_gate, build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.tools.replay.candidates import NGRAM_GPU, NGRAM_GPU_LENGTHS, Fixed
from vllm_specplugins.tools.replay.costs import H100, CostTable, Load
from vllm_specplugins.tools.replay.data import Traffic
from vllm_specplugins.tools.replay.simulate import simulate

LONGEST = 31
LENGTHS = 2, 5, 8, 12, 15, 24, 31
COSTS = {
    "lengths": CostTable({1: 5.306, 180: 6.38, 181: 6.407}),
    "cpu": CostTable({1: 42.0, 2: 41.0, 3: 39.0, 4: 38.0, 6: 38.0, 16: 57.0, 32: 105.0}),  # docs/research
    "h100": H100,
}
BEST, MIXED_BEST, TWICE = 0.97, 0.95, 2.0  # of the best; where few copy; of ngram_gpu's K = 5 on edits at 1 and 8
PROSE, TURN_STEPS = 500, 16
Pair = tuple[list[int], list[int]]  # prompt and output


def continued(pair: Pair) -> Pair:
    output = pair[1]
    return output[: len(output) // 3], output[len(output) // 3 :]


def cells(edits: list[Pair], at_least: int) -> dict[str, list[Pair]]:
    """Texts by name, so many of each or more."""
    rng = random.Random(0)
    plain = [continued(pair) for pair in edits]
    some = [edits[at % len(edits)] for at in range(at_least)]
    others = [plain[(at + 1) % len(plain)] for at in range(at_least)]
    mixed = {
        f"1 in {part} copies": [some[at] if at % part == 0 else others[at] for at in range(at_least)] for part in (8, 2)
    }
    for texts in mixed.values():
        rng.shuffle(texts)
    return {"edits": some, "continuations": others, **mixed}


def speed(texts: list[Pair], load: Load, config: dict[str, Any] | None, build: Any = None) -> float:
    """Tokens a ms."""
    traffic, width = Traffic(), 0 if config is None else config["num_speculative_tokens"]
    for prompt, output in texts:
        traffic.add(prompt, output)
    if config is not None and build is None:
        build = partial(build_proposer, behind_gate(parse_config(config)))
    return simulate(traffic, build, width, load).tokens_per_ms


def turn_steps(edits: list[Pair], costs: CostTable) -> int:
    """After how many steps of copying, at the most, the longest draft is made, one request at a time."""
    rng, found = random.Random(1), []
    for (_, text), (_, other) in pairwise(edits[:5]):
        copied = text[:400]
        prose = [rng.choice(other) for _ in range(PROSE)]
        traffic, steps = Traffic(), list[tuple[int, int]]()
        traffic.add(copied, [*prose, *copied])

        def build(context: ProposerContext, steps: list[tuple[int, int]] = steps) -> Any:
            own = build_proposer(behind_gate(parse_config(default())), context)
            propose = own.propose

            def watched(batch: DraftBatch) -> Draft:
                draft = propose(batch)
                steps.append((len(batch.token_ids[0]), int(draft.num_draft[0])))
                return draft

            own.propose = watched  # type: ignore[method-assign]
            return own

        simulate(traffic, build, LONGEST, Load(costs, 1, 0.0))
        after = [count for length, count in steps if length > len(copied) + PROSE]
        found.append(next((at for at, count in enumerate(after) if count == LONGEST), len(after)))
    return max(found)


def default() -> dict[str, Any]:
    return {"method": "prompt_lookup", "num_speculative_tokens": LONGEST}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, default=8, help="of each file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--costs", nargs="+", choices=COSTS, default=["lengths", "h100"])
    args = parser.parse_args()
    path = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
    encode = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode
    rows = [json.loads(line) for file in args.files for line in file.read_text().splitlines()[: args.rows]]
    edits = [(encode(row["prompt"]), encode(row["output"])) for row in rows]
    table = Table("text", "costs", "requests", "ngram_gpu 5, 15, 31", "fixed lengths", "default", "of the best", "bar")
    missed = False
    for batch in args.batches:
        for name, texts in cells(edits, max(len(edits), 2 * batch)).items():
            is_mixed = name.startswith("1 in")
            if is_mixed and batch not in (8, 32):
                continue
            for costs in args.costs:
                load = Load(COSTS[costs], batch, 0.0)
                plain = speed(texts, load, None)
                theirs = [
                    speed(texts, load, {"num_speculative_tokens": k}, partial(Fixed, *NGRAM_GPU)) / plain
                    for k in NGRAM_GPU_LENGTHS
                ]
                fixed = [
                    speed(texts, load, {**default(), "gate": "off", "num_speculative_tokens": k}) / plain
                    for k in LENGTHS
                ]
                own = speed(texts, load, default()) / plain
                of_best = own / max(1.0, *theirs, *fixed)
                holds = of_best >= (MIXED_BEST if is_mixed else BEST)
                holds &= name != "edits" or batch > 8 or own >= TWICE * theirs[0]
                missed |= not holds
                figures = (" ".join(f"{value:.2f}" for value in values) for values in (theirs, fixed))
                words = name, costs, str(batch), *figures, f"{own:.2f}", f"{of_best:.3f}", "" if holds else "missed"
                table.add_row(*words)
                print(*words, sep=" | ", flush=True)
    for costs in args.costs:
        steps = turn_steps(edits, COSTS[costs])
        missed |= steps > TURN_STEPS
        print(f"{costs}: from prose to copying, the longest draft after {steps} steps (bar: {TURN_STEPS})")
    Console(width=160).print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
