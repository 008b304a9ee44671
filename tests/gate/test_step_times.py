"""The K of a step in simulations: steps with known costs, and texts with known acceptance probabilities."""

import random
from collections.abc import Callable
from statistics import mean

import pytest

from vllm_specplugins.gate import step_times
from vllm_specplugins.gate.step_times import StepTimes, lengths_up_to

K = 31
HoldUp = Callable[[int, int], float]


def h100(num_tokens: int) -> float:
    """ms of an 8 B model's step, by its bytes and FLOPs; above 512 tokens there is no graph."""
    return 5.3 + 0.006 * min(num_tokens, 180) + 0.027 * max(0, num_tokens - 180) + 4.0 * (num_tokens > 512)


def dear(num_tokens: int) -> float:
    """Of a machine without room."""
    return 26.7 + 1.3 * num_tokens


def play(
    times: StepTimes,
    accept_probs: list[float],
    num_steps: int,
    cost: Callable[[int], float] = h100,
    seed: int = 0,
    held_up: HoldUp = lambda step, k: 1.0,
) -> tuple[float, list[int]]:
    """Returns the tokens per ms of requests with these acceptance probabilities, and each step's k; `held_up` changes
    the reported times."""
    rng, lengths, total_ms, num_tokens = random.Random(seed), [], 0.0, 0
    for step in range(num_steps):
        k = times.choose(len(accept_probs))
        emitted = [1 + next((at for at in range(k) if rng.random() >= accept_prob), k) for accept_prob in accept_probs]
        ms = cost(len(accept_probs) * (1 + k)) * rng.lognormvariate(0, 0.03)
        times.add(len(accept_probs), k, ms * held_up(step, k), emitted)
        lengths.append(k)
        total_ms, num_tokens = total_ms + ms, num_tokens + sum(emitted)
    return num_tokens / total_ms, lengths


def best(accept_probs: list[float], cost: Callable[[int], float], most: int) -> float:
    """Tokens a ms of the best k, in expectation."""

    def speed(k: int) -> float:
        tokens = sum(1 + sum(accept_prob**place for place in range(1, k + 1)) for accept_prob in accept_probs)
        return tokens / cost(len(accept_probs) * (1 + k))

    return max(map(speed, lengths_up_to(most)))


@pytest.mark.parametrize("most", [5, K])
@pytest.mark.parametrize("num_reqs", [1, 8, 32, 64])
@pytest.mark.parametrize("accept_prob", [0.0, 0.3, 0.9, 1.0])
def test_close_to_the_best(most: int, num_reqs: int, accept_prob: float) -> None:
    """300 steps from nothing known, GPU-like and dear tokens; fails if a deeper draft is never tried, if trials take
    more than their share, or if lengths compete by tokens alone."""
    for cost in (h100, dear):
        accept_probs = [accept_prob] * num_reqs
        speed = mean(play(StepTimes(lengths_up_to(most)), accept_probs, 300, cost, seed)[0] for seed in range(3))
        assert speed >= 0.92 * best(accept_probs, cost, most)


def test_never_loses() -> None:
    """No draft token is ever accepted. Fails if trials have no limit."""
    for num_reqs in (1, 8, 64):
        times = StepTimes(lengths_up_to(K))
        play(times, [0.0] * num_reqs, 100, dear)
        assert play(times, [0.0] * num_reqs, 400, dear, 1)[0] >= 0.985 * num_reqs / dear(num_reqs)


def test_prose_then_copying() -> None:
    """Drafts are full after 16 steps. Fails if an accepted trial has too little weight."""
    for num_reqs in (1, 8):
        times = StepTimes(lengths_up_to(K))
        play(times, [0.0] * num_reqs, 500)
        _, lengths = play(times, [1.0] * num_reqs, 40, seed=1)
        assert lengths.index(K) <= 16 and mean(lengths[20:]) > 0.9 * K


