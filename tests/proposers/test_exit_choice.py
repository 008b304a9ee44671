"""The choice of an exit's layer: expected drafts against simulated ones, and what the shadows count."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplugins.draft import Early, ProposerContext
from vllm_specplugins.proposers.chosen_layer import ChosenLayer
from vllm_specplugins.proposers.draft_sampler import DraftSampler
from vllm_specplugins.proposers.exit_choice import FIRST_STEPS, LOOK_EVERY, LOOK_STEPS, ExitChoice, expected
from vllm_specplugins.proposers.exit_shadow import Shadow
from vllm_specplugins.tools.speedup import tokens_per_step


def chain(rng: np.random.Generator, behind_wrong: float, behind_right: float, length: int) -> Any:
    """Whether an exit had each of so many tokens right."""
    bits, last = np.zeros(length, bool), False
    for place in range(length):
        last = bits[place] = rng.random() < (behind_right if last else behind_wrong)
    return bits


def counts_of(bits: Any) -> Any:
    counts = np.zeros((1, 2, 2))
    np.add.at(counts[0], (bits[:-1].astype(int), bits[1:].astype(int)), 1)
    return counts


@pytest.mark.parametrize("chances", [(0.3, 0.9), (0.6, 0.6), (0.8, 0.5)])
@pytest.mark.parametrize("most", [1, 4, 8])
def test_expected_is_what_replays_bring(chances: tuple[float, float], most: int) -> None:
    """Fails if a draft is taken to begin behind any token, or all its tokens to be as likely as the first."""
    bits = chain(np.random.default_rng(most), *chances, 60_000)
    assert 1 + expected(counts_of(bits), most)[0, -1] == pytest.approx(tokens_per_step([bits], most), rel=0.02)


def steps(choice: ExitChoice, chances: list[tuple[float, float]], costs: list[float], number: int) -> list[int]:
    """Layers in use, where candidates do so well and cost so much."""
    rng, used = np.random.default_rng(0), []
    for _ in range(number):
        if choice.begin_step():
            counts = np.concatenate([counts_of(chain(rng, *own, 4)) for own in chances])
            choice.learn(counts, np.array(costs), np.ones(1))
        used.append(choice.layer)
    return used


@pytest.mark.parametrize(
    ("chances", "costs", "best"),
    [
        ([(0.0, 0.0), (0.6, 0.9), (0.6, 0.9)], [0.12, 0.25, 0.5], 2),  # the first layer is useless
        ([(0.3, 0.7), (0.35, 0.72), (1.0, 1.0)], [0.12, 0.25, 0.3], 3),  # the last one is exact
        ([(0.6, 0.9), (0.61, 0.9), (0.62, 0.9)], [0.12, 0.25, 0.5], 1),  # all say the same
    ],
)
def test_settles(chances: list[tuple[float, float]], costs: list[float], best: int) -> None:
    """Within 24 steps that were looked at, and stays. Fails if costs or chances are another layer's."""
    used = steps(ExitChoice((1, 2, 3), 4), chances, costs, 600)
    assert set(used[24:]) == {best}


def test_goes_with_the_text() -> None:
    """Another layer is the best from now on. Fails if nothing is forgotten, or looked at later."""
    choice = ExitChoice((1, 2), 4)
    assert steps(choice, [(0.7, 0.9), (0.7, 0.9)], [0.1, 0.3], 300)[-1] == 1
    assert steps(choice, [(0.0, 0.1), (0.7, 0.9)], [0.1, 0.3], 12 * LOOK_EVERY)[-1] == 2


def test_looks_at_a_share_of_steps() -> None:
    """Fails if every step is looked at, or if steps behind a pause count as behind the last one that was."""
    choice = ExitChoice((1, 2), 4)
    looks = [(choice.begin_step(), choice.begins_anew) for _ in range(FIRST_STEPS + 10 * LOOK_EVERY)]
    assert all(look for look, _ in looks[:FIRST_STEPS])
    later = looks[FIRST_STEPS:]
    assert sum(look for look, _ in later) == 10 * LOOK_STEPS
    assert all(anew == (look and not before) for (before, _), (look, anew) in pairwise(looks))


