"""Appends forced tokens to drafts in the scheduler, after the grammar has cut them. Grammars are in the scheduler's
process, and a synchronous scheduler has the drafts. It adds no tokens before the grammar applies (reasoning), beyond
the limits of a request's options, or if the request can verify only one position."""

import logging
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specplugins.config import methods_of, stage_names
from vllm_specplugins.engine.frontend.options import RequestLimits
from vllm_specplugins.engine.grammar.forced import ForcedTokens
from vllm_specplugins.engine.messages import NEVER, ForcedDraft, news_of
from vllm_specplugins.engine.room import LimitsMasks
from vllm_specplugins.engine.scheduler import CountsEmitted
from vllm_specplugins.isolation.faults import cause_text

logger = logging.getLogger("vllm.specplugins")

# Limit of a request's forced tokens if the batch has requests without a grammar, since forced tokens lengthen their
# steps.
_MAX_BESIDE_OTHERS = 8


class GrammarScheduler(LimitsMasks, CountsEmitted, Scheduler):
    """vLLM's synchronous scheduler with the stage `grammar`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.vllm_config.speculative_config.plugin_config
        index = methods_of(config).index("grammar")
        self._name = stage_names(methods_of(config))[index]
        stage_length = config.stages[index].num_speculative_tokens if config.stages else None
        self._max_num: int = stage_length or self.num_spec_tokens
        self._num_before: dict[str, int] = {}  # request with forced tokens -> number of draft tokens before them
        self._forced, self._has_failed = self._new_forced(), False

    def _new_forced(self) -> ForcedTokens | None:
        structured_outputs, model_config = self.structured_output_manager, self.vllm_config.model_config
        try:
            return ForcedTokens(
                structured_outputs.tokenizer,
                model_config.get_vocab_size(),
                lambda: structured_outputs.backend.allocate_token_bitmask(1),
            )
        except (AttributeError, ValueError) as error:  # skip_tokenizer_init, or a slow tokenizer
            logger.warning("grammar drafts nothing: the model has no fast tokenizer (%s).", error)
            return None

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)
        if self.is_off:
            return
        is_shared = not all(request.use_structured_output for request in self.running)
        max_num = min(self._max_num, _MAX_BESIDE_OTHERS) if is_shared else self._max_num
        for request_id, draft in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            self._num_before.pop(request_id, None)
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request.is_prefill_chunk or draft == NEVER:
                continue
            if request.use_structured_output and self._forced is not None:
                self._extend(self._forced, request, max_num)

    def _extend(self, forced: ForcedTokens, request: Any, max_num: int) -> None:
        draft = request.spec_token_ids
        start, constrained = self.structured_output_manager._get_constraint_bounds(request, draft)
        limits = RequestLimits.of(request.sampling_params, request.num_prompt_tokens, self.max_model_len)
        room, stages = limits.max_draft_tokens(request.num_tokens, self.num_spec_tokens) - len(draft), (self._name,)
        if max(start, constrained) > len(draft) or room <= 0 or self._name not in limits.options.get("stages", stages):
            return
        try:
            grammar = request.structured_output_request.grammar
            tokens = forced.after(grammar, draft[start:], min(room, max_num), request)
        except Exception as error:  # a client's grammar may cost only the client's drafts
            if not self._has_failed:
                words = "grammar cannot draft for a request in this step (%s). This is logged once."
                logger.error(words, cause_text(error))
            self._has_failed = True
            return
        if tokens:
            self._num_before[request.request_id] = len(draft)
            request.spec_token_ids = [*draft, *tokens]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        drafts, scheduled = scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_scheduled_tokens
        counts = {request_id: num for request_id, num in self._num_before.items() if request_id in scheduled}
        forced = (ForcedDraft(id_, num, drafts[id_][num:]) for id_, num in counts.items() if id_ in drafts)
        news_of(scheduler_output).forced = tuple(forced)
        waiting = {id_: num for id_, num in self._num_before.items() if id_ not in counts and id_ in self.requests}
        self._num_before = waiting
