"""Reserves a step's tokens for prompts and for all running requests. vLLM's scheduler reserves the tokens of each
request's whole draft, independently of the number that the device verifies. Long drafts would leave no room for other
requests and prompts."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

_MANY = 256  # prompt tokens that make a step long
_BESIDE = 32  # prompt tokens of such a step per draft token, so that drafts hardly delay a first token


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
