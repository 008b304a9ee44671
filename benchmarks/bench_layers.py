"""Layers that draft for the whole model: agreement on held-out answers of the chat model, and speed at published costs.

    python benchmarks/bench_layers.py FOUND.json [--json FIGURES.json]

FOUND.json is what `calibrate CHAT_MODEL --dataset-path vllm_specplugins/tools/bench/prompts.jsonl --prompt-tokens 640
--num-prompts 30 --output-len 64 --layers ...` wrote. The answers are those to the other 34 prompts. A step costs what
was fitted for Llama 3.1 8B on an H100 (replay/costs.py). A layer costs its share of it, by parameters, and so does one
of Llama 3.1 70B. The subsets have the acceptance that they have on the chat model, for the same share of the layers. No
engine and no clock: the same figures everywhere.

A draft token after a wrong one is drafted at the cost of one in its place in the text. K is the best of 1 to 8, and a
draft may stop after a token of low probability. "a > b" is `verify`: stage b checks what a drafted, and extends it.
"lookup|a" takes the lookup's draft after a long match, and else that of a.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.bench.workloads import PROMPTS
from vllm_specplugins.tools.data import token_rows
from vllm_specplugins.tools.files import CHAT_MODEL, every_nth
from vllm_specplugins.tools.replay.costs import LLAMA_3_1_8B
from vllm_specplugins.tools.report import say, show_table, versions
from vllm_specplugins.tools.skipping import Answer
from vllm_specplugins.tools.training.scores import Text, write_texts

EXITS, NUM_ASKED, PROMPT_TOKENS, MAX_NGRAM, LONGEST = (22, 26), 30, 640, 8, 31
LONG_MATCH = 3
STOPS = (0.0, 0.3, 0.5, 0.7)  # probability of a token with which a draft ends
AROUND_MS = 1.207  # of the step of 8B: outside of the forward pass
LAYER_MS = (LLAMA_3_1_8B.step_ms(1) - AROUND_MS) / (32 + 2.4)  # the head has the parameters of 2.4 layers
TOKEN_MS = 0.021


@dataclass(frozen=True)
class Model:
    """Costs in ms."""

    name: str
    num_layers: int
    layer_ms: float
    head_ms: float

    def step(self, num_tokens: int) -> float:
        return AROUND_MS + self.num_layers * self.layer_ms + self.head_ms + TOKEN_MS * num_tokens

    def draft(self, share: float) -> float:
        return share * self.num_layers * self.layer_ms + self.head_ms


MODELS = [
    Model("8B, 32 layers", 32, LAYER_MS, 2.4 * LAYER_MS),
    Model("70B, 80 layers", 80, 3.93 * LAYER_MS, 4.82 * LAYER_MS),
]


@dataclass(frozen=True)
class Drafted:
    """What a stage drafts at each place of an answer: ids and probabilities, [N] each."""

    ids: np.ndarray
    probs: np.ndarray


@dataclass(frozen=True)
class Played:
    """An answer: all token ids, the place of the first one that the model wrote, and what subsets of layers draft."""

    row: list[int]
    begin: int
    drafted: dict[str, Drafted]


def looked_up(row: Sequence[int], place: int) -> tuple[int, int]:
    """The place of the token after the latest longest match of the tokens before `place`, and the match's length."""
    for length in range(min(MAX_NGRAM, place - 1), 0, -1):
        wanted = row[place - length : place]
        for start in range(place - length - 1, -1, -1):
            if row[start : start + length] == wanted:
                return start + length, length
    return 0, 0


class Play:
    """One answer, step by step, of stages by name, the last of which the target verifies."""

    def __init__(self, answer: Played, model: Model, shares: dict[str, float], found: dict[int, tuple[int, int]]):
        self._answer, self._model, self._shares, self._found = answer, model, shares, found

    def guess(self, stage: str, place: int, count: int, stop: float) -> tuple[list[int], float]:
        """Up to `count` tokens of a stage that is alone, and their cost."""
        row, begin = self._answer.row, self._answer.begin
        count = min(count, len(row) - place)
        if stage == "lookup":
            if place not in self._found:
                self._found[place] = looked_up(row, place)
            start, length = self._found[place]
            return (row[start : min(place, start + count)] if length else []), 0.0
        if "|" in stage:  # a lookup after a long match, or else the layers
            ids, _ = self.guess("lookup", place, LONGEST, stop)
            return (ids, 0.0) if self._found[place][1] >= LONG_MATCH else self.guess(stage[7:], place, count, stop)
        drafted, ids = self._answer.drafted[stage], []
        for at in range(place - begin, place - begin + count):
            ids.append(int(drafted.ids[at]))
            if drafted.probs[at] < stop:
                break
        return ids, len(ids) * self._model.draft(self._shares[stage])

    def draft(self, stages: Sequence[str], place: int, count: int, stop: float) -> tuple[list[int], float]:
        """What the last stage drafts, pass by pass, each of which checks what the others guess."""
        *cheaper, last = stages
        if not cheaper:
            return self.guess(last, place, count, stop)
        ids, ms = list[int](), 0.0
        wanted, _ = self.guess(last, place, count, stop)
        while len(ids) < len(wanted):
            guess, own_ms = self.draft(cheaper, place + len(ids), len(wanted) - len(ids) - 1, stop)
            right = agreeing(guess, wanted[len(ids) :])
            ms += own_ms + self._model.draft(self._shares[last]) + TOKEN_MS * len(guess)
            ids += wanted[len(ids) : len(ids) + right + 1]
        return ids, ms

    def run(self, stages: Sequence[str], count: int, stop: float) -> tuple[int, float]:
        """Tokens after the first, and ms."""
        place, ms = self._answer.begin + 1, 0.0
        while place < len(self._answer.row):
            ids, own_ms = self.draft(stages, place, count, stop) if stages else ([], 0.0)
            place += min(1 + agreeing(ids, self._answer.row[place:]), len(self._answer.row) - place)
            ms += own_ms + self._model.step(1 + len(ids))
        return len(self._answer.row) - self._answer.begin - 1, ms


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def agreement(answers: Sequence[Played], name: str) -> tuple[float, float]:
    """The share of right tokens, and its standard error, by answers drawn again (a bootstrap)."""
    counts = np.array(
        [[(a.drafted[name].ids == np.array(a.row[a.begin :])).sum(), len(a.row) - a.begin] for a in answers]
    )
    drawn = counts[np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))].sum(1)
    right, num_tokens = counts.sum(0)
    return float(right / num_tokens), float((drawn[:, 0] / drawn[:, 1]).std())


