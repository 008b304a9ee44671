"""Model Runner V2: drafts with a proposer on the host while no step waits. The proposer drafts in a thread from the
tokens that have arrived, which are one or two steps old. The device compares the draft with the tokens sampled since;
if they agree, the rest of the draft follows them. R: rows of the batch, L: 3 K + 2 tokens, for a draft of K after two
steps of K + 1 tokens."""

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
from vllm_specplugins.engine.v2.feedback.report import SampledTokens
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.isolation.exchange import checked_draft, for_proposer
from vllm_specplugins.isolation.guard import Guard
from vllm_specplugins.kernels.history_match import LONGEST_MATCH, Match
from vllm_specplugins.structures.arrays import Views
from vllm_specplugins.structures.drafts import columns

_SLOT, _START, _NUM_DRAFT, _CONFIDENCE, _TOKENS = range(5)  # columns of the table; the rest are tokens
MAX_UNREAD = 64  # maximum number of steps that wait for a proposer that hangs or is switched off
_READ_AT = 32  # number of steps after which it reads them, even if no request drafts


def late_length(max_num_draft: int) -> int:
    return 3 * max_num_draft + 2


_Step = tuple[SampledTokens, list[tuple[int, Request]]]  # requests with their rows


class LateDrafts:
    """The drafts of the proposer's thread, and their table on the device."""

    guard: Guard  # guard of the proposer; set by runner.attach

    def __init__(self, req_states: Any, max_num_draft: int, vocab_size: int, device: torch.device):
        self._req_states, self._group = req_states, get_tp_group()
        self._drafts = self._group.rank_in_group == 0  # for all ranks
        self._max_num_draft, self._length, self._vocab_size = max_num_draft, late_length(max_num_draft), vocab_size
        # The newest draft of each slot: slot, position of the first token, number, confidence, and the tokens.
        shape = req_states.max_num_reqs, _TOKENS + self._length
        self._table = torch.zeros(shape, dtype=torch.int32, device=device)
        self._requests: dict[str, Request] = {}
        self._num_unread: dict[Request, int] = {}  # number of their steps in `_unread`
        self._ended: list[Request] = []  # ended requests with last tokens that the proposer has not read
        self._unread, self._read = deque[_Step](), deque[_Step]()  # the proposer's thread takes the latter
        self._wants = True  # whether the newest step drafts

    def add(self, requests: Sequence[Request]) -> None:
        if not self._drafts:
            return
        self.remove(request.request_id for request in requests)
        shown = [request for request in requests if request.has_token_ids]
        self._requests |= {request.request_id: request for request in shown}
        slots = np.array([request.slot for request in requests])
        self._table[:, _NUM_DRAFT].index_fill_(0, async_tensor_h2d(slots, self._table.device), 0)

    def remove(self, request_ids: Any) -> None:
        """Drops requests that ended or were preempted, after the proposer has read their tokens."""
        gone = [self._requests.pop(request_id) for request_id in request_ids if request_id in self._requests]
        self._ended += [request for request in gone if request in self._num_unread]

    def note(self, sampled: SampledTokens) -> None:
        names = enumerate(sampled.request_ids)
        requests = [(row, self._requests[name]) for row, name in names if name in self._requests]
        if not requests:
            return
        for _, request in requests:
            self._num_unread[request] = self._num_unread.get(request, 0) + 1
        self._unread.append((sampled, requests))
        if len(self._unread) > _READ_AT:
            self._take_turns()
        if len(self._unread) + len(self._read) > MAX_UNREAD:
            self._forget_all()

    def step(self, length: int) -> None:
        """Collects finished drafts and asks for new ones, on every rank, before a step of drafts up to this length."""
        if self._drafts:
            self._wants = length > 0
            self._take_turns()
        if self._group.world_size > 1:
            self._group.broadcast(self._table, src=0)

    def settle(self) -> None:
        """Passes all tokens that have arrived to the proposer, since no step may follow for a while."""
        if self._drafts:
            self.guard.settle()
            self._begin(False)

    def _take_turns(self) -> None:
        self._enter(self.guard.take())
        self._begin(self._wants)

    def _enter(self, drafted: tuple[Sequence[Request], Int32Array] | None) -> None:
        """Writes drafts to the table, except for ended requests, since another request may have their slot."""
        if drafted is None:
            return
        requests, rows = drafted
        is_there = [self._is_there(request) for request in requests]
        if any(is_there):
            drafts = async_tensor_h2d(rows[is_there], self._table.device)
            self._table.index_copy_(0, drafts[:, _SLOT].long(), drafts)

    def _is_there(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def _begin(self, wants: bool) -> None:
        """Passes the tokens that have arrived to the proposer, which drafts for live requests if `wants` is True."""
        if not self.guard.can_start:
            return
        over, asked = self._asked()
        if not asked:
            return
        may_draft = self.guard.may_draft(list(asked)) or [True] * len(asked)
        requests = [request for request, may in zip(asked.values(), may_draft, strict=True) if may]
        wanted = {request for request in requests if wants and self._is_there(request)}
        options = [request.limits.options for request in requests]
        ended = [request for request in requests if request.request_id in over]
        batch = DraftBatch([request.request_id for request in requests], (), np.zeros(len(requests), np.int32), options)
        self.guard.start(batch, partial(self._drafted, requests, wanted, self._read, ended))
        for request in [request for request in self._ended if not self._num_unread[request]]:
            self._ended.remove(request)
            del self._num_unread[request]
        self.guard.forget(over)

    def _asked(self) -> tuple[list[str], dict[str, Request]]:
        """Returns the ids of ended requests whose tokens have all arrived; and, by id, these requests and those with
        new tokens."""
        while self._unread and self._unread[0][0].arrived.query():
            self._read.append(self._unread.popleft())
            for _, request in self._read[-1][1]:
                self._num_unread[request] -= 1
        asked = {request.request_id: request for request in reversed(self._ended) if not self._num_unread[request]}
        # A request with the id of an ended one waits until the proposer forgets the ended one.
        over, ended = list(asked), {request.request_id for request in self._ended}
        for _, request in chain(*(requests for _, requests in self._read)):
            if request.request_id not in ended:
                asked[request.request_id] = request
        return over, asked

    def _drafted(
        self, requests: Sequence[Request], wanted: set[Request], steps: deque[_Step], ended: Sequence[Request]
    ) -> tuple[Sequence[Request], Int32Array]:
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
        options, lengths = zip(
            *((each.limits.options, each.limits.num_prompt_tokens) for each in requests), strict=True
        )
        batch = for_proposer(DraftBatch(names, texts, limits, options, prompt_lengths=lengths))
        draft = checked_draft(self.guard.proposer.propose(batch), limits, self._length, self._vocab_size)
        rows[:, :_NUM_DRAFT] = [(request.slot, request.num_tokens) for request in requests]
        rows[:, _NUM_DRAFT] = draft.num_draft
        rows[:, _CONFIDENCE] = 1 if draft.confidence is None else draft.confidence.clip(1, LONGEST_MATCH)
        rows[:, _TOKENS : _TOKENS + draft.token_ids.shape[1]] = draft.token_ids
        for request in ended if self.guard.reads_ends else ():
            tenant = request.limits.options.get("tenant", b"")
            self.guard.proposer.finish(request.request_id, request.token_ids.copy(), tenant)  # type: ignore[attr-defined]
        return requests, rows

    def _limit(self, request: Request) -> int:
        """Returns L, or the request's remaining length, if it may have drafts. The device applies the request's
        limits."""
        limits, num_tokens = request.limits, request.num_tokens
        return min(self._length, limits.length_limit - 1 - num_tokens) * limits.max_draft_tokens(num_tokens, 1)

    def _forget_all(self) -> None:
        """Ends late drafts for all live requests, because the proposer does not read their tokens."""
        self.guard.forget([*self._requests, *(request.request_id for request in self._ended)])
        self._requests, self._num_unread, self._ended = {}, {}, []
        self._unread, self._read = deque(), deque()

    def match(self, slots: torch.Tensor, limits: torch.Tensor, longest: int | None = None) -> Match:
        """Returns the rest of each row's draft as a match. Slots and limits are [R]. A graph may
        record the call."""
        slots = slots.long()
        row, lengths = self._table[slots], self._req_states.total_len.gpu[slots]
        start, drafted, tokens = row[:, _START], row[:, _NUM_DRAFT], row[:, _TOKENS:]
        num_since, places = lengths - start, columns(tokens)
        written = (start[:, None] + places).clamp(max=self._req_states.max_model_len - 1)
        sampled = self._req_states.all_token_ids.gpu[slots[:, None], written]
        agrees = ((sampled == tokens) | (places >= num_since[:, None])).all(dim=1) & (num_since >= 0)
        num_left = (drafted - num_since).clamp(min=0).minimum(limits) * agrees
        steps = places[: self._max_num_draft]
        is_left = steps < num_left[:, None]
        shifted = tokens.gather(1, (steps + num_since[:, None]).clamp(0, self._length - 1))
        match_length = (row[:, _CONFIDENCE] + num_since).clamp(max=LONGEST_MATCH) * is_left[:, 0]
        return shifted * is_left, num_left, match_length
