"""The gate under load, on fixed text at an H100's step costs."""

import subprocess
import sys

import make
import numpy as np
import pytest
from make import KINDS, trace

from vllm_specplugins.tools.replay.candidates import candidates
from vllm_specplugins.tools.replay.costs import H100, CostTable, Load
from vllm_specplugins.tools.replay.data import Traffic
from vllm_specplugins.tools.replay.simulate import simulate


def speeds(kind: str, batch: int, costs: CostTable, draft_us: float) -> list[float]:
    """Tokens a ms of `prompt_lookup`, K = 8: of all found drafted, and of the gate's choice, to nothing drafted. A gate
    takes some requests of each place in the batch to know a batch size.
    """
    traffic, load = Traffic(), Load(costs, batch, draft_us)
    for prompt, output in trace(kind, max(20, 4 * batch), at_a_time=batch, max_output=300):
        traffic.add(prompt, output)
    builds = [None, *(candidate.build for candidate in candidates(["prompt_lookup"], [8], "v1"))]
    plain, always, gated = (simulate(traffic, build, 8, load).tokens_per_ms for build in builds)
    return [always / plain, gated / plain]


@pytest.mark.parametrize(("kind", "batch"), [("prose", 1), ("code", 4), ("agents", 16), ("code", 128)])
def test_gate_under_load(kind: str, batch: int) -> None:
    """Never slower than without drafts, and within 5 % of the better of drafting all and nothing. Fails if a token's
    price is guessed to grow with the batch (SHARED_SLOPE alone: 0.47 of the best with 128 requests), if the gate never
    tries, if it lets everything through where that loses, or if one step of many requests, all wrong at once, makes a
    length of match look hopeless."""
    always, gated = speeds(kind, batch, H100, 5.0)
    assert gated >= 0.99 and gated >= 0.95 * always, (always, gated)


def test_gate_where_drafts_lose() -> None:
    """A token that costs as much as a request's own. Fails if the gate lets everything through."""
    always, gated = speeds("prose", 4, CostTable.line(5.0, 5.0), 0.0)
    assert always < 0.8 and gated >= 0.99, (always, gated)


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


def test_the_program_starts() -> None:
    """Fails if it imports what only tests have on their path."""
    subprocess.run([sys.executable, make.__file__, "--help"], check=True, stdout=subprocess.DEVNULL)
