"""Defines the interface of proposers that draft on the device. On Model Runner V2 they run in the CUDA graph of a step,
so no step waits for them.

Dimensions: num_slots, the requests that the engine can hold; a request has one slot from `start` to its end. num_reqs,
the rows of a step, padding included. K = num_speculative_tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Proposer, ProposerContext


class DeviceTexts(NamedTuple):
    """The requests' texts (prompts and outputs so far) on the device, as read-only tensors at fixed addresses.

    Args:
        token_ids: [num_slots, max_model_len] int32; tokens after a request's length are arbitrary.
        lengths: [num_slots] int32.
    """

    token_ids: Any
    lengths: Any


def checked_draft(draft: Any, limits: Any, max_num_draft: int) -> Draft:
    """Returns the draft. Raises ValueError for a tensor whose shape, type or device differs from what
    `DeviceProposer.draft` must return. It reads no values, so no step waits."""
    token_ids, num_draft, confidence = draft.token_ids, draft.num_draft, draft.confidence
    rows, device = tuple(limits.shape), limits.device
    integers, floats = ("int32", "int64"), ("float32", "float16", "bfloat16", "float64")
    for name, tensor, shape, dtypes in (
        ("token_ids", token_ids, (*rows, min(token_ids.shape[-1], max_num_draft)), integers),
        ("num_draft", num_draft, rows, integers),
        *[("confidence", confidence, rows, floats)] * (confidence is not None),
    ):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), tensor.device) != (shape, device) or dtype not in dtypes:
            given = f"{tuple(tensor.shape)} of {dtype} on {tensor.device}"
            raise ValueError(f"{name} must be {shape} of {dtypes[0]} on {device}, not {given}")
    if draft.logits is not None:
        raise ValueError("logits must be None, since the tokens of a device proposer are certain")
    return Draft(token_ids, num_draft, confidence)


class DeviceProposer(Proposer):
    """The base class of proposers that draft on the device; subclasses override `draft`. On Model Runner V1, as a stage
    of a cascade and in `check`, `propose` copies the host's tokens to tensors in each step, which is slow."""

    drafts_on_device = True

    def __init__(self, options: Any, context: ProposerContext):
        """Allocates what `draft` keeps between steps, on `context.device`."""
        self.context = context
        self._slots: dict[str, int] = {}  # of `propose`

    def draft(self, texts: DeviceTexts, slots: Any, limits: Any) -> Draft:
        """Drafts at most limits ([num_reqs] int32) tokens after the texts in these slots ([num_reqs] int64). A CUDA
        graph records the call for each batch size and replays it, so the call must neither wait for the device nor
        branch on a tensor's values, and its shapes may depend only on num_reqs. Every tensor-parallel rank must compute
        the same result. Rows that pad a graph have the last slot, and limits 0.

        Returns a `Draft` of tensors without logits: token_ids [num_reqs, <= K] and num_draft [num_reqs] of int32 or
        int64, and confidence [num_reqs], a float, or None. The engine drops tokens past `limits`, and cuts a draft
        before a token outside the vocabulary.
        """
        raise NotImplementedError

    def start(self, request_id: str, slot: int, options: Mapping[str, Any]) -> None:
        """Resets the state of a slot before it drafts for a new request, or for a request that returns after a
        preemption."""
        return

    def observe(self, feedback: Feedback) -> None:
        """Receives outcomes as in `draft.Proposer`; Model Runner V2 never calls it."""
        return

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops requests that ended. A subclass that overrides this method must call it."""
        for request_id in request_ids:
            self._slots.pop(request_id, None)

    def propose(self, batch: DraftBatch) -> Draft:
        """Calls `draft` with tensors of the host's tokens."""
        import torch

        for request_id, options in zip(batch.request_ids, batch.options, strict=True):
            if request_id not in self._slots:
                slot = min({*range(self.context.max_num_reqs)} - {*self._slots.values()})
                self._slots[request_id] = slot
                self.start(request_id, slot, options)
        slots = np.array([self._slots[request_id] for request_id in batch.request_ids], np.int64)
        token_ids = np.zeros((self.context.max_num_reqs, max(map(len, batch.token_ids))), np.int32)
        lengths = np.zeros(self.context.max_num_reqs, np.int32)
        for slot, text in zip(slots, batch.token_ids, strict=True):
            token_ids[slot, : len(text)], lengths[slot] = text, len(text)
        given = (token_ids, lengths, slots, batch.max_num_draft.copy())
        texts_ids, texts_lengths, rows, limits = (torch.from_numpy(a).to(self.context.device) for a in given)
        drafted = self.draft(DeviceTexts(texts_ids, texts_lengths), rows, limits)
        ids, num_draft = (tensor.cpu().numpy().astype(np.int32) for tensor in (drafted.token_ids, drafted.num_draft))
        confidence = None if drafted.confidence is None else drafted.confidence.cpu().numpy().astype(np.float32)
        return Draft(ids, num_draft, confidence)
