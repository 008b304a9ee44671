"""Remote: a model behind another server drafts, asked ahead of what the target has verified. Nothing waits for it.

A history proposer. For each request one question is under way: it goes on from the history and from what the last
answers guessed. An answer that comes late is held against what was emitted since: what still fits is drafted.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import numpy as np

from vllm_specplugins.config import RemoteConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, ProposerContext

logger = logging.getLogger("vllm.specplugins")

MOST_AHEAD = 256  # tokens
FORGETTING = 0.95  # of how far ahead to ask, by each answer
TIMEOUT_S = 10.0  # for an answer
MOST_BYTES = 1 << 20  # of one
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # after questions in vain


@dataclass(slots=True)
class _Guess:
    """What may follow a request's history: tokens from position `start` on, and the question for what follows them."""

    start: int
    tokens: list[int] = field(default_factory=list)
    asked_at: int = -1  # length of the history when it was last asked about
    answer: "Future[list[int]] | None" = None

    def fits(self, text: Int32Array) -> bool:
        """Whether the history went on as guessed; what it has of the guess is then taken off."""
        num_known = min(len(text) - self.start, len(self.tokens))
        if text[self.start : self.start + num_known].tolist() != self.tokens[:num_known]:
            return False
        del self.tokens[:num_known]
        self.start += num_known
        return True


class Remote:
    """See the module. A request is asked about until the guess is as far ahead of its history as requests go, with all
    of it accepted, while two questions are answered."""

    def __init__(self, config: RemoteConfig, context: ProposerContext):
        self._least_ahead, self._max_model_len = 2 * (context.max_num_draft + 1), context.max_model_len
        self._num_ahead = float(self._least_ahead)
        self._guesses: dict[str, _Guess] = {}
        self._server = _Server(config, context.vocab_size, context.max_num_reqs)
        self._counts = dict.fromkeys(("asked", "answered", "dropped", "failed"), 0)

    def propose(self, batch: DraftBatch) -> Draft:
        """What is left of each request's guess."""
        drafts = [self._draft(*each) for each in zip(batch.request_ids, batch.token_ids, batch.max_num_draft)]  # noqa: B905
        num_draft = np.array([len(draft) for draft in drafts], np.int32)
        token_ids = np.zeros((len(drafts), max(num_draft, default=0)), np.int32)
        for row, draft in zip(token_ids, drafts, strict=True):
            row[: len(draft)] = draft
        return Draft(token_ids, num_draft)

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn: what came of the drafts shows in the next batch's histories."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Gives up the questions of these requests."""
        for request_id in request_ids:
            if request_id in self._guesses:
                self._drop(self._guesses.pop(request_id))

    def exchange_stats(self) -> dict[str, int]:
        """Questions so far by what became of them; "dropped": the history went on otherwise, or ended."""
        return self._counts

    def close(self) -> None:
        """Ends the thread."""
        self._server.close()

    def _draft(self, request_id: str, text: Int32Array, limit: int) -> list[int]:
        guess = self._guesses.setdefault(request_id, _Guess(len(text)))
        if guess.answer is not None and guess.answer.done():
            self._enter(guess, guess.answer, len(text) - guess.asked_at)
        if guess.start > len(text) or not guess.fits(text):
            self._drop(guess)
            guess = self._guesses[request_id] = _Guess(len(text))
        if guess.answer is None:
            self._ask(guess, text)
        return guess.tokens[:limit] if guess.start == len(text) else []

    def _enter(self, guess: _Guess, answer: "Future[list[int]]", num_meanwhile: int) -> None:
        guess.answer = None
        if answer.exception() is None:
            guess.tokens += answer.result()
            wanted = max(self._least_ahead, FORGETTING * self._num_ahead, 2 * num_meanwhile + self._least_ahead)
            self._num_ahead = min(wanted, MOST_AHEAD)
        self._counts["answered" if answer.exception() is None else "failed"] += 1

    def _ask(self, guess: _Guess, text: Int32Array) -> None:
        """Asks what follows the guess, unless enough is known of it, or nothing is new since it was asked."""
        if guess.start < len(text):
            guess.start = len(text)
        num_tokens = min(int(self._num_ahead), self._max_model_len - len(text) - len(guess.tokens))
        if len(guess.tokens) < self._num_ahead and num_tokens > 0 and guess.asked_at != len(text):
            guess.asked_at = len(text)
            guess.answer = self._server.ask(text.copy(), guess.tokens.copy(), num_tokens)
            self._counts["asked"] += guess.answer is not None

    def _drop(self, guess: _Guess) -> None:
        if guess.answer is not None:
            guess.answer.cancel()
            self._counts["dropped"] += 1


class _Server:
    """An OpenAI-compatible server, asked by a thread. What goes wrong is said once, until it answers again."""

    def __init__(self, config: RemoteConfig, vocab_size: int, max_num_reqs: int):
        import httpx

        self._url, self._model, self._vocab_size = config.url.rstrip("/") + "/completions", config.model, vocab_size
        key = os.environ.get(config.api_key_env) if config.api_key_env else None
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        limits = httpx.Limits(max_connections=max_num_reqs)
        self._client: Any = httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, limits=limits)
        self._pause_s, self._not_before = 0.0, 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="specplugins-remote", daemon=True)
        self._thread.start()

    def ask(self, text: Int32Array, guess: list[int], num_tokens: int) -> "Future[list[int]] | None":
        """The likeliest tokens after these, at most num_tokens; None while the server is given a pause."""
        if time.monotonic() < self._not_before:
            return None
        return asyncio.run_coroutine_threadsafe(self._answer(text, guess, num_tokens), self._loop)

    def close(self) -> None:
        """Gives up all questions, and ends the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(1.0)

    async def _end(self) -> None:
        questions = asyncio.all_tasks() - {asyncio.current_task()}
        for question in questions:
            question.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
        await self._client.aclose()
        self._loop.stop()

    async def _answer(self, text: Int32Array, guess: list[int], num_tokens: int) -> list[int]:
        question = {"model": self._model, "prompt": text.tolist() + guess, "max_tokens": num_tokens}
        try:
            data = await asyncio.wait_for(
                self._post({**question, "temperature": 0, "return_token_ids": True}), TIMEOUT_S
            )
            tokens = json.loads(data)["choices"][0]["token_ids"][:num_tokens]
            if not all(type(token) is int and 0 <= token < self._vocab_size for token in tokens):
                raise ValueError("token ids outside of the vocabulary")
        except Exception as error:  # of the network, or whatever the server answers
            self._fail(error)
            raise
        if self._pause_s:
            logger.info("remote: %s answers again.", self._url)
        self._pause_s = 0.0
        return list(tokens)

    async def _post(self, question: dict[str, Any]) -> bytes:
        data = bytearray()
        async with self._client.stream("POST", self._url, json=question) as response:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}")
            async for chunk in response.aiter_raw(1 << 16):
                data += chunk
                if len(data) > MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES} bytes")
        return bytes(data)

    def _fail(self, error: Exception) -> None:
        if time.monotonic() < self._not_before:  # others failed before it
            return
        if self._pause_s == 0:
            words = f"{type(error).__name__}: {error}" if type(error) is ValueError else type(error).__name__
            logger.warning("remote: no drafts from %s (%s) until it answers as it should.", self._url, words)
        self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause_s
