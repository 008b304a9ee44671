"""Limits the cost of masks for structured output: a step fills a row of the vocabulary's size for each position that it
may verify, and the masks end at the step's longest draft (room.py limits the drafts)."""

import time
from typing import Any
from weakref import WeakSet

import numpy as np
from vllm.v1.structured_output import StructuredOutputManager

from vllm_specplugins.engine.hooks import replaced, wrap

SLOW_S = 0.05  # of computing for a draft in a grammar, after which its request gets no more drafts
_slow_requests = WeakSet[Any]()


class _WithLength:
    """A VllmConfig with another number of draft tokens."""

    def __init__(self, config: Any, num_speculative_tokens: int):
        self._config, self.num_speculative_tokens = config, num_speculative_tokens
        self.model_config = config.model_config  # read for each request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def fill_short_masks() -> None:
    """Makes vLLM fill, and vLLM 0.33 send, no rows after the step's longest draft. Applied once per process."""
    wrap(StructuredOutputManager, "grammar_bitmask", _fill)
    wrap(StructuredOutputManager, "validate_tokens", _validate)


def _validate(original: Any, self: Any, request: Any, token_ids: Any) -> Any:
    """Refuses the drafts of a request whose grammar is slow: all requests wait for it, and a regular expression such as
    ((((a*)*)*)*)*b takes 0.9 s for a token after 40 others."""
    if request in _slow_requests:
        return []
    began = time.thread_time()
    valid = original(self, request, token_ids)
    if time.thread_time() - began > SLOW_S:
        _slow_requests.add(request)
    return valid


def _fill(original: Any, self: Any, requests: Any, structured_output_request_ids: Any, drafts: Any) -> Any:
    config = self.vllm_config
    if config.speculative_config is None or config.model_config.is_diffusion:
        return original(self, requests, structured_output_request_ids, drafts)
    longest = 0
    if drafts:
        longest = max([len(drafts[name]) for name in structured_output_request_ids if name in drafts], default=0)
    num_rows = min(1 << longest.bit_length(), 1 + config.num_speculative_tokens)  # a GPU compiles a kernel for each
    masks, max_num_rows = self._grammar_bitmask, config.scheduler_config.max_num_seqs * num_rows
    if masks is not None and len(masks) < max_num_rows:
        self._grammar_bitmask = None  # vLLM allocates more
    with replaced(self, {"vllm_config": _WithLength(config, num_rows - 1)}):
        return original(self, requests, structured_output_request_ids, drafts)


def apply_short_masks() -> None:
    """Makes workers of Model Runner V2 read such masks; V1 counts the rows itself. Applied once per process."""
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    wrap(StructuredOutputsWorker, "apply_grammar_bitmask", _apply)


def _apply(original: Any, self: Any, logits: Any, input_batch: Any, request_ids: Any, masks: Any) -> None:
    num_reqs = len(request_ids)
    if hasattr(self, "num_bonus_tokens") or not num_reqs:  # vLLM 0.32 sends only the filled rows
        return original(self, logits, input_batch, request_ids, masks)
    if not hasattr(self, "specplugins"):  # vLLM's warm-up compiles the other kernels, with masks that allow all tokens
        self.specplugins, longest = True, self.mask_stride
        for num_rows in sorted({min(1 << n, longest) for n in range(longest.bit_length() + 1)}):
            allow = np.full((num_reqs * num_rows, masks.shape[1]), -1, masks.dtype)
            _apply(original, self, logits, input_batch, request_ids, allow)
    with replaced(self, {"mask_stride": len(masks) // num_reqs}):
        return original(self, logits, input_batch, request_ids, masks)
