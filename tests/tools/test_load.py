"""The gate under load, on recorded text at an H100's step costs; `tests/bench/bench_load.py` plays all of it."""

import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "bench"), str(TESTS / "traces")]

from bench_load import Cell, cells  # noqa: E402
from make import KINDS, trace  # noqa: E402


@pytest.mark.parametrize(("kind", "batch"), [("prose", 1), ("code", 4), ("code", 128)])
def test_gate_under_load(kind: str, batch: int) -> None:
    """Never slower than without drafts, and within 5 % of the better of drafting all and nothing. Fails if a token's
    price is guessed to grow with the batch (SHARED_SLOPE alone: 0.47 of the best with 128 requests), if the gate never
    tries, if it lets everything through where that loses, or if one step of many requests, all wrong at once, makes a
    length of match look hopeless."""
    [cell] = cells("prompt_lookup", [kind], [batch], 8, 5.0, "h100", rounds=4)
    assert cell.holds, cell


def test_gate_where_drafts_lose() -> None:
    """A token that costs as much as a request's own. Fails if the gate lets everything through."""
    [cell] = cells("prompt_lookup", ["prose"], [4], 8, 0.0, "compute-bound", rounds=4)
    assert cell.always < 0.8 and cell.holds, cell


def test_bars() -> None:
    """Fails if a cell that loses, or misses the better of the two, holds."""
    fine = Cell("prose", 1, 0.5, 0.995, (1.0, 1.0))
    assert fine.holds and fine.of_best == pytest.approx(0.995)
    assert not Cell("prose", 1, 0.5, 0.98, (1.0, 1.0)).holds
    assert not Cell("prose", 1, 2.0, 1.89, (1.0, 1.0)).holds


@pytest.mark.parametrize("kind", KINDS)
def test_traces_are_what_they_claim(kind: str) -> None:
    """The same for the same seed, and another for another; code repeats its prompt, prose does not, and an agent's turn
    follows from what it was shown. Fails for a generator that is not seeded, an answer that is empty, or prose that
    repeats itself."""
    made = [list(trace(kind, 12, seed)) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2] and len(made[0]) == 12
    shares = []
    for prompt, output in made[0]:
        assert prompt and output
        grams = {tuple(prompt[i : i + 8]) for i in range(len(prompt))}
        shares.append(np.mean([tuple(output[i : i + 8]) in grams for i in range(max(1, len(output) - 8))]))
    low, high = {"code": (0.6, 1.0), "agents": (0.1, 1.0), "prose": (0.0, 0.1)}[kind]
    assert low <= np.mean(shares) <= high
