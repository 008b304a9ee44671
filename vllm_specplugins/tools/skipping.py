"""Implements `calibrate --layers`, which chooses the layers that a model skips when it drafts for itself (Zhang et al.
2023, "Draft & Verify"). A greedy search repeatedly removes the layer whose absence leaves the model's answers the
highest probability. Earlier tokens have the keys and values of all layers, as after verification. N: tokens of an
answer, V: vocabulary, K: num_draft.
"""

import argparse
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import say, serve_with, show_table, write_json
from vllm_specplugins.tools.training.scores import Text, mean_length, write_texts

HELD_OUT = 3  # of this number of answers, one is held out from the search
HIGHEST = 0.0  # highest score, which is the mean logarithm of a probability
PAYS = 1.05  # smallest estimated speed-up that may pay off
COLUMNS = ("same", "best K", "tok/step", "by layers")
LEGEND = (
    "same: share of held-out tokens for which these layers draft the model's token. tok/step: tokens per step at the "
    "best K. by layers: speed-up if a draft token costs its share of the layers, and nothing else takes time."
)


@dataclass(frozen=True, slots=True)
class Subset:
    """Drafting layers, scored on held-out answers."""

    layers: list[int]
    match_rate: float  # share of the tokens that they would have drafted at temperature 0
    num_draft: int  # K with the highest estimated speed
    tokens_per_step: float  # with that K
    guess: float  # estimated speed-up over no speculation

    @property
    def config(self) -> dict[str, Any]:
        return {"method": "early_exit", "layers": self.layers, "num_speculative_tokens": self.num_draft}


class Answer:
    """An answer of the model, with its keys and values in all layers."""

    def __init__(self, base: BaseModel, text: Text):
        token_ids, self._first = torch.tensor(text.row, device=base.model.device), text.begin - 1
        states = base.model.get_input_embeddings()(token_ids)
        self._base, self._cache = base, base.text_cache(states)
        self._fed, self._emitted = states[self._first :], token_ids[text.begin :]

    def drafts(self, layers: Sequence[int], num_draft: int) -> Iterator[torch.Tensor]:
        """Yields the logits [N - k, V] of these layers for tokens k = 0, 1, ... of drafts that begin at each token."""
        run = self._base.passes_beside(layers, self._cache, self._first)
        for k in range(num_draft):
            yield self._base.logits(run(self._fed, k + 1)[k:-1])

    def logprobs(self, layers: Sequence[int]) -> torch.Tensor:
        """Returns the logarithm of the probability that these layers give each token, [N]."""
        [logits] = self.drafts(layers, 1)
        return logits.log_softmax(-1).gather(-1, self._emitted[:, None])[:, 0]

    def matches(self, layers: Sequence[int], num_draft: int) -> torch.Tensor:
        """Returns whether each token of whole drafts is the answer's, if all earlier ones are, [K, N - K + 1]."""
        right = [logits.argmax(-1) == self._emitted[k:] for k, logits in enumerate(self.drafts(layers, num_draft))]
        return torch.stack([each[: len(right[-1])] for each in right]).float().cpu()


def score(answers: Sequence[Answer], layers: Sequence[int]) -> float:
    """Returns the mean logarithm of the probability that these layers give the answers' tokens."""
    return float(torch.cat([answer.logprobs(layers) for answer in answers]).mean())


def dropped_one(answers: Sequence[Answer], dropped: list[int], scores: list[float]) -> dict[str, Any]:
    """Returns the state of the search with one more layer `dropped`. The earlier `scores` are upper bounds: a score
    below the best one is not computed again (lazy greedy search, Minoux 1978)."""
    left = sorted(set(range(len(scores))) - set(dropped), key=lambda layer: -scores[layer])
    scores, best = list(scores), left[0]
    for layer in left:
        if layer != left[0] and scores[layer] <= scores[best]:
            break
        scores[layer] = score(answers, sorted(set(left) - {layer}))
        best = max(best, layer, key=lambda each: scores[each])
    return {"dropped": [*dropped, best], "scores": scores}


