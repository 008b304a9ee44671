"""Compares budgets with every fixed length in simulations: a device with known costs, and drafts with known acceptance
probabilities.

The device is an H100 by its bytes and FLOPs, and the model has 8 B parameters and grouped queries: a step reads the
weights once, computes each token, reads each request's context, and computes the attention of each token.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RUNNER

if RUNNER != "v2":
    pytest.skip("V1 trims nothing on a device", allow_module_level=True)

from test_forecast import manager, probs
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm_specplugins.kernels import acceptance
from vllm_specplugins.kernels.acceptance.reference import new_state

from vllm_specplugins.engine.adaptive import budget
from vllm_specplugins.engine.adaptive.budget import Budget
from vllm_specplugins.gate.step_times import StepTimes, lengths_up_to

SLOTS, VARIABLE = 256, "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
SIZES = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)])  # of graphs, to which tokens are padded
BYTES_MS, FLOPS_MS = 3.3e9, 600e9
PROBS, REQUESTS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99), (1, 2, 4, 8, 16, 32, 64, 128, 256)


def padded(num_tokens: Any) -> Any:
    return np.where(num_tokens > SIZES[-1], num_tokens, SIZES[np.searchsorted(SIZES[:-1], num_tokens)])


def true_ms(num_reqs: int, num_tokens: Any, context: int) -> Any:
    """At 32 k of context attention computes 17 GFLOP a token, as many as the weights."""
    weights = np.maximum(16e9 / BYTES_MS, padded(num_tokens) * 16e9 / FLOPS_MS)
    return weights + num_reqs * context * 147_456 / BYTES_MS + num_tokens * context * 524_288 / FLOPS_MS


class Played:
    """A budget whose costs vLLM's own start has measured on this device; K: width."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int):
        one_rank = SimpleNamespace(broadcast_object=lambda value, src: value)
        for module in (budget, adaptive_verification):
            monkeypatch.setattr(module, "get_tp_group", lambda: one_rank)
        self.manager, self.known = manager(num_slots=SLOTS, width=width), probs(SLOTS, width)
        self.budget, self.width = Budget(self.manager, self.known, max_model_len=40_000), width
        batches = self.manager.batches_to_profile(SIZES.tolist())
        self.manager.set_initial_cost_curves([self._sample(**batch) for batch in batches])

    def _sample(self, num_tokens: int, context_len: int, uniform_decode: bool = False) -> StepTimingSample:
        """A graph has as many rows as tokens."""
        is_graph, num_tokens = num_tokens <= SIZES[-1], int(padded(num_tokens))
        num_reqs = num_tokens // (1 + self.width) if uniform_decode and not is_graph else min(num_tokens, SLOTS)
        return StepTimingSample(true_ms(num_reqs, num_tokens, context_len), 0.0, num_tokens, num_reqs, is_graph)

    def lengths(self, num_reqs: int, context: int, most: int) -> Any:
        """How many of so many draft tokens each request has verified."""
        self.manager.req_states.num_computed_tokens_np[:], self.budget._context = context, (0, 0, 0.0)
        names, lengths = [str(slot) for slot in range(num_reqs)], np.full(num_reqs, most)
        drafts, starts = dict.fromkeys(names, [0] * most), np.arange(num_reqs + 1, dtype=np.int32) * (1 + most)
        if not most:
            return lengths
        self.manager.get_num_tokens(dict.fromkeys(names, 1 + most), drafts)
        self.manager.compact_batch(lengths, lengths + 1, starts)
        return np.diff(self.manager.reallocate_drafts(names, torch.arange(num_reqs))[0].numpy()) - 1

    def of_best(self, tokens: float, ms: float, prob: float, num_reqs: int, context: int) -> tuple[float, float]:
        """A speed as a share of the best fixed length's, and of no speculation's."""
        lengths = np.arange(self.width + 1)
        rates = num_reqs * np.cumsum(prob**lengths) / true_ms(num_reqs, num_reqs * (1 + lengths), context)
        return tokens / ms / rates.max(), tokens / ms / rates[0]

    def learned(self, prob: float, num_reqs: int, context: int, num_steps: int = 80) -> tuple[float, float]:
        """With our estimates and our choice of K, after 20 steps."""
        rng, times, at = (
            np.random.default_rng(0),
            StepTimes(lengths_up_to(self.width), trims=True),
            np.zeros((num_steps, 2)),
        )
        state, slots, length, drafted = new_state(1, SLOTS + 1, self.width, None), torch.arange(num_reqs), 0, 0
        probs, tokens = torch.ones(num_reqs, self.width), (prob ** np.arange(1 + self.width)).cumsum()
        for step in range(num_steps):
            length = length if step % 2 else times.choose(num_reqs)
            verified = self.lengths(num_reqs, context, drafted)
            right = np.minimum(rng.geometric(1 - prob, num_reqs) - 1, verified)
            at[step] = tokens[verified].sum(), true_ms(num_reqs, num_reqs + verified.sum(), context)
            if drafted == length:
                times.add(num_reqs, length, at[step, 1] * rng.lognormal(0, 0.03), (1 + right).tolist())
            fates = (torch.from_numpy(counts).int() for counts in (1 + right, verified - right))
            acceptance.observe(state, slots, *fates)
            probs.fill_(1.0)
            if drafted := length:  # after matches of 2 to 7 tokens
                grades = torch.from_numpy(rng.integers(2, 8, (num_reqs, 1))) + torch.arange(self.width)
                drafts = acceptance.Drafts(torch.full((num_reqs,), length), grades * 0, grades)
                acceptance.predict(state, slots, drafts, probs)
            self.known.host[:num_reqs], self.known.newest[:num_reqs] = probs.numpy(), probs
        return self.of_best(*at[20:].sum(axis=0), prob, num_reqs, context)


