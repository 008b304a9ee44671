"""vLLM's AsyncLLM before an engine of this process: what reaches it comes from there, and no other process starts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

_ENCODER, _DECODER = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)


class _Client:
    """vLLM's asynchronous client of an engine."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, client: Any):
        self._client = client

    async def get_supported_tasks_async(self) -> Any:
        return self._client.get_supported_tasks()

    async def add_request_async(self, request: Any) -> None:
        self._client.add_request(_DECODER.decode(_ENCODER.encode(request)))  # front end and engine extend their lists

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self._client.abort_requests(request_ids)

    async def get_output_async(self) -> Any:
        while True:
            await asyncio.sleep(0)
            core = self._client.engine_core
            if core.scheduler.has_requests() or core.batch_queue:
                return self._client.get_output()

    async def collective_rpc_async(self, *arguments: Any) -> Any:
        return self._client.collective_rpc(*arguments)

    def shutdown(self, timeout: float | None = None) -> None:
        """The engine continues to run."""


@asynccontextmanager
async def async_llm(llm: Any) -> AsyncIterator[Any]:
    """An AsyncLLM that serves with the engine of `llm`."""
    from vllm.v1.engine import async_llm as module

    engine = llm.llm_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.EngineCoreClient, "make_async_mp_client", lambda **_: _Client(engine.engine_core))
        patch.setattr(module, "shutdown_prometheus", lambda: None)
        made = module.AsyncLLM(engine.vllm_config, None, log_stats=False)
        try:
            async with asyncio.timeout(300):
                yield made
        finally:
            made.shutdown()


async def answers_of(
    made: Any, name: str, turns: list[list[int]], waits: bool, params: Callable[[int], Any]
) -> list[int]:
    """All that a session is answered.

    Args:
        waits: each turn comes after the answer to the last one, and not all at once.
        params: sampling parameters, by turn.
    """
    from vllm.engine.protocol import StreamingInput

    tokens, is_over = list[int](), asyncio.Event()

    async def feed() -> AsyncIterator[StreamingInput]:
        for number, turn in enumerate(turns):
            yield StreamingInput(prompt={"prompt_token_ids": [*turn]}, sampling_params=params(number))
            if waits:
                await is_over.wait()
                is_over.clear()

    async for output in made.generate(feed(), params(0), request_id=name):
        tokens += output.outputs[0].token_ids
        if output.outputs[0].finish_reason is not None:
            is_over.set()
    return tokens