def test_copying_then_prose() -> None:
    """Fails if what drafts brought is forgotten slowly."""
    times = StepTimes(lengths_up_to(K))
    play(times, [1.0] * 8, 100, dear)
    _, lengths = play(times, [0.0] * 8, 40, dear)
    assert mean(lengths[20:]) < 1


HOLD_UPS: dict[str, HoldUp] = {
    "the first step with drafts": lambda step, k: 10.0 if step == 0 else 1.0,
    "the second": lambda step, k: 10.0 if step == 1 else 1.0,
    "one that is known": lambda step, k: 100.0 if step == 30 else 1.0,
    "somewhat": lambda step, k: 2.5 if step in (0, 1) else 1.0,
    "pauses": lambda step, k: 15.0 if step % 6 == 5 else 1.0,
    "every second one with long drafts, at first": lambda step, k: 20.0 if k > 4 and step < 20 and step % 2 else 1.0,
}


@pytest.mark.parametrize("name", HOLD_UPS)
def test_hold_ups(name: str) -> None:
    """Fails if one slow step makes drafts dear for good, of those that are known or of the first of their kind."""
    _, lengths = play(StepTimes(lengths_up_to(K)), [0.97] * 8, 120, held_up=HOLD_UPS[name])
    assert mean(lengths[60:]) > 20


def test_steps_that_stay_slower_are_believed() -> None:
    """Fails if every step that takes three times what others took is left out for ever."""
    times = StepTimes(lengths_up_to(K))
    play(times, [0.9] * 4, 60)
    _, lengths = play(times, [0.9] * 4, 60, held_up=lambda step, k: 9.0 if k > 8 else 1.0)
    assert mean(lengths[30:]) <= 8


def test_the_cliff() -> None:
    """16 requests of 31 tokens fit below it, 17 do not. Fails if two sizes have one time."""
    cost = {16: 8.0, 17: 30.0}
    times, speeds = StepTimes(lengths_up_to(K)), []
    for num_reqs in (16, 17) * 3:
        ms = cost[num_reqs]
        speeds.append(play(times, [0.99] * num_reqs, 40, lambda tokens, ms=ms: ms if tokens > 17 * 17 else 7.0)[1])
    assert mean(speeds[-2]) > 28 and mean(speeds[-1]) < 17


def test_other_sizes_say_what_is_not_known() -> None:
    """Tokens that were expensive for 32 requests are not tried again for 48. Fails if a new size uses only the first
    guess."""
    times = StepTimes(lengths_up_to(K))
    play(times, [0.6] * 32, 200, dear)
    _, lengths = play(times, [0.6] * 48, 10, dear)
    assert max(lengths) <= 2 < StepTimes(lengths_up_to(K)).choose(48)


def test_a_longer_draft_is_never_cheaper() -> None:
    """Fails if noise may say so."""
    times = StepTimes(lengths_up_to(K))
    for step in range(40):
        for at, k in enumerate(times.lengths):
            times.add(8, k, 10.0 - at + step % 2, [1] * 8)
    expected = step_times._expected_ms(8, *times._arrays[:2], times._arrays[3]).tolist()
    assert expected == sorted(expected) and expected[0] == pytest.approx(7.5, abs=0.5)


@pytest.mark.parametrize(("token_ms", "chosen"), [(0.01, 15), (0.6, 2), (6.0, 0)])
def test_trees(token_ms: float, chosen: int) -> None:
    """Step times decide between a whole tree, a chain and no draft. Fails if a tree's nodes count as if they followed
    each other, also for chains, or if a tree is never tried again."""
    times = StepTimes(lengths_up_to(15, 6), has_tree=True)
    brings = {0: [1, 1], 1: [2, 1], 2: [3, 1], 4: [3, 1], 6: [3, 1], 15: [4, 3]}
    assert times.lengths == tuple(brings)
    lengths = []
    for step in range(600):
        lengths.append(k := times.choose(2))
        times.add(2, k, 10 + token_ms * 2 * (1 + k), brings[k][:: (-1) ** step])
    assert lengths[-200:].count(chosen) > 160 and (token_ms > 1 or 15 in lengths[-200:])
