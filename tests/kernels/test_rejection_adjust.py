"""Edits of logits against a brute-force oracle, row by row; that they are exact under speculation; Triton's."""

import math

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, bytes_moved, needs_triton
from vllm_specplugins.kernels.rejection.adjust import Edits, adjust
from vllm_specplugins.kernels.rejection.inputs import Batch, make_batch, make_edits, to_device


def listed(tokens: tuple, state: int) -> list[int]:
    return tokens[1][state, : int(tokens[0][state])].tolist()


def bit(words: torch.Tensor, token: int) -> bool:
    return bool(int(words[token // 32]) >> (token % 32) & 1)


def oracle_row(row: torch.Tensor, state: int, position: int, drafts: list[int], e: Edits) -> list[float]:
    """One row by the definitions, token by token."""
    words = e.bad_words
    prompt_length = int(words.prompt_lengths[state])
    emitted = words.history[state, prompt_length : max(position - len(drafts), prompt_length)].tolist() + drafts
    banned = set(listed(e.min_tokens, state)) if position < e.min_tokens.min_positions[state] else set()
    for word in range(int(words.num_words[state])):
        begin, end = words.offsets[state, word : word + 2].tolist()
        *prefix, last = words.token_ids[state, begin:end].tolist()
        if len(prefix) <= len(emitted) and emitted[len(emitted) - len(prefix) :] == prefix:
            banned.add(last)
    allowed = listed(e.allowed, state) or range(len(row))
    bias = dict(zip(listed(e.bias, state), e.bias.values[state].tolist(), strict=False))
    repetition, frequency, presence = (float(values[state]) for values in e.penalties[:3])
    result = []
    for token, value in enumerate(row.tolist()):
        logit = value + bias.get(token, 0)
        count = int(e.penalties.output_counts[state, token]) + drafts.count(token)
        if count or bit(e.penalties.prompt_mask[state], token):
            logit *= repetition ** (-1 if logit > 0 else 1)
        logit -= frequency * count + presence * (count > 0)
        keeps = token in allowed and token not in banned
        result.append(logit if keeps else -math.inf)
    return result


@pytest.mark.parametrize("vocab_size", [1, 4, 37])
def test_oracle(vocab_size: int) -> None:
    """Fails if penalties are off by one position, if the bias comes after penalties, or if words match across the
    prompt's end."""
    batch = make_batch([3, 0, 4, 1, 2, 2], vocab_size, agreement=0.3)
    edits = make_edits(batch)
    ours = adjust(batch.target_logits, *batch[1:5], edits, batch.max_num_draft)
    bounds, num_forbidden = batch.cu_num_logits.tolist(), 0
    for request, state in enumerate(batch.idx_mapping.tolist()):
        for row in range(bounds[request], bounds[request + 1]):
            drafts = batch.draft_token_ids[bounds[request] + 1 : row + 1].tolist()
            expected = oracle_row(batch.target_logits[row], state, int(batch.positions[row]), drafts, edits)
            torch.testing.assert_close(ours[row], torch.tensor(expected), rtol=1e-5, atol=1e-5)
            num_forbidden += expected.count(-math.inf)
    assert 0 < num_forbidden < ours.numel() or vocab_size == 1


def only_last(batch: Batch, edits: Edits, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the edited logits of the requests' last rows, once from all rows, and once from only these rows."""
    last = batch.cu_num_logits[1:].long() - 1
    whole = adjust(*to_device((*batch[:5], edits, batch.max_num_draft), DEVICE), implementation)
    alone = batch.target_logits[last], *batch[1:5], edits, batch.max_num_draft
    actual = adjust(*to_device(alone, DEVICE), implementation, only_last=True)
    return whole.cpu()[last], actual.cpu()


def test_only_last() -> None:
    """As a drafter asks, after its drafts. Kills: the first row's drafts, positions or words."""
    batch = make_batch([3, 0, 4, 1, 2, 2], 37, agreement=0.3)
    expected, actual = only_last(batch, make_edits(batch), "reference")
    assert torch.equal(actual, expected)


def test_each_alone_and_none() -> None:
    """A field that is None does nothing; the input stays. Kills: an edit in place; a field that needs another."""
    batch = make_batch([2, 1, 0, 3] * 3, 37)
    before, edits = batch.target_logits.clone(), make_edits(batch)
    assert torch.equal(adjust(before, *batch[1:5], Edits(), 3), before)
    for name in Edits._fields:
        changed = adjust(batch.target_logits, *batch[1:5], Edits(**{name: getattr(edits, name)}), 3)
        assert not torch.equal(changed, before), name
    assert torch.equal(batch.target_logits, before)
    with pytest.raises(ValueError, match="implementation is 'other'"):
        adjust(before, *batch[1:5], Edits(), 3, "other")


def assert_same(batch: Batch, edits: Edits) -> None:
    """Bit for bit, NaN too; a GPU multiplies and adds in one rounding."""
    arguments = (*batch[:5], edits, batch.max_num_draft)
    expected = adjust(*arguments, implementation="reference")
    ours = adjust(*to_device(arguments, DEVICE), implementation="fused")
    assert ours.dtype == torch.float32
    tolerance = 1e-6 if DEVICE == "cuda" else 0
    torch.testing.assert_close(ours.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("vocab_size", [1, 4, 37, 700, 2048, 4100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_reference(vocab_size: int, dtype: torch.dtype) -> None:
    """Ragged, everything at once. Kills: a list that overtakes another; a tile's edge; a state beyond its list."""
    batch = make_batch([3, 0, 4, 1, 2, 2], vocab_size, dtype=dtype, agreement=0.3)
    assert_same(batch, make_edits(batch, seed=1))


@needs_triton
def test_only_last_equals_all_rows() -> None:
    """Kills: logits of another row than the request's last."""
    batch = make_batch([3, 0, 4, 1, 2, 2], 300, agreement=0.3)
    expected, actual = only_last(batch, make_edits(batch), "fused")
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@needs_triton
@pytest.mark.parametrize("vocab_size", [4, 300])
@pytest.mark.parametrize("name", [*Edits._fields, None])
def test_alone(name: str | None, vocab_size: int) -> None:
    """Kills: a field that needs another; a word that begins in the prompt."""
    batch = make_batch([3, 0, 2, 1, 1, 0, 2, 0], vocab_size)
    edits = make_edits(batch)
    assert_same(batch, Edits(**{name: getattr(edits, name)} if name else {}))


@needs_triton
def test_strange_rows() -> None:
    """-inf, NaN, +inf, drafts of -1, a request without rows, rows apart. Kills: NaN that is not forbidden."""
    batch = make_batch([2, 4, 1, 3], 300)
    logits, rng = batch.target_logits, torch.Generator().manual_seed(3)
    for value in (-math.inf, math.nan, math.inf):
        logits[torch.rand(logits.shape, generator=rng) < 0.2] = value
    logits[2], logits[4] = -math.inf, math.nan
    edits = make_edits(batch)
    batch = batch._replace(
        target_logits=torch.cat([logits, logits], dim=1)[:, :300],
        draft_token_ids=batch.draft_token_ids.masked_fill(torch.rand(14, generator=rng) < 0.3, -1),
        cu_num_logits=torch.cat([batch.cu_num_logits, batch.cu_num_logits[-1:]]),
        idx_mapping=torch.cat([batch.idx_mapping, batch.idx_mapping[:1]]),
    )
    assert_same(batch, edits)
    for name in ("allowed", "min_tokens", "bad_words"):
        assert_same(batch, Edits(**{name: getattr(edits, name)}))


@pytest.mark.skipif(not INTERPRETED, reason="counts in the interpreter")
def test_bytes_moved() -> None:
    """Rows that nothing is asked of are read and written once."""
    batch = make_batch([2, 2, 2, 2, 2, 2], 32_768, dtype=torch.bfloat16)
    edits = make_edits(batch)
    batch = batch._replace(idx_mapping=torch.tensor([3, 7, 11, 3, 7, 11]))
    with bytes_moved() as moved:
        result = adjust(*batch[:5], edits, 2, implementation="fused")
    assert torch.equal(result, batch.target_logits.float())
    assert moved["all"] <= 1.01 * (2 + 4) * result.numel()
