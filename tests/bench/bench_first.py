"""Lookup, else jump: when does it pay? Both are played along texts that the model says, without a clock.

    python tests/bench/bench_first.py --model .cache/plain/target --jump .cache/plain/jump

The texts are held-out code, cut before it loops at temperature 0, and edits. A step drafts what the lookup found, if
its match has so many tokens, and else by the jump; the next one begins where it has ended. It costs a step of no
speculation, and so much for each token that is verified, and that the jump drafts. Printed is the best speed of the
jump alone, of the lookup alone, and of both, with the shortest match and the K that have it.
"""

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_printed import loaded, written
from bench_trained import before_loop

from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.bench.workloads import make_workload
from vllm_specplugins.tools.training.scores import Text, _probabilistic

NUM_PROMPTS, NUM_PROMPT, NUM_TOKENS = 30, 129, 48
MAX_MATCH, MOST_FOUND, MOST_JUMPED = 8, 8, 4
NEVER = MAX_MATCH + 1
# name -> of a plain step: a token that is verified, a token that the jump drafts
COSTS = {"a CPU": (0.12, 0.03), "verifying nearly free": (0.01, 0.04)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step may begin.

    Args:
        match: tokens of the n-gram that the lookup has found; 0: none.
        right: how many of the tokens behind it the model says.
        chances: [MOST_JUMPED] of each of the jump's tokens to be accepted, if those before it are.
    """

    match: int
    right: int
    chances: list[float]


def looked_up(row: list[int], end: int) -> tuple[int, int]:
    """`match` and `right` behind row[:end]: the longest n-gram, where it stood last."""
    for size in range(min(MAX_MATCH, end - 1), 1, -1):
        for start in range(end - size - 1, -1, -1):
            if row[start : start + size] == row[end - size : end]:
                said = zip(row[start + size : end], row[end : end + MOST_FOUND], strict=False)
                return size, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], said))
    return 0, 0


@torch.no_grad()
def places(base: BaseModel, jump: Any, text: Text, num_tokens: int) -> list[Place]:
    """Of a text's first tokens."""
    [states] = base.hidden_states([text.row])
    full = base.logits(states[-1])
    chances = []
    for guess in jump.guesses(base, states, MOST_JUMPED):
        first = text.begin - 1  # a guess about a token begins with the row's second one
        begin = guess.start + first + 1
        said = torch.tensor(text.row[begin : begin + num_tokens])
        logits, model = guess.logits[first:][: len(said)], guess.of(full)[first:][: len(said)]
        accepted = _probabilistic(text, begin, said, logits, model) if text.temperature else logits.argmax(-1) == said
        chances.append(accepted.float())
    count = min(map(len, chances))
    rows = torch.stack([own[:count] for own in chances]).T.tolist()
    return [Place(*looked_up(text.row, text.begin + 1 + index), own) for index, own in enumerate(rows)]


def speed(
    texts: list[list[Place]], least_match: int, num_found: int, num_jumped: int, costs: tuple[float, float]
) -> float:
    """Tokens a step over what a step costs."""
    verify, draft = costs
    tokens = cost = 0.0
    for text in texts:
        begun = [1.0] + [0.0] * (len(text) + MOST_FOUND + 1)  # chance that a step begins there
        for index, place in enumerate(text):
            ends, price = step(place, least_match, num_found, num_jumped, verify, draft)
            for count, chance in enumerate(ends):
                begun[index + 1 + count] += begun[index] * chance
                tokens += begun[index] * chance * (count + 1)
            cost += begun[index] * price
    return tokens / cost


def step(
    place: Place, least_match: int, num_found: int, num_jumped: int, verify: float, draft: float
) -> tuple[list[float], float]:
    """The chance of each number of accepted tokens, and what it costs."""
    if place.match >= least_match:
        return [0.0] * min(num_found, place.right) + [1.0], 1 + verify * num_found
    kept = [1.0, *itertools.accumulate(place.chances[:num_jumped], float.__mul__)]
    return [own - after for own, after in itertools.pairwise(kept)] + kept[-1:], 1 + (verify + draft) * num_jumped


def best(texts: list[list[Place]], costs: tuple[float, float], matches: range, jumped: range) -> str:
    settings = itertools.product(matches, range(1, MOST_FOUND + 1), jumped)
    found = max((speed(texts, *setting, costs), setting) for setting in settings)
    return f"{found[0]:.2f} (match {found[1][0]}, K {found[1][1]} / {found[1][2]})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--jump", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    base, jump = BaseModel.load(args.model, "cpu"), loaded(args.jump)
    for kind, heat in itertools.product(("code", "copy"), (0.0, 1.0)):
        prompts = make_workload(kind, load_tokenizer(args.model), NUM_PROMPTS, NUM_PROMPT).prompts
        texts = []
        for prompt in prompts:
            [text] = written(base, [prompt], heat, NUM_TOKENS + MOST_FOUND)
            said = text.row[text.begin :]
            length = min(NUM_TOKENS, before_loop(said) if kind == "code" and not heat else len(said))
            if length > NUM_TOKENS // 2:
                texts.append(places(base, jump, text, length))
        print(f"{kind}, temperature {heat:g}: {len(texts)} texts")
        for name, costs in COSTS.items():
            alone = best(texts, costs, range(NEVER, NEVER + 1), range(1, MOST_JUMPED + 1))
            lookup = best(texts, costs, range(2, NEVER), range(1))
            both = best(texts, costs, range(2, NEVER), range(1, MOST_JUMPED + 1))
            print(f"  {name}: jump {alone}, lookup {lookup}, both {both}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
