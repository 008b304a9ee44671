"""An OpenAI-compatible server, asked by a thread; answers are read as they come, and bounded in bytes and time."""

import asyncio
import json
import logging
import os
import time
from collections import deque
from concurrent.futures import Future
from threading import Thread
from typing import Any

import aiohttp

from vllm_specplugins.config import RemoteConfig
from vllm_specplugins.draft import Int32Array
from vllm_specplugins.proposers.remote.forms import Form, Guess

logger = logging.getLogger("vllm.specplugins")

TIMEOUT_S = 10.0  # for an answer
MOST_BYTES = 1 << 20  # of one
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # after questions in vain


class Server:
    """See the module. What goes wrong is said once, until the server answers again."""

    def __init__(self, config: RemoteConfig, form: Form):
        self._url, self._model, self._form = config.url.rstrip("/") + "/completions", config.model, form
        key = os.environ.get(config.api_key_env) if config.api_key_env else None
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._pause_s, self._not_before = 0.0, 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="specplugins-remote", daemon=True)
        self._thread.start()
        self._session = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    def ask(self, text: Int32Array, guess: Guess, num_tokens: int, came: deque[Guess]) -> "Future[None] | None":
        """Has the likeliest tokens after these, at most num_tokens, come piece by piece; None while the server is given
        a pause."""
        if time.monotonic() < self._not_before:
            return None
        return asyncio.run_coroutine_threadsafe(self._answer(text, guess, num_tokens, came), self._loop)

    def close(self) -> None:
        """Gives up all questions, and ends the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(1.0)

    async def _open(self) -> aiohttp.ClientSession:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
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
            prompt = self._form.prompt(self._form.of(text) + guess)
            question = {"model": self._model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
            await self._read({**question, "stream": True, **self._form.asks}, num_tokens, came)
        except Exception as error:  # of the network, or whatever the server answers
            self._fail(error)
            raise
        if self._pause_s:
            logger.info("remote: %s answers again.", self._url)
        self._pause_s = 0.0

    async def _read(self, question: dict[str, Any], num_tokens: int, came: deque[Guess]) -> None:
        num_bytes = num_pieces = 0
        async with self._session.post(self._url, json=question, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            async for line in response.content:
                num_bytes += len(line)
                if num_bytes > MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES} bytes")
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    came.append(self._form.read(json.loads(data)["choices"][0], num_tokens))
                    num_tokens -= self._form.num_tokens(came[-1])
                    num_pieces += 1
        if num_pieces == 0:
            raise ValueError("no stream of text")

    def _fail(self, error: Exception) -> None:
        if time.monotonic() < self._not_before:  # others failed before it
            return
        if self._pause_s == 0:
            words = f"{type(error).__name__}: {error}" if type(error) is ValueError else type(error).__name__
            logger.warning("remote: no drafts from %s (%s) until it answers as it should.", self._url, words)
        self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause_s
