"""Defines the grid of a verification: methods, and cells of sampling parameters. A cell is one test of a method."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.engine.harness.samples import Request
from vllm_specplugins.tools.lossless.model import VOCAB_SIZE

NUM_TOKENS = 4  # of an outcome: the first is never drafted; with K = 2 the last may be drafted, recovered or a bonus
NUM_GREEDY_TOKENS = 24
NUM_GREEDY_PROMPTS = 24
MIN_TURNS = 3
PER_TURN = 4  # outputs of a request: the requests of a cell take turns, so they share the engine's steps

_DRAFTS = {"num_speculative_tokens": 2, "gate": "off"}  # drafts never pay off for a tiny model
_LOOKUP = {"method": "prompt_lookup", "min_ngram": 1}
_EXIT = {"method": "early_exit", "exit_layer": 1}
_SAMPLED_EXIT = {**_EXIT, "draft_sample_method": "probabilistic"}
_JUMP = {"method": "jump", "draft_sample_method": "probabilistic"}
_CASCADE = {"method": "cascade", "gate": "off"}


def _after_lookup(method: str) -> dict[str, Any]:
    stage = {"method": method, "model": f"MADE/{method}", "num_speculative_tokens": 4}
    return {**_CASCADE, "stages": [_LOOKUP, stage], "num_speculative_tokens": 12}


METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {**_LOOKUP, **_DRAFTS},
    "suffix_lookup": {"method": "suffix_lookup", "store_bytes": 1 << 22, **_DRAFTS},
    "early_exit": {**_EXIT, **_DRAFTS},
    "early_exit-probabilistic": {**_SAMPLED_EXIT, **_DRAFTS},
    "early_exit-coupled": {**_EXIT, "draft_sample_method": "coupled", **_DRAFTS},
    "early_exit-look_ahead": {**_SAMPLED_EXIT, "look_ahead": "MADE/look_ahead", **_DRAFTS},
    "jump-probabilistic": {**_JUMP, "head": "MADE/jump", **_DRAFTS},
    "jump-coupled": {**_JUMP, "head": "MADE/jump", "draft_sample_method": "coupled", **_DRAFTS},
    "cascade-verify": {**_CASCADE, "stages": [_LOOKUP, _SAMPLED_EXIT], "policy": "verify", **_DRAFTS},
    "cascade-auto": {**_CASCADE, "stages": [{**_LOOKUP, "min_ngram": 2}, _SAMPLED_EXIT], **_DRAFTS},
    "cascade-jump": {**_CASCADE, "stages": [{**_LOOKUP, "min_ngram": 2}, {**_JUMP, "head": "MADE/jump"}], **_DRAFTS},
    "cascade-draft_model": _after_lookup("draft_model"),
    "cascade-eagle": _after_lookup("eagle"),
}


def placed(config: Any, folder: Path) -> Any:
    """A configuration that uses the trained parts which `model.write_parts` has written to a folder.

    >>> placed({"method": "cascade", "stages": [{"method": "jump", "head": "MADE/jump"}]}, Path("/parts"))
    {'method': 'cascade', 'stages': [{'method': 'jump', 'head': '/parts/jump'}]}
    """
    return json.loads(json.dumps(config).replace("MADE/", f"{folder}/"))


# Keyword arguments of SamplingParams, and their names in a table.
TOP_K, TOP_P, MIN_P = {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.15}
CUTS = {**TOP_K, **TOP_P, **MIN_P}
REPETITION = {"repetition_penalty": 1.7}
PENALTIES = {**REPETITION, "presence_penalty": 0.8, "frequency_penalty": 0.6}
REWARDS = {"presence_penalty": -1.5, "frequency_penalty": -1.0}  # repeats are likely, so a gap in a history shows
BIAS = {"logit_bias": {2: 1.5, 7: -3.0, 9: 2.5}}
ALLOWED = {"allowed_token_ids": [0, 2, 3, 5, 6, 8]}
MIN_TOKENS = {"stop_token_ids": [0, 6], "min_tokens": 2}
SEEDED = {"seed": 1}
SHORT = {
    "temperature": "T", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p", "repetition_penalty": "rep",
    "presence_penalty": "pres", "frequency_penalty": "freq", "min_tokens": "min",
}  # fmt: skip
WORDS = {"logit_bias": "bias", "allowed_token_ids": "allowed", "stop_token_ids": "stops", "seed": "seeds"}


@dataclass(frozen=True, slots=True)
class Cell:
    """Sampling parameters, whose samples are tested together, for each prompt."""

    name: str
    params: tuple[dict[str, Any], ...]

    @property
    def is_greedy(self) -> bool:
        return all(params["temperature"] == 0 for params in self.params)


def cell(temperature: float, *edits: dict[str, Any]) -> Cell:
    """Returns a cell with a temperature and further parameters.

    >>> cell(0.7, TOP_K, SEEDED).name
    'T 0.7, top-k 3, seeds'
    """
    params = {"temperature": temperature}
    for edit in edits:
        params |= edit
    words = [f"{SHORT[key]} {value}" if key in SHORT else WORDS[key] for key, value in params.items()]
    return Cell(", ".join(words), (params,))


def cells() -> list[Cell]:
    return [
        cell(0.0),
        cell(0.0, PENALTIES),
        cell(0.0, BIAS),
        cell(1.0),
        cell(0.7, TOP_K),
        cell(1.5, TOP_P),
        cell(1.0, MIN_P),
        cell(1.5, CUTS),
        cell(0.7, REPETITION),
        cell(1.5, PENALTIES),
        cell(1.0, REWARDS),
        cell(1.0, BIAS),
        cell(1.0, ALLOWED, TOP_P),
        cell(0.7, MIN_TOKENS, {"top_k": 6}),
        cell(1.5, TOP_K, SEEDED),
        cell(1.0, CUTS, PENALTIES, BIAS, SEEDED),
    ]


def mixed(cells: list[Cell]) -> Cell:
    """Returns a cell of all sampled cells: requests with different parameters share steps."""
    sampled = tuple(params for cell in cells if not cell.is_greedy for params in cell.params)
    return Cell("all of the above at once", sampled)


def make_prompts(seed: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCAB_SIZE, size=6 + 3 * (index % 4)).tolist() for index in range(count)]


def groups(cell: Cell, prompts: list[list[int]]) -> list[Request]:
    """Returns groups of requests, each of which samples from one distribution; a mixed cell takes its prompts in
    turns."""
    if len(cell.params) == 1:
        return [Request(prompt, cell.params[0]) for prompt in prompts]
    return [Request(prompts[index % len(prompts)], params) for index, params in enumerate(cell.params)]


def requests(groups: list[Request], num_samples: int, is_greedy: bool = False) -> Iterator[tuple[int, Request]]:
    """Yields the index of a group and a request, in turns, for about num_samples outputs in total; one request per
    group if greedy."""
    turns = 1 if is_greedy else max(MIN_TURNS, round(num_samples / len(groups) / PER_TURN))
    # A request's last token is never drafted, so each request asks for one token more than an outcome has.
    more: dict[str, Any] = {"n": PER_TURN, "max_tokens": NUM_TOKENS + 1}
    if is_greedy:
        more = {"max_tokens": NUM_GREEDY_TOKENS}
    for turn, (index, group) in itertools.product(range(turns), enumerate(groups)):
        params = {**group.params, **more}
        if "seed" in params:  # the outputs of a request use consecutive seeds
            params["seed"] += PER_TURN * (turn * len(groups) + index)
        yield index, Request(group.prompt, params)