@torch.no_grad()
def choose_layers(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> None:
    """Searches on some answers of the model, scores sets of `args.layers` layers on others, and shows them."""
    base, fewest = BaseModel.load(args.model, "cuda" if torch.cuda.is_available() else "cpu"), min(args.layers)
    if not 1 <= fewest <= max(args.layers) < base.num_layers:
        raise ConfigError(f"--layers must be from 1 to {base.num_layers - 1} for this model, not {brief(args.layers)}.")
    if args.dtype not in (None, "auto"):
        base.model.to(getattr(torch, args.dtype))
    with progress() as bars:
        task = bars.add_task("asking the model", total=None)
        texts = answers_of(base, prompts, args)
        searched = [Answer(base, text) for index, text in enumerate(texts) if (index + 1) % HELD_OUT]
        facts = {"model": args.model, "answers": zlib.crc32(json.dumps([text.row for text in texts]).encode())}
        state = resumed(args.output_json, facts) or {"dropped": [], "scores": [HIGHEST] * base.num_layers}
        bars.update(task, description="dropping layers", total=base.num_layers - fewest)
        while (num_dropped := len(state["dropped"])) < base.num_layers - fewest:
            state = dropped_one(searched, **state)
            bars.update(task, completed=num_dropped + 1)
            write_json(args.output_json, {**facts, **state})
        bars.remove_task(task)
        bars.add_task("scoring held-out answers", total=None)
        heldout = [Answer(base, text) for text in texts[HELD_OUT - 1 :: HELD_OUT]]
        subsets = [subset(heldout, state, size, args.max_draft) for size in args.layers]
    write_json(args.output_json, {**facts, **state, "subsets": [asdict(row) for row in subsets]})
    show(subsets)


def answers_of(base: BaseModel, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> list[Text]:
    """Returns the model's greedy continuation of each prompt."""
    texts = [write_texts(base, [prompt], 0.0, len(prompt), len(prompt) + args.output_len)[0] for prompt in prompts]
    whole = [text for text in texts if len(text.row) - text.begin > args.max_draft]
    if len(whole) < HELD_OUT:
        raise ConfigError(
            f"--dataset-path must have {HELD_OUT} prompts or more that the model continues by more than "
            f"{args.max_draft} tokens, not {len(whole)}."
        )
    return whole


def resumed(path: Path | None, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the state of an earlier search on the same answers in the file of --output-json; None if there is
    none."""
    try:
        earlier = json.loads(path.read_text()) if path else {}
        if all(earlier[name] == value for name, value in facts.items()):
            return {name: earlier[name] for name in ("dropped", "scores")}
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


def subset(answers: Sequence[Answer], state: dict[str, Any], size: int, max_num_draft: int) -> Subset:
    """Returns the best set of this number of layers, with its best K."""
    num_layers = len(state["scores"])
    layers = sorted(set(range(num_layers)) - set(state["dropped"][: num_layers - size]))
    bits = [answer.matches(layers, max_num_draft) for answer in answers]
    tokens = {k: mean_length([matches[:k] for matches in bits]) for k in range(1, max_num_draft + 1)}
    gains = {k: emitted / (1 + k * size / num_layers) for k, emitted in tokens.items()}
    best = max(gains, key=lambda k: gains[k])
    return Subset(layers, torch.cat([matches[0] for matches in bits]).mean().item(), best, tokens[best], gains[best])


def show(subsets: Sequence[Subset]) -> None:
    rows = [
        [f"{len(row.layers)}", f"{row.match_rate:.1%}", f"{row.num_draft}", f"{row.tokens_per_step:.2f}",
         f"{row.guess:.2f}x"] for row in subsets
    ]  # fmt: skip
    show_table(COLUMNS, {"": rows}, "layers")
    best = max(subsets, key=lambda row: row.guess)
    verdict = "Measure it with `bench` before you serve it." if best.guess > PAYS else "No set is likely to pay off."
    say(f"{LEGEND}\n\n{verdict}\n{serve_with(best.config)}")