def speed(
    answers: Sequence[Played], model: Model, shares: dict[str, float], stages: Sequence[str], cache: list
) -> dict:
    """The best speed of stages over no speculation, with its K and stop."""

    def ms_a_token(stages: Sequence[str], count: int, stop: float) -> float:
        runs = [
            Play(answer, model, shares, found).run(stages, count, stop)
            for answer, found in zip(answers, cache, strict=True)
        ]
        return sum(ms for _, ms in runs) / sum(tokens for tokens, _ in runs)

    counts = (3, 5, 8, 15, LONGEST) if stages[0] == "lookup" else range(1, 9)
    plain = ms_a_token((), 0, 0.0)
    tried = {
        pair: plain / ms_a_token(stages, *pair) for pair in product(counts, STOPS if stages[-1] != "lookup" else (0.0,))
    }
    (count, stop), best = max(tried.items(), key=lambda item: item[1])
    return {"stages": " > ".join(stages), "speed": round(best, 3), "K": count, "stop": stop}


@torch.no_grad()
def play_answers(layers: dict[str, list[int]], num_answers: int, num_tokens: int, file: Path | None) -> list[Played]:
    base, tokenizer = BaseModel.load(str(CHAT_MODEL), "cpu"), load_tokenizer(str(CHAT_MODEL))
    prompts = token_rows([PROMPTS], tokenizer, PROMPT_TOKENS)
    others = sorted(set(range(len(prompts))) - set(every_nth(len(prompts), NUM_ASKED)))
    texts = json.loads(file.read_text()) if file and file.exists() else {}
    answers = []
    for number in track(every_nth(len(others), num_answers), "answers"):
        prompt = prompts[others[number]]
        if f"{others[number]}" not in texts:
            [text] = write_texts(base, [prompt], 0.0, len(prompt), len(prompt) + num_tokens)
            texts[f"{others[number]}"] = text.row
        text = Text(texts[f"{others[number]}"], len(prompt), 0.0, 0)
        answer, drafted = Answer(base, text), {}
        for name, own in layers.items():
            probs, ids = next(answer.drafts(own, 1)).softmax(-1).max(-1)
            drafted[name] = Drafted(ids.numpy(), probs.numpy())
        answers.append(Played(text.row, text.begin, drafted))
    if file:
        file.write_text(json.dumps(texts))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("found", type=Path)
    parser.add_argument("--answers", type=int, default=34)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sizes", type=lambda text: [*map(int, text.split(","))], default=[15, 20, 22, 24, 26])
    parser.add_argument("--texts", type=Path, help="where the answers are read from, or else written to")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dropped = json.loads(args.found.read_text())["dropped"]
    sizes = [size for size in args.sizes if 30 - size <= len(dropped)]
    layers = {f"{size}": sorted(set(range(30)) - set(dropped[: 30 - size])) for size in sizes}
    layers |= {f"exit {end}": list(range(end)) for end in EXITS}
    answers = play_answers(layers, args.answers, args.tokens, args.texts)
    shares = {name: len(own) / 30 for name, own in layers.items()}
    same = {name: agreement(answers, name) for name in layers}
    figures = {"agreement": {name: [round(value, 4) for value in pair] for name, pair in same.items()}, "speeds": []}
    rows = [[name, f"{share:.1%}", f"{error:.1%}"] for name, (share, error) in same.items()]
    show_table(["agreement", "standard error"], {"": rows}, "layers")
    few, many = [f"{size}" for size in sizes if size < 24], [f"{size}" for size in sizes if size >= 24]
    stages = [("lookup",), *((name,) for name in layers)]
    stages += [(f"lookup|{name}",) for name in layers if "exit" not in name]
    stages += [("lookup", name) for name in layers if "exit" not in name]
    stages += [pair for pair in product(few, many) if int(pair[0]) < int(pair[1])]
    stages += [("lookup", *pair) for pair in product(few, many) if int(pair[0]) < int(pair[1])]
    cache: list = [{} for _ in answers]
    for model in MODELS:
        rows = [
            speed(answers, model, shares, each, cache) | {"model": model.name} for each in track(stages, model.name)
        ]
        figures["speeds"] += rows
        best = sorted(rows, key=lambda row: -row["speed"])
        show_table(
            ["K", "stop", "speed"],
            {model.name: [[r["stages"], str(r["K"]), f"{r['stop']}", f"{r['speed']:.2f}x"] for r in best]},
        )
    say(f"{sum(len(a.row) - a.begin for a in answers)} tokens of {len(answers)} answers")
    if args.json:
        args.json.write_text(
            json.dumps(figures | {"layers": layers, "versions": versions("torch", "transformers")}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
