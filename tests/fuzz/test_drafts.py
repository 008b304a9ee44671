"""Drafts: whatever a proposer returns, what passes the barrier is a valid draft that nobody else can write to."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from rubbish import JSON

from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.isolation.barrier import FaultBarrier

K, VOCAB_SIZE = 3, 10
IDS = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def answers(draw: st.DrawFn) -> tuple[Any, np.ndarray]:
    """What the proposer returns, and how many tokens were wanted of it for each request: a valid draft, or one with
    something wrong in one of its fields, or rubbish."""
    wanted = np.array(draw(st.lists(st.sampled_from([0, 1, K, K]), min_size=1, max_size=4)), np.int32)
    num_reqs, width = len(wanted), draw(st.sampled_from([0, 1, K, K]))
    most = np.minimum(wanted, width).astype(np.int32)
    num_draft = np.maximum(0, most - draw(st.sampled_from([0, 0, 1]))).astype(np.int32)
    fields = {
        "token_ids": np.array(draw(arrays_of.arrays(np.int32, (num_reqs, width), elements=IDS))),
        "num_draft": num_draft,
        "confidence": draw(st.none() | st.just(np.linspace(0, 1, num_reqs, dtype=np.float32))),
        "logits": None,
        "stage": draw(st.none() | st.just(np.arange(num_reqs, dtype=np.int32))),
    }
    spoilt = draw(st.sampled_from([None, "token_ids", "token_ids", *fields]))
    if spoilt is not None:
        array = fields[spoilt] if fields[spoilt] is not None else np.zeros((num_reqs, width, VOCAB_SIZE), np.float32)
        fields[spoilt] = draw(spoils(array))
    return Draft(**fields) if draw(st.integers(0, 9)) else draw(JSON), wanted


@st.composite
def spoils(draw: st.DrawFn, array: np.ndarray) -> Any:
    """Of another value, shape, dtype or type."""
    kind = draw(
        st.sampled_from(
            ["value", "value", "shape", "row", "column", "dtype", "view", "tensor", "mask", "as is", "rubbish"]
        )
    )
    match kind:
        case "value" if array.size:
            found = array.copy()
            odd = [-1, VOCAB_SIZE, K + 1, 2**31 - 1, -(2**31)] if array.dtype == np.int32 else [np.nan, np.inf]
            found.reshape(-1)[draw(st.sampled_from([0, array.size - 1]))] = draw(st.sampled_from(odd))
            return found
        case "shape":
            shape = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
            return draw(arrays_of.arrays(array.dtype, draw(shape), elements=st.integers(0, 1)))
        case "row":
            return array[:-1] if draw(st.booleans()) else np.concatenate([array, array[:1]])
        case "column":
            return np.ones((len(array), draw(st.sampled_from([K + 1, 1000]))), array.dtype)
        case "dtype":
            return array.astype(draw(st.sampled_from([np.int64, np.uint32, np.int16, np.float64, bool, object, ">i4"])))
        case "view":
            return array[::-1][::-1]
        case "tensor":
            return torch.from_numpy(np.array(array))
        case "mask":
            return np.ma.masked_array(array, mask=draw(st.booleans()))
        case "rubbish":
            return draw(JSON)
    return array


class Answering:
    """Returns the one answer that it is given."""

    def __init__(self, answer: Any):
        self.answer = answer

    def propose(self, batch: DraftBatch) -> Any:
        return self.answer

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Any) -> None: ...


@given(answers())
def test_valid_or_nothing(answer: tuple[Any, np.ndarray]) -> None:
    """Kills: each check of a draft and each copy that is left out; a good draft that is dropped."""
    returned, wanted = answer
    num_reqs = len(wanted)
    histories = [np.arange(4, dtype=np.int32) for _ in wanted]
    batch = DraftBatch([str(row) for row in range(num_reqs)], histories, wanted, [{} for _ in wanted])
    barrier = FaultBarrier(Answering(returned), VOCAB_SIZE, K, time_budget_ms=None)
    draft = barrier.propose(batch, Feedback([], np.zeros(0, np.int32), np.zeros(0, np.int32)))

    assert type(draft) is Draft and type(draft.token_ids) is type(draft.num_draft) is np.ndarray
    assert draft.token_ids.dtype == draft.num_draft.dtype == np.int32
    assert draft.token_ids.shape[0] == num_reqs == len(draft.num_draft) and draft.token_ids.shape[1] <= K
    assert ((draft.num_draft >= 0) & (draft.num_draft <= wanted)).all()
    rows = [row[:count].tolist() for row, count in zip(draft.token_ids, draft.num_draft, strict=True)]
    assert [len(row) for row in rows] == draft.num_draft.tolist()
    assert all(0 <= token < VOCAB_SIZE for row in rows for token in row)
    assert draft.logits is None
    assert draft.confidence is None or np.isfinite(draft.confidence).all()
    if not is_valid(returned, wanted):
        assert barrier.counters.faults == {"returned nonsense": 1} and not draft.num_draft.any()
        return
    assert barrier.counters.faults == {}
    assert rows == [row[:count].tolist() for row, count in zip(returned.token_ids, returned.num_draft, strict=True)]
    assert not np.shares_memory(draft.token_ids, returned.token_ids)


def is_valid(draft: Any, wanted: np.ndarray) -> bool:
    """What draft.Draft says of a proposer that runs on the host, once more."""
    if type(draft) is not Draft or draft.logits is not None:
        return False
    fields = [(draft.token_ids, np.int32, 2), (draft.num_draft, np.int32, 1)]
    fields += [(draft.confidence, np.float32, 1), (draft.stage, np.int32, 1)]
    for array, dtype, ndim in fields[:2] + [field for field in fields[2:] if field[0] is not None]:
        if type(array) is not np.ndarray or array.dtype != dtype or array.ndim != ndim or len(array) != len(wanted):
            return False
    width = draft.token_ids.shape[1]
    if width > K or any(
        not 0 <= count <= min(most, width) for count, most in zip(draft.num_draft, wanted, strict=True)
    ):
        return False
    if draft.confidence is not None and not np.isfinite(draft.confidence).all():
        return False
    rows = zip(draft.token_ids.tolist(), draft.num_draft, strict=True)
    return all(0 <= token < VOCAB_SIZE for row, count in rows for token in row[:count])
