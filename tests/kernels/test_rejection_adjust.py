"""Edits of logits against a brute-force oracle, row by row; and that they are exact under speculation."""

import doctest
import math

import torch
from vllm_specplugins.kernels.rejection import adjust as front
from vllm_specplugins.kernels.rejection import rejection_sample
from vllm_specplugins.kernels.rejection.adjust import Edits, adjust
from vllm_specplugins.kernels.rejection.testing import make_batch

VOCAB_SIZE, NUM_STATES, LENGTH = 37, 8, 3
RNG = torch.Generator().manual_seed(0)


def random_edits() -> Edits:
    """Everything at once, in small numbers that meet often."""
    entries = torch.randint(NUM_STATES, (60,), generator=RNG), torch.randint(VOCAB_SIZE, (60,), generator=RNG)
    words = torch.randint(VOCAB_SIZE, (2000, LENGTH), generator=RNG)
    words[::3, 0] = -1
    words[::9, :2] = -1
    return Edits(
        allowed_mask=torch.rand(NUM_STATES, VOCAB_SIZE, generator=RNG) < 0.9,
        bitmask=torch.randint(-(2**31), 2**31, (12, 2), generator=RNG, dtype=torch.int32),
        bias=(*entries, torch.randn(60, generator=RNG)),
        stop_tokens=(entries[0][:20], entries[1][:20]),
        min_positions=torch.randint(400, 600, (NUM_STATES,), generator=RNG),
        repetition_penalty=torch.tensor([1.0, 1.3, 0.7, 2.0] * 2),
        frequency_penalty=torch.randn(NUM_STATES, generator=RNG),
        presence_penalty=torch.randn(NUM_STATES, generator=RNG),
        prompt_mask=torch.rand(NUM_STATES, VOCAB_SIZE, generator=RNG) < 0.2,
        output_counts=torch.randint(0, 3, (NUM_STATES, VOCAB_SIZE), generator=RNG, dtype=torch.int32),
        bad_words=(torch.randint(NUM_STATES, (2000,), generator=RNG), words),
        last_token_ids=torch.randint(VOCAB_SIZE, (NUM_STATES, LENGTH - 1), generator=RNG),
    )


def oracle_row(row: torch.Tensor, index: int, state: int, position: int, drafts: list[int], e: Edits) -> list[float]:
    """One row by the definitions, token by token."""
    context = (e.last_token_ids[state].tolist() + drafts)[-(LENGTH - 1) :]
    words = [[t for t in w if t >= 0] for s, w in zip(*(x.tolist() for x in e.bad_words), strict=True) if s == state]
    banned = {w[-1] for w in words if context[len(context) - len(w) + 1 :] == w[:-1]}
    if position < e.min_positions[state]:
        banned |= {t for s, t in zip(*(x.tolist() for x in e.stop_tokens), strict=True) if s == state}
    result = []
    for token in range(VOCAB_SIZE):
        logit = float(row[token])
        permitted = int(e.bitmask[index, token // 32]) >> (token % 32) & 1
        logit += sum(v for s, t, v in zip(*(x.tolist() for x in e.bias), strict=True) if (s, t) == (state, token))
        count = int(e.output_counts[state, token]) + drafts.count(token)
        if count or e.prompt_mask[state, token]:
            logit *= float(e.repetition_penalty[state]) ** (-1 if logit > 0 else 1)
        logit -= float(e.frequency_penalty[state]) * count + float(e.presence_penalty[state]) * (count > 0)
        keeps = permitted and e.allowed_mask[state, token] and token not in banned
        result.append(logit if keeps else -math.inf)
    return result


def test_oracle() -> None:
    """Kills: penalties off by one position; another order of bias and penalties; a context across requests."""
    edits = random_edits()
    batch = make_batch([3, 0, 4, 1], VOCAB_SIZE, agreement=0.3)
    ours = adjust(batch.target_logits, *batch[1:5], edits)
    bounds, num_banned = batch.cu_num_logits.tolist(), 0
    for request, state in enumerate(batch.idx_mapping.tolist()):
        for row in range(bounds[request], bounds[request + 1]):
            drafts = batch.draft_token_ids[bounds[request] + 1 : row + 1].tolist()
            expected = oracle_row(batch.target_logits[row], row, state, int(batch.positions[row]), drafts, edits)
            torch.testing.assert_close(ours[row], torch.tensor(expected), rtol=1e-5, atol=1e-5)
            num_banned += expected.count(-math.inf)
    assert 0 < num_banned < ours.numel()


def test_each_alone_and_none() -> None:
    """A field that is None does nothing; the input stays. Kills: an edit in place; a field that needs another."""
    batch, edits = make_batch([2, 1], VOCAB_SIZE), random_edits()
    before = batch.target_logits.clone()
    assert torch.equal(adjust(before, *batch[1:5], Edits()), before)
    groups = [("allowed_mask",), ("bias",), ("stop_tokens", "min_positions"), ("bad_words", "last_token_ids"),
              ("output_counts", "repetition_penalty"), ("output_counts", "frequency_penalty")]  # fmt: skip
    for names in groups:
        changed = adjust(batch.target_logits, *batch[1:5], Edits(**{name: getattr(edits, name) for name in names}))
        assert not torch.equal(changed, before), names
    assert torch.equal(batch.target_logits, before)
    assert doctest.testmod(front).failed == 0


def test_same_text_with_and_without_speculation() -> None:
    """A model of constant logits with penalties, ten tokens: drafts do not change what is said."""
    logits = torch.randn(VOCAB_SIZE, generator=RNG)
    penalties = {"frequency_penalty": torch.tensor([0.7]), "presence_penalty": torch.tensor([0.3])}
    penalties["repetition_penalty"] = torch.tensor([1.5])
    plain = make_batch([0], VOCAB_SIZE).sampling
    sampling = type(plain)(torch.tensor([0.8]), torch.tensor([5]))

    def generate(num_draft: int) -> list[int]:
        text: list[int] = []
        guess = torch.Generator().manual_seed(1)
        while len(text) < 10:
            counts = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=VOCAB_SIZE)[None].int()
            # Half of the drafts are right: they come from a run that is known to say the same.
            drafts = [known[len(text) + i] if torch.rand((), generator=guess) < 0.5 else 3 for i in range(num_draft)]
            layout = (torch.tensor([0, num_draft + 1]), torch.tensor([0, *drafts]),
                      len(text) + torch.arange(num_draft + 1), torch.tensor([0]))  # fmt: skip
            rows = adjust(logits.expand(num_draft + 1, -1), *layout, Edits(output_counts=counts, **penalties))
            sampled, num_sampled = rejection_sample(rows, *layout, sampling, num_draft)
            text += sampled[0, : num_sampled[0]].tolist()
        return text[:10]

    known = [0] * 20
    known = generate(0) + [0] * 10
    assert generate(3) == known[:10] == generate(1)
