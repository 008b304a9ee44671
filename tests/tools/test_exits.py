"""How many tokens a step of an exit emits, replayed."""

import math

import numpy as np
import pytest

from vllm_specplugins.tools.exits import tokens_per_step


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


def test_replay_of_nothing() -> None:
    """Kills: a division by zero, or a made-up number, for outputs that are too short."""
    assert math.isnan(tokens_per_step([np.array([True, True])], 3))
    assert tokens_per_step([np.array([True, True]), np.array([True] * 3)], 3) == 4.0
