"""Implements `verify-lossless`, which tests that outputs with speculation have the distribution of outputs without it.
Real engines serve a tiny model with random weights, without speculation and with each method. For each cell of a grid
of sampling parameters, samples are compared with the model's exact distribution (lossless/model.py). At temperature 0,
outputs are compared token for token with those without speculation."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.harness.samples import SETTINGS, Draw, sampling_engine
from vllm_specplugins.tools.files import scratch
from vllm_specplugins.tools.lossless import grid
from vllm_specplugins.tools.lossless.model import VOCAB_SIZE, ExactModel, write_checkpoint, write_parts
from vllm_specplugins.tools.lossless.report import Judged, Report, chi_squared
from vllm_specplugins.tools.picker import pick
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import check_json, write_json

NUM_PROMPTS = 4
# Engines sum in another order, some with TF32, so a token this close to a cut may be in or out.
ROUNDING = 2e-3
NO_SPECULATION = "no speculation"


class Verification:
    """Judges methods cell by cell, against the served model in transformers; calls `advance` after each cell."""

    def __init__(
        self, model: Any, cells: Sequence[grid.Cell], num_samples: int, seed: int, advance: Callable[[], None]
    ):
        self._exact = ExactModel(model, grid.NUM_TOKENS)
        self._cells, self._num_samples, self._advance = cells, num_samples, advance
        self._prompts = grid.make_prompts(seed, NUM_PROMPTS)
        self._greedy_prompts = grid.make_prompts(seed + 1, grid.NUM_GREEDY_PROMPTS)
        self._greedy: dict[str, list[list[list[int]]]] = {}  # outputs without speculation

    def judge(self, draw: Draw, method: str) -> list[Judged]:
        """Judges all cells of a method until its engine fails. The caller judges NO_SPECULATION before all methods."""
        judged, served = list[Judged](), list[grid.Cell]()
        for cell in (*self._cells, None):
            if cell is None and sum(not other.is_greedy for other in served) < 2:
                break
            cell = cell or grid.mixed(served)
            try:
                judged.append(self._judge_cell(draw, method, cell))
            except ConfigError as error:
                return [*judged, Judged(method, cell.name, failure=str(error))]
            if judged[-1].refusal is None:
                served.append(cell)
            self._advance()
        return judged

    def _judge_cell(self, draw: Draw, method: str, cell: grid.Cell) -> Judged:
        groups = grid.groups(cell, self._greedy_prompts if cell.is_greedy else self._prompts)
        indices, requests = zip(*grid.requests(groups, self._num_samples, cell.is_greedy), strict=True)
        drawn = draw(requests)
        if drawn.refusal is not None:
            return Judged(method, cell.name, refusal=drawn.refusal)
        counted = method, cell.name, drawn.num_drafted, drawn.num_accepted
        if cell.is_greedy:
            expected = self._greedy.setdefault(cell.name, drawn.token_ids)
            num_different = sum(a != b for a, b in zip(drawn.token_ids, expected, strict=True))
            return Judged(*counted, num_different=num_different)
        counts = np.zeros([len(groups), *[VOCAB_SIZE] * grid.NUM_TOKENS], np.int64)
        for index, outputs in zip(indices, drawn.token_ids, strict=True):
            for output in outputs:  # a stopped output repeats its last token
                outcome = output[: grid.NUM_TOKENS]
                counts[(index, *outcome, *outcome[-1:] * (grid.NUM_TOKENS - len(outcome)))] += 1
        probs, possible = (
            [self._exact.joint(group.prompt, group.params, slack) for group in groups] for slack in (0.0, ROUNDING)
        )
        return Judged(*counted, test=chi_squared(list(zip(counts, probs, possible, strict=True))))


def run(args: argparse.Namespace) -> int:
    """Returns 0 if all tests pass, otherwise 1."""
    methods = pick_methods(args.method)
    check_json(args)
    cells, judged = grid.cells(), list[Judged]()
    with scratch(lambda: any(cell.failure for cell in judged)) as folder, progress() as bars:
        model = write_checkpoint(folder / "model", args.seed)
        write_parts(folder, args.seed)
        task = bars.add_task("", total=(len(cells) + 1) * (len(methods) + 1))
        verification = Verification(model, cells, args.samples, args.seed, lambda: bars.advance(task))
        for number, (method, config) in enumerate([(NO_SPECULATION, None), *methods.items()]):
            bars.update(task, description=method)
            blame, log = f"{method} could not be verified", folder / f"engine-{number}.log"
            settings, placed = {**SETTINGS, "seed": args.seed}, grid.placed(config, folder)
            with sampling_engine(blame, log, folder / "model", placed, settings) as draw:
                judged += verification.judge(draw, method)
    report = Report(judged, {"samples": args.samples, "seed": args.seed, "methods": methods})
    report.show()
    write_json(args.output_json, report.facts)
    return 0 if report.is_lossless else 1


def pick_methods(wanted: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Returns configurations of the methods to verify, by name; all methods of this package if the user names none.
    Raises ConfigError for an unknown name or invalid JSON.

    >>> list(pick_methods(["jump", '{"method": "ngram", "num_speculative_tokens": 2}']))
    ['jump-probabilistic', 'jump-coupled', 'ngram:2']
    """
    every = list(grid.METHODS.items())
    named = {name: [(name, config)] for name, config in every}
    for method in {config["method"] for _, config in every}:  # all of its forms
        named[method] = [(name, config) for name, config in every if config["method"] == method]
    return pick(wanted or list(grid.METHODS), "--method", named)
