"""A thread asks an OpenAI-compatible server, and reads answers line by line, with limits of lines and time."""

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

import aiohttp

from vllm_specplugins.config import RemoteConfig
from vllm_specplugins.draft import Int32Array
from vllm_specplugins.proposers.remote.forms import Form, Guess, Refused
from vllm_specplugins.structures.pause import Pause

logger = logging.getLogger("vllm.specplugins")

TIMEOUT_S = 10.0  # for an answer
MAX_CONNECTIONS = 256  # further questions wait, since the engine also needs open files
MAX_MODEL_LEN = 1 << 20  # assumed for a drafter that reports none
TOKEN_LINES, MORE_LINES, LIST_LINES = 16, 64, 10_000  # limits of a stream, and of the list of models
MAX_BYTES = 1 << 20  # of each
LONGEST_PAUSE_S = 60.0  # after failed questions
FOR_ALL = (401, 403, 404, 408, 409, 425, 429)  # 4xx statuses that concern every question


class Server:
    """Asks questions in a thread. A failure starts a pause, and logs one line until the server answers again. The first
    question also asks for the drafter's context length."""

    def __init__(self, config: RemoteConfig, form: Form):
        self._base, self._model, self._form = config.url.rstrip("/"), config.model, form
        self._url = f"{self._base}/completions"
        key = os.environ.get(config.api_key_env) if config.api_key_env else None
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._pause, self._not_before, self._has_refused = Pause(LONGEST_PAUSE_S), 0.0, False
        self._max_model_len, self._asks_length = 0, asyncio.Lock()  # limit of the drafter; 0: unknown
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="specplugins-remote", daemon=True)
        self._thread.start()
        self._session = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    def ask(
        self, text: Int32Array, guess: Guess, num_tokens: int, pieces: deque[Guess], fields: Mapping[str, Any]
    ) -> "Future[None] | None":
        """Asks for at most num_tokens of the likeliest tokens after these; the answer's pieces arrive in `pieces`.
        `fields` are additional fields of the question. Returns None during a pause. The future raises Refused if the
        server refuses this question."""
        if time.monotonic() < self._not_before:
            return None
        return asyncio.run_coroutine_threadsafe(self._answer(text, guess, num_tokens, pieces, fields), self._loop)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(1.0)

    async def _open(self) -> aiohttp.ClientSession:
        connector, timeout = aiohttp.TCPConnector(limit=MAX_CONNECTIONS), aiohttp.ClientTimeout(total=TIMEOUT_S)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers, auto_decompress=False)

    async def _end(self) -> None:
        questions = asyncio.all_tasks() - {asyncio.current_task()}
        for question in questions:
            question.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
        await self._session.close()
        self._loop.stop()

    async def _answer(
        self, text: Int32Array, guess: Guess, num_tokens: int, pieces: deque[Guess], fields: Mapping[str, Any]
    ) -> None:
        try:
            async with self._asks_length, asyncio.timeout(TIMEOUT_S):
                self._max_model_len = self._max_model_len or await self._ask_max_model_len()
            num_tokens = max(1, min(num_tokens, self._max_model_len // 2))
            room = self._max_model_len - num_tokens - 1  # a tokenizer may add a token at the beginning
            prompt = self._form.prompt(self._form.guess_of(text) + guess, room)
            question = {"model": self._model, "prompt": prompt, "max_tokens": num_tokens, **fields}
            await self._read({**question, "temperature": 0, "stream": True, **self._form.fields}, num_tokens, pieces)
        except Refused as error:
            if not self._has_refused:
                logger.warning(
                    "remote: %s refused a request (%s), which continues without drafts. This is logged once.",
                    self._url,
                    error,
                )
            self._has_refused = True
            raise
        except Exception as error:  # errors of the network, or any error that the server's answer causes
            self._fail(error)
            raise
        if self._pause.succeeded():
            logger.info("remote: %s answers again; drafts continue.", self._url)

    async def _read(self, question: dict[str, Any], num_tokens: int, pieces: deque[Guess]) -> None:
        num_events, max_lines = 0, TOKEN_LINES * num_tokens + MORE_LINES
        async with self._session.post(self._url, json=question, allow_redirects=False) as response:
            if _is_refused(response.status):
                raise Refused(f"status {response.status}")
            async for line in _lines(response, max_lines):
                name, _, data = line.partition(b":")
                if name != b"data" or data.strip() == b"[DONE]":
                    continue
                num_events += 1
                for choice in json.loads(data)["choices"][:1]:  # the last event may contain counts and no choice
                    pieces.append(self._form.read(choice, num_tokens))
                    num_tokens -= self._form.num_tokens(pieces[-1])
        if num_events == 0:
            raise ValueError("the answer is no stream of text")

    async def _ask_max_model_len(self) -> int:
        """Reads the drafter's max_model_len from the list of models, in which vLLM and other servers report it."""
        try:
            async with self._session.get(self._base + "/models", allow_redirects=False) as response:
                models = json.loads(b"".join([line async for line in _lines(response, LIST_LINES)]))
            lengths = [card["max_model_len"] for card in models["data"] if card["id"] == self._model]
            return min(max(int(lengths[0]), 4), MAX_MODEL_LEN)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            return MAX_MODEL_LEN

    def _fail(self, error: Exception) -> None:
        if time.monotonic() < self._not_before:  # others failed before it
            return
        if self._pause.failed():
            words = f"{type(error).__name__}: {error}" if type(error) is ValueError else type(error).__name__
            logger.warning(
                "remote drafts nothing, because %s does not answer (%s). Requests continue; the engine tries again.",
                self._url,
                words,
            )
        self._not_before = time.monotonic() + self._pause.seconds


def _is_refused(status: int) -> bool:
    """Returns whether the server refuses this question. Raises ValueError if it would refuse every question."""
    if status != 200 and (status in FOR_ALL or not 400 <= status < 500):
        raise ValueError(f"status {status}")
    return status != 200


async def _lines(response: aiohttp.ClientResponse, max_lines: int) -> AsyncIterator[bytes]:
    """Yields the lines of an answer. Raises ValueError for too many lines; aiohttp raises it for a line above 128
    KiB."""
    num_bytes = 0
    async for line in response.content:
        num_bytes += len(line)
        if (max_lines := max_lines - 1) < 0 or num_bytes > MAX_BYTES:
            raise ValueError("the answer has more text than requested")
        yield line
