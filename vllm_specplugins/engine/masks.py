"""Limits the cost of masks for structured output: a step fills a row of the vocabulary's size for each position that it
may verify. A request gets few draft tokens until the target accepts more, and the masks end at the step's longest
draft. The worker learns which drafts a grammar has cut, since the target does not see the refused tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.structured_output import StructuredOutputManager

from vllm_specplugins.engine.hooks import replaced, wrap
from vllm_specplugins.engine.messages import NEVER, news_of

UNPROVEN = 5  # draft tokens of a request with structured output until more of its draft are accepted


class LimitsMasks:
    """A mixin for vLLM's schedulers, synchronous ones (which get drafts) and asynchronous ones (which plan them)."""

    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._cut: dict[str, int] = {}  # drafts of which the grammar refused the next token -> their lengths
        self._num_tokens: dict[str, int] = {}  # numbers of tokens of requests with structured output, one step ago

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        if unproven := self._unproven(draft_token_ids.req_ids):
            pairs = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
            drafts = [draft[:UNPROVEN] if request_id in unproven else draft for request_id, draft in pairs]
            draft_token_ids = replace(draft_token_ids, draft_token_ids=drafts)
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]
        for request_id, draft in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            self._cut.pop(request_id, None)
            request = self.requests.get(request_id)
            if request is None or not request.use_structured_output or request.is_prefill_chunk or draft == NEVER:
                continue
            if len(request.spec_token_ids) < len(draft):
                self._cut[request_id] = len(request.spec_token_ids)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        if not self._cut:
            return
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        news_of(scheduler_output).refused = tuple(
            id_ for id_, length in self._cut.items() if id_ in scheduled and len(drafts.get(id_, ())) >= length
        )
        waiting = {id_: length for id_, length in self._cut.items() if id_ not in scheduled and id_ in self.requests}
        self._cut = waiting

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)  # type: ignore[misc]
        for request_id in self._unproven(draft_token_ids.req_ids):
            request = self.requests[request_id]
            request.spec_token_ids = request.spec_token_ids[:UNPROVEN]

    def _unproven(self, request_ids: list[str]) -> set[str]:
        """Returns the requests with structured output that emitted few tokens in the last step."""
        requests = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        num_tokens = {request.request_id: request.num_tokens for request in requests if request.use_structured_output}
        before, self._num_tokens = self._num_tokens, num_tokens
        return {request_id for request_id, num in num_tokens.items() if num - before.get(request_id, num) <= UNPROVEN}


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
    self.vllm_config = _WithLength(config, num_rows - 1)
    try:
        return original(self, requests, structured_output_request_ids, drafts)
    finally:
        self.vllm_config = config


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
