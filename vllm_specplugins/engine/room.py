"""Shortens drafts in the scheduler, so that a step has room for prompts and for all running requests, and few rows of
masks for structured output. vLLM's scheduler reserves the tokens of each request's whole draft, independently of the
number that the device verifies. Long drafts would leave no room for other requests and prompts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from vllm_specplugins.engine.messages import NEVER, news_of

_MANY = 256  # prompt tokens that make a step long
_BESIDE = 32  # prompt tokens of such a step per draft token, so that drafts hardly delay a first token
UNPROVEN = 5  # draft tokens of a request with structured output until more of its draft are accepted


def _num_tokens(counts: Mapping[int, int], limit: int) -> int:
    """Returns the number of tokens of drafts that are shortened to a limit; `counts` has the number of drafts by
    length.

    >>> _num_tokens({1: 10, 31: 2}, 4)
    18
    """
    return sum(min(length, limit) * count for length, count in counts.items())


class MakesRoom:
    """A mixin for vLLM's schedulers: drafts get the tokens that the next step does not need.

    Attributes: draft_limit: the length to which the newest step shortened all drafts; None: it shortened no draft.
    """

    draft_limit: int | None = None
    running: list[Any]
    kv_cache_manager: Any
    kv_holding_waiting: Any
    waiting: Any
    block_size: int
    max_num_running_reqs: int

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.draft_limit = self._shorten_drafts()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _shorten_drafts(self) -> int | None:
        running = self.running
        drafts = [request for request in running if request.spec_token_ids]
        if not drafts:
            return None
        counts = (
            request.num_tokens + request.num_output_placeholders - request.num_computed_tokens for request in running
        )
        needed = sum(max(0, count) for count in counts)  # without drafts
        room = self.max_num_scheduled_tokens - needed  # type: ignore[attr-defined]
        waiting = self._num_waiting_tokens(room)
        room, num_prompt = room - waiting, needed - len(running) + waiting
        gate: str = self.vllm_config.speculative_config.plugin_config.common.gate  # type: ignore[attr-defined]
        if num_prompt >= _MANY and gate != "off":  # without a gate, the step verifies all drafts that fit
            room = min(room, num_prompt // _BESIDE + len(drafts) // 2)
        lengths = Counter(len(request.spec_token_ids) for request in drafts)
        longest = max(lengths)
        fitting = (limit for limit in range(longest, 0, -1) if _num_tokens(lengths, limit) <= room)
        if (limit := next(fitting, 0)) == longest:
            return None
        for request in drafts:
            request.spec_token_ids = request.spec_token_ids[:limit]
        return limit

    def _num_waiting_tokens(self, room: int) -> int:
        """Returns the number of tokens of waiting prompts for which there are free requests and memory, at most
        `room`."""
        from vllm.v1.request import RequestStatus

        free = self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size
        seats = max(0, self.max_num_running_reqs - len(self.running))
        total = 0
        for request in islice(chain(self.kv_holding_waiting, self.waiting), seats):
            count = request.num_tokens - request.num_computed_tokens
            if total >= room or total + count > free:
                break
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                total += count
        return max(0, min(total, room))


class LimitsMasks:
    """A mixin for vLLM's schedulers, synchronous ones (which get drafts) and asynchronous ones (which plan them). A
    request with structured output gets few draft tokens until the target accepts more. The worker learns which drafts a
    grammar has cut, since the target does not see the refused tokens."""

    requests: dict[str, Any]
    is_off: bool  # as in Switched

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
        if self.is_off:
            return
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

    def _forget_drafts(self) -> None:
        """Forgets the drafts of requests, at the switch."""
        super()._forget_drafts()  # type: ignore[misc]
        self._cut, self._num_tokens = {}, {}

    def _unproven(self, request_ids: list[str]) -> set[str]:
        """Returns the requests with structured output that emitted few tokens in the last step."""
        requests = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        num_tokens = {request.request_id: request.num_tokens for request in requests if request.use_structured_output}
        before, self._num_tokens = self._num_tokens, num_tokens
        return {request_id for request_id, num in num_tokens.items() if num - before.get(request_id, num) <= UNPROVEN}
