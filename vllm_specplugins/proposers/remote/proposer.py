"""Remote: a model behind another server drafts ahead of verification, and no step waits for it. A request of
the engine has at most one open question, which asks the server to continue its history and the earlier guess. A late
answer is compared with the tokens emitted since, and its rest becomes the draft."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_specplugins.config import ConfigError, RemoteConfig
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, ProposerContext
from vllm_specplugins.proposers.remote.forms import Form, Guess, Refused, Text, TokenIds, newest
from vllm_specplugins.proposers.remote.server import Server
from vllm_specplugins.stage import Series, StageProposer

MAX_AHEAD = 256  # tokens
MAX_ASKED = 64  # maximum number of new questions in one step; each takes 0.25 ms
DECAY = 0.95  # decay of the distance to ask ahead, at each answer


@dataclass(slots=True)
class _Request:
    """The guess of a request: its part `ahead` of the history, or the part of the history that it still lacks
    (`behind`)."""

    length: int  # of the history
    ahead: Guess
    behind: Guess
    pieces: deque[Guess] = field(default_factory=deque)  # of the answer under way
    asked_at: int = -1  # length of the history at the last question
    answer: "Future[None] | None" = None
    is_refused: bool = False  # the server refuses its questions

    def agrees(self) -> bool:
        """Returns whether history and guess agree over their common length, and then drops that part."""
        num_both = min(len(self.ahead), len(self.behind))
        both = self.ahead[:num_both], self.behind[:num_both]
        self.ahead, self.behind = self.ahead[num_both:], self.behind[num_both:]
        return bool(both[0] == both[1])


class Remote(StageProposer):
    """Asks until the guess reaches as far ahead as a fully accepted request advances while the server answers two
    questions."""

    def __init__(self, config: RemoteConfig, context: ProposerContext):
        self._least_ahead, self._max_model_len = 2 * (context.max_num_draft + 1), context.max_model_len
        self._num_ahead, self._max_prompt_tokens = float(self._least_ahead), config.max_prompt_tokens
        self._requests: dict[str, _Request] = {}
        self._form = _form(config, context)
        self._server = Server(config, self._form)
        self._room = 0  # for questions, in this step
        self._first = 0  # the row that may ask first
        self.counts = dict.fromkeys(("asked", "answered", "dropped", "failed"), 0)

    def propose(self, batch: DraftBatch) -> Draft:
        self._room = MAX_ASKED
        num_reqs = len(batch.request_ids)
        drafts: list[list[int]] = [[]] * num_reqs
        for row in np.roll(np.arange(num_reqs), -self._first).tolist():
            if self._room:
                self._first = row + 1
            given = batch.request_ids[row], batch.token_ids[row], batch.max_num_draft[row], batch.options[row]
            drafts[row] = self._draft(*given)
        num_draft = np.array([len(draft) for draft in drafts], np.int32)
        token_ids = np.zeros((num_reqs, max(num_draft, default=0)), np.int32)
        for new, draft in zip(token_ids, drafts, strict=True):
            new[: len(draft)] = draft
        return Draft(token_ids, num_draft)

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._requests:
                self._drop(self._requests.pop(request_id))

    def series(self) -> Iterator[Series]:
        for result, count in self.counts.items():
            yield "exchanges", (result,), count

    def close(self) -> None:
        self._server.close()

    def _draft(self, request_id: str, text: Int32Array, limit: int, options: Mapping[str, Any]) -> list[int]:
        request = self._requests.get(request_id)
        if request is None or not self._update(request, text):
            if request is not None:
                self._drop(request)
            is_refused = request is not None and request.is_refused
            request = _Request(len(text), self._form.none, self._form.none, is_refused=is_refused)
            self._requests[request_id] = request
        if request.answer is None and not request.is_refused:
            self._ask(request, text, options.get("tenant"))
        return [] if request.behind or not limit else self._form.draft(request.ahead, limit)

    def _update(self, request: _Request, text: Int32Array) -> bool:
        """Adds new tokens of the history and new pieces of the answer. Returns False if they differ."""
        if len(text) < request.length:
            return False
        is_done = request.answer is not None and request.answer.done()
        if request.ahead or request.answer is not None:  # otherwise there is no guess to compare
            request.behind = request.behind + self._form.guess_of(text[request.length :])
        request.length = len(text)
        while request.pieces:
            request.ahead = request.ahead + request.pieces.popleft()
        if is_done:
            self._end(request)
        return request.agrees()

    def _end(self, request: _Request) -> None:
        error = None if request.answer is None else request.answer.exception()
        request.answer, request.is_refused = None, isinstance(error, Refused)
        self.counts["answered" if error is None else "failed"] += 1
        if error is None:
            num_meanwhile = request.length - request.asked_at
            wanted = max(self._least_ahead, DECAY * self._num_ahead, 2 * num_meanwhile + self._least_ahead)
            self._num_ahead = min(wanted, MAX_AHEAD)

    def _ask(self, request: _Request, text: Int32Array, tenant: object) -> None:
        """Asks for tokens after the guess, unless it or the context is long enough, or the history has not grown."""
        num_known = self._form.num_tokens(request.ahead)
        num_tokens = min(int(self._num_ahead), self._max_model_len - len(text) - num_known)
        is_enough = num_known >= self._num_ahead or num_tokens <= 0
        if is_enough or request.asked_at == len(text) or self._room == 0:
            return
        request.asked_at, self._room = len(text), self._room - 1
        request.behind = self._form.none if request.ahead else self._form.unfinished(text)
        request.pieces = deque()
        prompt = newest(text, self._max_prompt_tokens).copy()
        salt = {"cache_salt": tenant.hex()} if isinstance(tenant, bytes) and tenant else {}
        request.answer = self._server.ask(prompt, request.ahead, num_tokens, request.pieces, salt)
        self.counts["asked"] += request.answer is not None

    def _drop(self, request: _Request) -> None:
        if request.answer is not None:
            request.answer.cancel()
            self.counts["dropped"] += 1


def _form(config: RemoteConfig, context: ProposerContext) -> Form:
    if config.tokenizer == "same":
        return TokenIds(context.vocab_size)
    try:
        return Text(context.codec())
    except ValueError as error:
        raise ConfigError(f'remote: tokenizer "other" requires a fast tokenizer of the target: {error}.') from None