@pytest.mark.parametrize("width", [5, 31])
def test_budget_price(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """With true chances. Fails if a draft token costs what a request costs, if a context costs nothing, for requests
    or for the attention of draft tokens, or if that of another batch is taken."""
    played = Played(monkeypatch, width)
    for prob in PROBS:
        played.known.host[:] = prob
        for context in (200, 1024, 8192, 32768):
            for num_reqs in REQUESTS:
                drafts = played.lengths(num_reqs, context, width).sum()
                tokens = num_reqs + np.repeat(prob ** (1.0 + np.arange(width)), num_reqs)[:drafts].sum()
                cell = prob, num_reqs, context
                of_best, of_none = played.of_best(tokens, true_ms(num_reqs, num_reqs + drafts, context), *cell)
                assert of_best >= 0.95 and of_none >= 0.99, (cell, drafts)
    costs, (own, ms) = played.budget.costs(), (true_ms(256, tokens, 32768) for tokens in (256, 256 * (1 + width)))
    assert costs["step"] == pytest.approx(own / 1000, rel=0.05)
    assert costs["draft_token"] == pytest.approx((ms - own) / 256 / width / 1000, rel=0.1)


@pytest.mark.parametrize("width", [5, 31])
def test_learned_chances(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """With our estimates, and K as the gate chooses it. Fails if many requests that are all alike are told apart by
    chance, or if a gate that does not know that drafts are trimmed never tries a longer one."""
    played = Played(monkeypatch, width)
    for prob in (0.5, 0.97, 0.99):
        for num_reqs, context in ((1, 200), (32, 32768), (128, 200), (256, 200)):
            of_best, of_none = played.learned(prob, num_reqs, context)
            assert of_best >= 0.95 and of_none >= 0.99, (prob, num_reqs, context)


def test_vllms_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is left alone where an operator asks for it. Fails if that is not seen."""
    monkeypatch.setenv(VARIABLE, "8192")
    played = Played(monkeypatch, 5)
    assert {batch["context_len"] for batch in played.manager.batches_to_profile([1, 2])} == {8192}
    played.lengths(8, 1024, 5)
    assert played.budget.costs()["draft_token"] > 0.0003, "each costs another request with 8,192 tokens of context"
