"""The exact distributions that `verify-lossless` compares with."""

import itertools

import pytest
import torch

from vllm_specplugins.tools.lossless.grid import ALLOWED, BIAS, CUTS, MIN_TOKENS, PENALTIES
from vllm_specplugins.tools.lossless.model import VOCAB_SIZE, ExactModel, make_model, next_probs

PROMPT = [3, 1, 4, 1, 5]
LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]])).double()
NOTHING = torch.zeros(1, 0, dtype=torch.int64)


@pytest.fixture(scope="module")
def model() -> ExactModel:
    return ExactModel(make_model(0), 3)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.7246, 0.1812, 0.0652, 0.0290]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.75}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"min_p": 0.29}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),  # of what top-k leaves, the first two are 0.83
        ({"min_p": 0.29, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),
        ({"allowed_token_ids": [1, 3]}, [0, 2.5 / 3.5, 0, 1 / 3.5]),
        ({"logit_bias": {"3": 100.0}}, [0, 0, 0, 1]),
        ({"min_tokens": 1, "stop_token_ids": [0]}, [0, 0.5, 0.3, 0.2]),
    ],
)
def test_by_hand(params: dict, expected: list[float]) -> None:
    """Kills: another order of the cuts, top-p that counts the token that reaches it out."""
    assert next_probs(LOGITS, [0], NOTHING, params)[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_penalties_by_hand() -> None:
    """Kills: repetition that forgets the prompt, presence that counts it, signs."""
    logits = torch.tensor([[2.0, -1.0, 1.0, 0.5]]).double()
    prefix = torch.tensor([[2, 2]])
    params = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.125, "logit_bias": {0: 2.0}}
    expected = torch.tensor([2.0, -2.0, 0.5 - 0.25 - 2 * 0.125, 0.5]).double().softmax(-1)  # bias comes before
    assert torch.allclose(next_probs(logits, [0, 1], prefix, params)[0], expected)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, **CUTS, **PENALTIES, **BIAS}, ALLOWED, MIN_TOKENS])
def test_joint_follows_the_chain_rule(model: ExactModel, params: dict) -> None:
    """Against the model run on one sequence after the other. Kills: prefixes in another order than their logits."""
    joint = model.joint(PROMPT, params)
    assert joint.shape == (VOCAB_SIZE,) * 3 and joint.sum() == pytest.approx(1.0)
    llama = make_model(0)
    for outcome in itertools.islice(itertools.product(range(VOCAB_SIZE), repeat=3), 0, None, 37):
        prob = 1.0
        for length in range(3):
            said = list(outcome[:length])
            if set(said) & set(params.get("stop_token_ids", [])):
                prob *= outcome[length] == said[-1]
                continue
            with torch.inference_mode():
                logits = llama(torch.tensor([PROMPT + said])).logits[0, -1:].double()
            prefix = torch.tensor(said, dtype=torch.int64)[None]
            prob *= float(next_probs(logits, PROMPT, prefix, params)[0, outcome[length]])
        assert joint[outcome] == pytest.approx(prob, abs=1e-6)


@pytest.mark.parametrize("params", [{"min_p": 0.301}, {"top_k": 3, "min_p": 0.301}, {"top_p": 0.745}])
def test_slack(params: dict) -> None:
    """The third token misses the cut by less than a hundredth."""
    assert (next_probs(LOGITS, [0], NOTHING, params) > 0).sum() == 2
    assert (next_probs(LOGITS, [0], NOTHING, params, 1e-2) > 0).sum() == 3
    assert (next_probs(LOGITS, [0], NOTHING, params, 1e-4) > 0).sum() == 2
