"""The arithmetic of a calibration: replay, costs, choice."""

import math

import numpy as np
import pytest

from vllm_specplugins.tools.speedup import Costs, Timing, predict, tokens_per_step


def decoded(output: list[int], drafts: list[int], num_draft: int) -> float:
    """Oracle. `drafts` are the exit's tokens after a right beginning; after a wrong one, all are wrong."""
    place, steps = 0, 0
    while place + num_draft <= len(output):
        draft: list[int] = []
        for index in range(place, place + num_draft):
            good = draft == output[place:index]
            draft.append(drafts[index] if good else -1)
        accepted = 0
        while accepted < num_draft and draft[accepted] == output[place + accepted]:
            accepted += 1
        place, steps = place + accepted + 1, steps + 1
    return place / steps


@pytest.mark.parametrize("num_draft", [1, 2, 3, 5, 8])
def test_replay_is_decoding(num_draft: int) -> None:
    """Kills: a bonus token that is forgotten, a run that passes K, a step that begins at a wrong place."""
    rng = np.random.default_rng(num_draft)
    for _ in range(50):
        output = rng.integers(0, 3, rng.integers(num_draft, 60)).tolist()
        drafts = rng.integers(0, 3, len(output)).tolist()
        match = [np.array([a == b for a, b in zip(output, drafts, strict=True)])]
        assert tokens_per_step(match, num_draft) == decoded(output, drafts, num_draft)


@pytest.mark.parametrize("num_draft", [1, 3, 6])
@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_replay_is_the_formula(alpha: float, num_draft: int) -> None:
    """Leviathan et al. 2023, equation 1, for independent tokens. Kills: a biased count at the end of an output."""
    rng = np.random.default_rng(0)
    match = [rng.random(500) < alpha for _ in range(400)]
    expected = (1 - alpha ** (num_draft + 1)) / (1 - alpha)
    assert tokens_per_step(match, num_draft) == pytest.approx(expected, rel=0.01)


def test_replay_of_nothing() -> None:
    """Kills: a division by zero, or a made-up number, for outputs that are too short."""
    assert math.isnan(tokens_per_step([np.array([True, True])], 3))
    assert tokens_per_step([np.array([True, True]), np.array([True] * 3)], 3) == 4.0


def timing(layer: int, num_draft: int, draft_ms: float, verify_ms: float) -> Timing:
    return Timing(layer, num_draft, verify_ms, num_draft * draft_ms)


def test_costs_of_a_made_up_machine() -> None:
    """Kills: K left out, a line through the wrong axis, no 0 among the known K."""
    costs = Costs.fit(10.0, [timing(1, 8, 1.5 + 1 * 0.5, 14.0), timing(4, 4, 1.5 + 4 * 0.5, 12.0)])
    assert (costs.base_ms, costs.layer_ms) == (pytest.approx(1.5), pytest.approx(0.5))
    assert costs.draft_ms(7) == pytest.approx(5.0)
    verify = [costs.step_ms(num_draft, 0.0) for num_draft in (1, 2, 4, 6, 8)]
    assert verify == pytest.approx([10.5, 11.0, 12.0, 13.0, 14.0])
    assert costs.step_ms(2, 5.0) == pytest.approx(21.0)


def test_costs_of_one_layer() -> None:
    """Kills: a line through one point."""
    costs = Costs.fit(10.0, [timing(3, 2, 2.0, 11.0), timing(3, 1, 2.2, 11.0)])
    assert (costs.draft_ms(3), costs.layer_ms) == (pytest.approx(2.1), 0.0)


def test_choice() -> None:
    """Every K by hand. Kills: the smallest step, the most tokens, or the last K taken for the best."""
    match = [np.array([True, True, False] * 100)]
    costs = Costs(10.0, 0.0, 1.0, {4: 14.0})
    found = predict(match, costs, 3.0, 4)
    by_hand = {1: 1.5 * 10 / 14, 2: 3 * 10 / 18, 3: 3 * 10 / 22, 4: 3 * 10 / 26}
    assert found.by_num_draft == pytest.approx(by_hand, rel=0.01)
    assert (found.num_draft, found.tokens_per_step) == (2, 3.0)
    assert found.speed_up == found.by_num_draft[2]
    assert predict(match, costs, 30.0, 4).speed_up < 1
