"""What a proposer returns becomes a draft of ours: each field is checked, and copied where another could write to it.

Types are compared exactly, so that no code of the proposer's runs here.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specplugins.draft import Draft, Int32Array


class Nonsense(Exception):
    """What was returned is no valid draft; says why."""


class NotFinite(Nonsense):
    """Tokens were drawn from logits that are no distribution: so many."""

    def __init__(self, num_tokens: int):
        super().__init__("logits with NaN or infinity, or none that a token could be drawn from")
        self.num_tokens = num_tokens


def checked_draft(
    draft: Any,
    limits: Int32Array,  # [num_reqs], most tokens of each request
    max_num_draft: int,
    vocab_size: int,
    runs_target: bool = False,
) -> Draft:
    """A draft of the same tokens in arrays of ours.

    Args:
        draft: anything.
        limits: see DraftBatch.max_num_draft.
        max_num_draft: K, most columns.
        vocab_size: token ids are in [0, vocab_size).
        runs_target: tensors are passed on as they are: such a proposer is ours, and reading them would wait for the
            device.

    Raises:
        Nonsense: a field has another type, dtype or shape than draft.Draft says, or a value out of range.
    """
    if type(draft) is not Draft:
        raise Nonsense(f"a {type(draft).__name__} instead of a Draft")
    num_reqs = len(limits)
    fields: list[Any] = [getattr(draft, name, None) for name in Draft.__slots__]
    token_ids, num_draft, confidence, logits, stage = fields
    if not runs_target or type(token_ids) is np.ndarray:
        token_ids = _copied("token_ids", token_ids, np.int32, 2, num_reqs, max_num_draft)
    num_draft = _copied("num_draft", num_draft, np.int32, 1, num_reqs)
    if (num_draft.view(np.uint32) > np.minimum(limits, token_ids.shape[1])).any():  # as such, -1 is too many
        raise Nonsense("num_draft is outside of 0..max_num_draft")
    if type(token_ids) is np.ndarray and token_ids.view(np.uint32).max(initial=0) >= vocab_size:
        # a tensor's are an argmax over the vocabulary; past the end of a draft anything may stand
        used = token_ids[_used(num_draft, token_ids.shape[1])]
        if used.size and not 0 <= used.min() <= used.max() < vocab_size:
            raise Nonsense(f"a token id outside of 0..{vocab_size - 1}")
    if confidence is not None:
        confidence = _copied("confidence", confidence, np.float32, 1, num_reqs)
        if not np.isfinite(confidence).all():
            raise Nonsense("a confidence that is not finite")
    if stage is not None:
        stage = _copied("stage", stage, np.int32, 1, num_reqs)
    if logits is not None:
        if not runs_target:
            raise Nonsense("logits, which only a proposer that runs the target may return")
        # On another device nobody waits to look: verification rejects them, and the device counts (feedback/tally.py).
        if not logits.is_cuda:
            is_broken = ~logits.amax(-1).isfinite().numpy() & _used(num_draft, logits.shape[1])
            if is_broken.any():
                raise NotFinite(int(is_broken.sum()))
    return Draft(token_ids, num_draft, confidence, logits, stage)


def _used(num_draft: Int32Array, width: int) -> npt.NDArray[np.bool_]:
    """[num_reqs, width], where tokens of a draft stand."""
    mask: npt.NDArray[np.bool_] = np.arange(width) < num_draft[:, None]
    return mask


def _copied(name: str, value: Any, dtype: Any, ndim: int, num_rows: int, width: int = 0) -> npt.NDArray[Any]:
    """A copy of an array with so many rows and at most `width` columns: its owner may write to it at any time."""
    if type(value) is not np.ndarray:
        raise Nonsense(f"{name} is a {type(value).__name__} instead of a NumPy array")
    if value.dtype != dtype:
        raise Nonsense(f"{name} is {value.dtype} instead of {np.dtype(dtype)}")
    shape = value.shape
    if len(shape) != ndim or shape[0] != num_rows:
        raise Nonsense(f"{name} has the shape {shape} where it must have {num_rows} rows and {ndim} dims")
    if ndim == 2 and shape[1] > width:
        raise Nonsense(f"{name} has {shape[1]} columns where {width} are allowed")
    copy = np.array(value, dtype)
    if copy.shape != shape:
        raise Nonsense(f"{name} changed while it was read")
    return copy
