"""How deep an exit drafts, or whether at all."""

import numpy as np
import pytest

from vllm_specplugins.proposers.exit_gate import Brought, ExitGate, depths

K, STEP_MS = 4, 10.0
FLAT = np.full(1000, STEP_MS)


class Engine:
    """Steps of 8 requests; a token of the exit is right with some chance, and what it said is known one step late.

    Args:
        found: tokens that others bring where it does not draft, and `beside`, where it does.
    """

    def __init__(self, chance: float, found: float = 0.0, beside: float = 0.0, num_reqs: int = 8):
        self.gate, self.chance, self.found, self.beside = ExitGate(K, depths(K)), chance, found, beside
        self.num_reqs, self._depth = num_reqs, 0

    def depths(self, draft_ms: float, num_steps: int = 2000, verify_ms: np.ndarray = FLAT) -> np.ndarray:
        """[num_steps], tokens drafted in each."""
        made, places = [], np.arange(K)
        for _ in range(num_steps):
            verified = self.num_reqs * (places < self._depth)
            accepted = verified * self.chance ** (places + 1)
            others = self.num_reqs * (self.beside if self._depth else self.found)
            emitted = self.num_reqs + others + accepted.sum()
            brought = Brought(self.num_reqs, emitted, others + verified.sum(), accepted, verified.astype(float))
            self.gate.add(0, self._depth, brought)
            self._depth = self.gate.depth([self.num_reqs], draft_ms, verify_ms)
            made.append(self._depth)
        return np.array(made)


@pytest.mark.parametrize(
    ("chance", "draft_ms", "best"), [(0.95, 4.0, 4), (0.6, 4.0, 4), (0.6, 10.0, 2), (0.45, 12.0, 1), (0.3, 16.0, 0)]
)
def test_as_deep_as_it_pays(chance: float, draft_ms: float, best: int) -> None:
    """But for a trial now and then. Fails if a token's time is not held against its chance, or if one that was not
    drafted counts as accepted."""
    worth = [
        (1 + sum(chance**n for n in range(1, depth + 1))) / (STEP_MS + draft_ms * depth / K) for depth in depths(K)
    ]
    assert depths(K)[int(np.argmax(worth))] == best, "the case"
    assert (Engine(chance).depths(draft_ms)[100:] == best).mean() > 0.9


def test_it_is_left_out_where_it_does_not_pay() -> None:
    """But for a trial now and then, which costs a hundredth of the time. Fails if there is none, or more of them, or
    if what others find is not held against it."""
    for chance, draft_ms, found in ((0.01, 5.0, 0.0), (0.4, 40.0, 0.0), (0.7, 8.0, 2.0)):
        made = Engine(chance, found).depths(draft_ms)
        assert 0 < made.mean() / K * draft_ms / STEP_MS < 0.05, (chance, made.mean())


def test_it_drafts_beside_others() -> None:
    """Fails if what others bring is taken for the exit's, or if trials without it are more than pay."""
    assert (Engine(0.9, found=1.0, beside=1.0).depths(2.0)[100:] == K).mean() > 0.93


def test_what_verifying_costs() -> None:
    """Where a token more costs what a request's own does. Fails if the exit's tokens are verified for nothing."""
    full = 1.0 + np.arange(1000.0)
    assert (Engine(0.6).depths(0.1, verify_ms=full)[100:] == 0).mean() > 0.9


def test_it_comes_back() -> None:
    """When texts change. Fails if what was known long ago is never forgotten."""
    engine = Engine(0.05)
    assert engine.depths(8.0, 300)[100:].mean() < 0.5
    engine.chance = 0.95
    assert (engine.depths(8.0, 1200)[700:] == K).mean() > 0.9


def test_kinds_of_requests() -> None:
    """Fails if what one kind brings is taken for the other's, or if a batch does not go by how many it has of each."""
    gate, none = ExitGate(K, depths(K), num_kinds=2), np.zeros(K)
    for step in range(200):
        depth = (0, K)[step % 2]
        right = np.array([0.9**place if place <= depth else 0.0 for place in range(1, K + 1)])
        gate.add(0, depth, Brought(1, 1 + right.sum(), depth, right, (np.arange(K) < depth).astype(float)))
        gate.add(1, depth, Brought(1, 5, 5, none, none))
    made = {mix: [gate.depth(mix, 12.0, FLAT) for _ in range(100)] for mix in ((1, 0), (0, 1), (1, 7), (7, 1))}
    assert {mix: max(set(chosen), key=chosen.count) for mix, chosen in made.items()} == {
        (1, 0): K, (0, 1): 0, (1, 7): 0, (7, 1): K
    }  # fmt: skip
