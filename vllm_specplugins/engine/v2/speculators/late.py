"""Model Runner V2: drafts of a proposer on the host that nobody waits for.

It drafts in a thread of its own, from the tokens that have arrived, which are a step or two old. What was sampled since
then the device holds against the draft; where both agree it drops that, and drafts the rest. R: rows of the batch, L:
3 K + 2 tokens, a draft of K after two steps of K + 1 each.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.draft import DraftBatch, Int32Array
from vllm_specplugins.engine.v2.feedback.async_copy import SampledTokens
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.isolation.exchange import checked_draft, for_proposer
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.kernels.history_match import LONGEST_MATCH, Match
from vllm_specplugins.structures.arrays import Views
from vllm_specplugins.structures.drafts import columns

_SLOT, _START, _NUM_DRAFT, _CONFIDENCE, _TOKENS = range(5)  # columns of the table; tokens to its end
MOST_UNREAD = 64  # steps whose tokens are kept for a proposer that hangs or is switched off
_READ_AT = 32  # steps after which it sees them, though nothing is drafted


def late_length(max_num_draft: int) -> int:
    """L of K."""
    return 3 * max_num_draft + 2


_Step = tuple[SampledTokens, list[tuple[int, Request]]]  # requests with their rows


class LateDrafts:
    """See the module.

    Args:
        req_states: vLLM's states of requests.
        max_num_draft: K.
    """

    guard: Guard  # of the proposer; set by runner.attach

    def __init__(self, req_states: Any, max_num_draft: int, vocab_size: int, device: torch.device):
        self._req_states, self._group = req_states, get_tp_group()
        self._drafts = self._group.rank_in_group == 0  # for all ranks
        self._max_num_draft, self._length, self._vocab_size = max_num_draft, late_length(max_num_draft), vocab_size
        # Of each slot its newest draft: the slot, the place of the first token, how many, how sure, and the tokens.
        shape = req_states.max_num_reqs, _TOKENS + self._length
        self._table = torch.zeros(shape, dtype=torch.int32, device=device)
        self._requests: dict[str, Request] = {}
        self._num_unread: dict[Request, int] = {}  # of those that took part in a step, their steps in `_unread`
        self._ended: list[Request] = []  # of whose tokens the proposer has not seen all
        self._unread, self._read = deque[_Step](), deque[_Step]()  # the proposer's thread takes the latter
        self._most = max_num_draft

    def add(self, requests: Sequence[Request]) -> None:
        """Takes requests."""
        if not self._drafts:
            return
        self.remove(request.request_id for request in requests)
        shown = [request for request in requests if request.has_token_ids and not request.is_warm_up]
        self._requests |= {request.request_id: request for request in shown}
        slots = np.array([request.slot for request in requests])
        self._table[:, _NUM_DRAFT].index_fill_(0, async_tensor_h2d(slots, self._table.device), 0)

    def remove(self, request_ids: Any) -> None:
        """Drops requests that are over, or were preempted, once the proposer has seen their tokens."""
        gone = [self._requests.pop(request_id) for request_id in request_ids if request_id in self._requests]
        self._ended += [request for request in gone if request in self._num_unread]

    def note(self, sampled: SampledTokens) -> None:
        """Takes what a step sampled, on its way to the host."""
        names = enumerate(sampled.request_ids)
        requests = [(row, self._requests[name]) for row, name in names if name in self._requests]
        if not requests:
            return
        for _, request in requests:
            self._num_unread[request] = self._num_unread.get(request, 0) + 1
        self._unread.append((sampled, requests))
        if len(self._unread) > _READ_AT:
            self._take_turns()
        if len(self._unread) + len(self._read) > MOST_UNREAD:
            self._forget_all()

    def step(self, most: int) -> None:
        """On every rank, before a step drafts so many tokens: takes what has been drafted, and asks for more."""
        if self._drafts:
            self._most = most
            self._take_turns()
        if self._group.world_size > 1:
            self._group.broadcast(self._table, src=0)

    def settle(self) -> None:
        """Begins to have the proposer see all that has come, since no step follows for a while."""
        if self._drafts:
            self.guard.settle()
            self._begin(0)

    def _take_turns(self) -> None:
        self._enter(self.guard.take())
        self._begin(self._most)

    def _enter(self, drafted: tuple[Sequence[Request], Int32Array] | None) -> None:
        """Puts drafts into the table; those of requests that are over would be another's."""
        if drafted is None:
            return
        requests, rows = drafted
        kept = [self._is_there(request) for request in requests]
        if any(kept):
            own = async_tensor_h2d(rows[kept], self._table.device)
            self._table.index_copy_(0, own[:, _SLOT].long(), own)

    def _is_there(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def _begin(self, most: int) -> None:
        """Has the proposer see what has arrived, and draft, if most > 0, for the requests that go on."""
        if not self.guard.can_start:
            return
        over, asked = self._asked()
        if not asked:
            return
        may_draft = self.guard.may_draft(list(asked)) or [True] * len(asked)
        requests = [request for request, may in zip(asked.values(), may_draft, strict=True) if may]
        wanted = {request for request in requests if most and self._is_there(request)}
        options = [request.limits.options for request in requests]
        batch = DraftBatch([request.request_id for request in requests], (), np.zeros(len(requests), np.int32), options)
        self.guard.start(batch, partial(self._drafted, requests, wanted, self._read))
        for request in [request for request in self._ended if not self._num_unread[request]]:
            self._ended.remove(request)
            del self._num_unread[request]
        self.guard.forget(over)

    def _asked(self) -> tuple[list[str], dict[str, Request]]:
        """Who is over and has all tokens here; by name whom the proposer shall see: them, and who has new ones."""
        while self._unread and self._unread[0][0].arrived.query():
            self._read.append(self._unread.popleft())
            for _, request in self._read[-1][1]:
                self._num_unread[request] -= 1
        asked = {request.request_id: request for request in reversed(self._ended) if not self._num_unread[request]}
        # One that is back under its name is not shown before the proposer is told to forget it.
        over, ended = list(asked), {request.request_id for request in self._ended}
        for _, request in chain(*(requests for _, requests in self._read)):
            if request.request_id not in ended:
                asked[request.request_id] = request
        return over, asked

    def _drafted(
        self, requests: Sequence[Request], wanted: set[Request], steps: deque[_Step]
    ) -> tuple[Sequence[Request], Int32Array]:
        """In the proposer's thread: rows of the table."""
        while steps:
            sampled, rows_of = steps.popleft()
            for row, request in rows_of:
                request.extend(sampled.token_ids[row, : sampled.num_sampled[row]])
        requests = [request for request in requests if request.num_tokens > request.num_first]
        rows = np.zeros((len(requests), _TOKENS + self._length), np.int32)
        if not requests:
            return requests, rows
        names, texts = [request.request_id for request in requests], Views(request.token_ids for request in requests)
        limits = np.array([self._limit(request) if request in wanted else 0 for request in requests], np.int32)
        batch = for_proposer(DraftBatch(names, texts, limits, [request.limits.options for request in requests]))
        draft = checked_draft(self.guard.proposer.propose(batch), limits, self._length, self._vocab_size)
        rows[:, :_NUM_DRAFT] = [(request.slot, request.num_tokens) for request in requests]
        rows[:, _NUM_DRAFT] = draft.num_draft
        rows[:, _CONFIDENCE] = 1 if draft.confidence is None else draft.confidence.clip(1, LONGEST_MATCH)
        rows[:, _TOKENS : _TOKENS + draft.token_ids.shape[1]] = draft.token_ids
        return requests, rows

    def _limit(self, request: Request) -> int:
        """As much as there is room for, if it gets any: how much, the device knows."""
        limits, num_tokens = request.limits, request.num_tokens
        return min(self._length, limits.length_limit - 1 - num_tokens) * limits.max_draft_tokens(num_tokens, 1)

    def _forget_all(self) -> None:
        """Requests whose tokens nobody read get no more of these drafts."""
        self.guard.forget([*self._requests, *(request.request_id for request in self._ended)])
        self._requests, self._num_unread, self._ended = {}, {}, []
        self._unread, self._read = deque(), deque()

    def match(self, slots: torch.Tensor, max_draft: torch.Tensor) -> Match:
        """What is left of each row's draft, [R] both; in a graph, like a match in a text."""
        slots = slots.long()
        row, lengths = self._table[slots], self._req_states.total_len.gpu[slots]
        start, drafted, tokens = row[:, _START], row[:, _NUM_DRAFT], row[:, _TOKENS:]
        num_since, places = lengths - start, columns(tokens)
        written = (start[:, None] + places).clamp(max=self._req_states.max_model_len - 1)
        sampled = self._req_states.all_token_ids.gpu[slots[:, None], written]
        agrees = ((sampled == tokens) | (places >= num_since[:, None])).all(dim=1) & (num_since >= 0)
        num_left = (drafted - num_since).clamp(min=0).minimum(max_draft) * agrees
        steps = places[: self._max_num_draft]
        shifted = tokens.gather(1, (steps + num_since[:, None]).clamp(0, self._length - 1))
        token_ids = torch.where(steps < num_left[:, None], shifted, 0)
        match_length = (row[:, _CONFIDENCE] + num_since).clamp(max=LONGEST_MATCH)
        return Match(token_ids, num_left, match_length)