def test_every_rank_takes_the_first_ones_choice() -> None:
    """Fails if a choice is used before it was agreed on."""
    choice = ExitChoice((1, 2), 4, agreed=lambda layer: 2)
    assert steps(choice, [(1.0, 1.0), (0.0, 0.0)], [0.1, 0.5], 8)[-1] == 2


class Said:
    """A target whose states are the tokens that each layer says."""

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def argmax(self, states: torch.Tensor) -> torch.Tensor:
        return states[:, 0]


def test_shadows_count_tokens_that_came_out() -> None:
    """Two requests and a step that one of them sits out. Fails if what stands behind a request's tokens is counted, if
    the newest token of a step is forgotten before the next, or if it is another request's."""
    shadow = Shadow((1, 2), {}, DraftSampler("greedy"), 4, "cpu")
    places = torch.tensor([[0, 1, 2], [3, 4, 5]])
    came_out = torch.tensor([[5, 6, 7], [8, 9, 9]])

    def look(one: list[int], num_tokens: list[int], begins_anew: bool) -> Any:
        states = {1: torch.tensor(one)[:, None], 2: came_out.flatten()[:, None]}
        early = Early(states, places, came_out, torch.tensor(num_tokens))
        target: Any = SimpleNamespace(forward=Said(), early=lambda: early)
        return shadow.look(target, torch.tensor([2, 0]), begins_anew).tolist()

    # Request 1 has three tokens, wrong, right, right; request 2 one, right.
    assert look([0, 6, 7, 8, 0, 0], [3, 1], True) == [[[0, 1], [0, 1]], [[0, 0], [0, 2]]]
    # Request 1 has none; request 2 has two, wrong behind a right one, then right.
    assert look([0, 0, 0, 0, 9, 9], [0, 2], False) == [[[0, 1], [1, 0]], [[0, 0], [0, 2]]]
    # Request 1's newest token was right, request 2's too.
    assert look([0, 6, 7, 0, 9, 9], [1, 1], False) == [[[0, 0], [2, 0]], [[0, 0], [0, 2]]]
    # Behind a pause nothing is known.
    assert look([5, 6, 7, 8, 9, 9], [1, 1], True) == [[[0, 0], [0, 0]], [[0, 0], [0, 0]]]


def test_a_rehearsal_is_no_step() -> None:
    """Fails if a step without states is looked at, or counted."""
    context = ProposerContext(vocab_size=9, max_model_len=9, max_num_reqs=2, max_num_draft=4, tokenize=lambda text: [])
    chosen = ChosenLayer((1, 2), {}, DraftSampler("greedy"), context)
    target: Any = SimpleNamespace(early=None, num_tokens=torch.zeros(1))
    assert chosen.of(["one"], target) == 1 and sum(chosen.choice.num_steps.values()) == 0


def test_more_requests_than_at_a_time() -> None:
    """Before it is told which ones are gone. Fails if a request has no slot."""
    context = ProposerContext(vocab_size=9, max_model_len=9, max_num_reqs=1, max_num_draft=1, tokenize=lambda text: [])
    chosen = ChosenLayer((1, 2), {}, DraftSampler("greedy"), context)
    states = torch.tensor([[5], [6]])
    early = Early(dict.fromkeys((1, 2), states), torch.tensor([[0, 1]]), torch.tensor([[5, 6]]), torch.tensor([2]))
    forward: Any = SimpleNamespace(normed=lambda own: own, argmax=lambda own: own[:, 0], share=lambda layer: layer / 2)
    target: Any = SimpleNamespace(early=lambda: early, num_tokens=torch.tensor([4]), forward=forward)
    for name in "abc":
        assert chosen.of([name], target) == 1
