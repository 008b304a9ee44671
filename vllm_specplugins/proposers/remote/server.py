"""An OpenAI-compatible server, asked by a thread; answers are read as they come, and bounded in bytes and time."""

import asyncio
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from threading import Thread
from typing import Any

import aiohttp

from vllm_specplugins.config import RemoteConfig
from vllm_specplugins.draft import Int32Array
from vllm_specplugins.proposers.remote.forms import Form, Guess, Refused, TokenIds

logger = logging.getLogger("vllm.specplugins")

TIMEOUT_S = 10.0  # for an answer
MOST_BYTES = 1 << 20  # of one
MOST_OPEN = 256  # connections; other questions wait, as an engine has other uses for its open files
TOKEN_EVENTS, MORE_EVENTS = 4, 16  # of an answer: at most so many a token, and so many more
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # after questions in vain
DATA = re.compile(rb"^data:(.*)$", re.MULTILINE)
FOR_ALL = (401, 403, 404, 429)  # of the statuses 4xx those that every question would get


class Server:
    """See the module. What goes wrong is said once, until the server answers again. Its limits are asked for once."""

    def __init__(self, config: RemoteConfig, form: Form, vocab_size: int):
        self._base, self._model, self._form = config.url.rstrip("/"), config.model, form
        self._url = f"{self._base}/completions"
        key = os.environ.get(config.api_key_env) if config.api_key_env else None
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._pause_s, self._not_before, self._has_refused = 0.0, 0.0, False
        self._max_model_len, self._vocab_size = MOST_BYTES, vocab_size  # of the drafter
        self._is_known, self._looks = False, asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="specplugins-remote", daemon=True)
        self._thread.start()
        self._session = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    def ask(self, text: Int32Array, guess: Guess, num_tokens: int, came: deque[Guess]) -> "Future[None] | None":
        """Has the likeliest tokens after these, at most num_tokens, come piece by piece; None while the server is given
        a pause. The future raises Refused where the server does not take this question."""
        if time.monotonic() < self._not_before:
            return None
        return asyncio.run_coroutine_threadsafe(self._answer(text, guess, num_tokens, came), self._loop)

    def close(self) -> None:
        """Gives up all questions, and ends the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(1.0)

    async def _open(self) -> aiohttp.ClientSession:
        connector, timeout = aiohttp.TCPConnector(limit=MOST_OPEN), aiohttp.ClientTimeout(total=TIMEOUT_S)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers, auto_decompress=False)

    async def _end(self) -> None:
        questions = asyncio.all_tasks() - {asyncio.current_task()}
        for question in questions:
            question.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
        await self._session.close()
        self._loop.stop()

    async def _answer(self, text: Int32Array, guess: Guess, num_tokens: int, came: deque[Guess]) -> None:
        try:
            await self._look()
            num_tokens = max(1, min(num_tokens, self._max_model_len // 2))
            room = self._max_model_len - num_tokens - 1  # a tokenizer may add a token at the beginning
            if prompt := self._form.prompt(self._form.of(text) + guess, room, self._vocab_size):
                question = {**self._question(prompt, num_tokens), "temperature": 0, "stream": True}
                await self._read({**question, **self._form.asks}, num_tokens, came)
        except Refused as error:
            if not self._has_refused:
                logger.warning("remote: %s refuses questions (%s), which sets their requests aside.", self._url, error)
            self._has_refused = True
            raise
        except Exception as error:  # of the network, or whatever the server answers
            self._fail(error)
            raise
        if self._pause_s:
            logger.info("remote: %s answers again.", self._url)
        self._pause_s = 0.0

    def _question(self, prompt: list[int] | str, num_tokens: int) -> dict[str, Any]:
        return {"model": self._model, "prompt": prompt, "max_tokens": num_tokens}

    async def _read(self, question: dict[str, Any], num_tokens: int, came: deque[Guess]) -> None:
        num_events, most = 0, TOKEN_EVENTS * num_tokens + MORE_EVENTS
        async with self._session.post(self._url, json=question, allow_redirects=False) as response:
            if _is_refused(response.status):
                raise Refused(f"status {response.status}")
            async for event in _events(response.content):
                if (num_events := num_events + 1) > most:
                    raise ValueError(f"more than {most} pieces")
                for choice in json.loads(event)["choices"][:1]:  # the last one may have none, but counts alone
                    came.append(self._form.read(choice, num_tokens))
                    num_tokens -= self._form.num_tokens(came[-1])
        if num_events == 0:
            raise ValueError("no stream of text")

    async def _look(self) -> None:
        """Finds out what the server takes, as far as it says so."""
        async with self._looks, asyncio.timeout(TIMEOUT_S):
            if not self._is_known:
                self._max_model_len = await self._length()
                if isinstance(self._form, TokenIds):
                    self._vocab_size = await self._vocabulary()
                self._is_known = True

    async def _length(self) -> int:
        """The drafter's max_model_len, in the list of models as vLLM and others give it."""
        async with self._session.get(self._base + "/models", allow_redirects=False) as response:
            found = b"".join([chunk async for chunk in _chunks(response.content)])
        try:
            lengths = [card["max_model_len"] for card in json.loads(found)["data"] if card["id"] == self._model]
            return min(max(int(lengths[0]), 4), MOST_BYTES)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            return MOST_BYTES

    async def _vocabulary(self) -> int:
        """How many of the target's token ids the drafter takes: one question where it takes all."""
        low, high, place = 0, self._vocab_size, self._vocab_size - 1
        while low < high:  # it takes ids below `low`, and not `high`
            question = self._question([place], 1)
            async with self._session.post(self._url, json=question, allow_redirects=False) as response:
                low, high = (low, place) if _is_refused(response.status) else (place + 1, high)
            place = (low + high) // 2
        return low or self._vocab_size  # what takes no token at all refuses something else

    def _fail(self, error: Exception) -> None:
        if time.monotonic() < self._not_before:  # others failed before it
            return
        if self._pause_s == 0:
            words = f"{type(error).__name__}: {error}" if type(error) is ValueError else type(error).__name__
            logger.warning("remote: no drafts from %s (%s) until it answers as it should.", self._url, words)
        self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause_s


def _is_refused(status: int) -> bool:
    """Whether an answer is about this question; ValueError where every question would get it."""
    if status != 200 and (status in FOR_ALL or not 400 <= status < 500):
        raise ValueError(f"status {status}")
    return status != 200


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """All of an answer; ValueError where it has too many bytes."""
    num_bytes = 0
    async for chunk in content.iter_any():
        if (num_bytes := num_bytes + len(chunk)) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        yield chunk


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of a stream's events, but of its end; ValueError where it has too many bytes."""
    unfinished = bytearray()
    async for chunk in _chunks(content):
        unfinished += chunk
        if b"\n" in chunk:
            lines, _, unfinished = unfinished.rpartition(b"\n")
            for data in map(bytes.strip, DATA.findall(bytes(lines))):
                if data != b"[DONE]":
                    yield data
