"""One request through the OpenAI client, and the answer as it can be compared."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from catalogue import Case

ANSWER_SECONDS = 600.0  # for a slow and busy machine; a request that takes longer is lost
BROKEN = (openai.APIConnectionError, httpx.TransportError)


class Cut(Exception):
    """A stream that ended before its answer did."""


@dataclass(slots=True)
class Choice:
    """One of a request's n outputs."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


Answer = list[Choice]


def client_of(url: str) -> openai.AsyncOpenAI:
    """One that neither retries nor waits for a proxy."""
    limits = httpx.Limits(max_connections=None)
    http = httpx.AsyncClient(trust_env=False, limits=limits, timeout=ANSWER_SECONDS)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)


async def ask(client: openai.AsyncOpenAI, case: Case, options: Any, stream: bool) -> Answer:
    """The whole answer.

    Raises:
        Cut: a stream without its end.
        TimeoutError: none within ANSWER_SECONDS.
        openai.APIError, httpx.TransportError: as the client raises them.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        if not stream:
            done = await _create(client, case, options, stream=False)
            return [Choice(_text(choice), _token_ids(choice), choice.finish_reason) for choice in done.choices]
        answer = [Choice() for _ in range(case.body.get("n", 1))]
        async for _ in _chunks(client, case, options, answer):
            pass
    if any(choice.finish_reason is None for choice in answer):
        raise Cut(case.name)
    return answer


async def abort(client: openai.AsyncOpenAI, case: Case, options: Any, after_chunks: int | None, seconds: float) -> None:
    """Asks and goes away: after so many chunks of a stream, or so many seconds without one."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            if after_chunks is None:
                await _create(client, case, options, stream=False)
                return
            chunks = _chunks(client, case, options, [Choice() for _ in range(case.body.get("n", 1))])
            async with contextlib.aclosing(chunks):
                async for number in chunks:
                    if number >= after_chunks:
                        return


async def _chunks(client: openai.AsyncOpenAI, case: Case, options: Any, answer: Answer) -> AsyncIterator[int]:
    """Adds a stream's chunks to an answer; yields how many came."""
    number = 0
    async with await _create(client, case, options, stream=True) as chunks:
        async for chunk in chunks:
            for part in chunk.choices:
                choice = answer[part.index]
                choice.text += _text(part)
                choice.token_ids += _token_ids(part)
                choice.finish_reason = part.finish_reason or choice.finish_reason
            number += 1
            yield number


async def _create(client: openai.AsyncOpenAI, case: Case, options: Any, stream: bool) -> Any:
    """The answer or the stream; every field goes as it is, whether the client knows it or not."""
    extra = dict(case.body)
    if options is not None:
        extra["vllm_xargs"] = {"specplugins": options}
    if case.chat:
        messages: Any = extra.pop("messages")
        return await client.chat.completions.create(model="demo", messages=messages, stream=stream, extra_body=extra)
    prompt = extra.pop("prompt")
    return await client.completions.create(model="demo", prompt=prompt, stream=stream, extra_body=extra)


def _text(choice: Any) -> str:
    """Of a choice of /completions or /chat/completions, or of a chunk of one."""
    if hasattr(choice, "text"):
        return choice.text or ""
    return (choice.delta if hasattr(choice, "delta") else choice.message).content or ""


def _token_ids(choice: Any) -> list[int]:
    return list((choice.model_extra or {}).get("token_ids") or [])
