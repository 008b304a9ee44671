"""A real vLLM server as the drafter of a real engine: outputs stay, whatever becomes of the drafter."""

import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from signal import SIGKILL
from typing import Any

import pytest
from cases import STRESS, check_counted, generate, mixed_prompts, progress
from conftest import DEMO_MODEL, RUNNER, spec_metrics
from forked import started

pytestmark = [pytest.mark.slow, *([pytest.mark.long] if RUNNER == "v2" else [])]
SIZES = [1, 4, 3]


@pytest.fixture(scope="module")
def drafter() -> Iterator[tuple[str, BaseProcess]]:
    """The target itself, as a server without speculation, which is always right."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL)]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512"]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    server = started(command, environment)
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                assert server.is_alive(), "the server did not come up"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1", server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, SIGKILL)  # its engine, too
        server.join(60)


def test_drafts_of_a_server(engine: Any, drafter: tuple[str, BaseProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are those without speculation, with drafts from a server that is right, and when it is killed.

    Kills: a guess that goes to another request; a draft from before a preemption; a failure that reaches the engine.
    """
    url, server = drafter
    prompts = mixed_prompts(str(DEMO_MODEL), 12)
    expected = generate(engine(), prompts, SIZES)
    remote = {"method": "remote", "url": url, "model": "demo", "num_speculative_tokens": 4, "gate": "off"}
    llm = engine(remote, **STRESS)
    core, step = llm.llm_engine, llm.llm_engine.step
    monkeypatch.setattr(core, "step", lambda: (time.sleep(0.03), step())[1])  # both may have the same core
    begun = progress(llm)
    assert generate(llm, prompts, SIZES) == expected
    check_counted(llm, begun, expected)
    [counters] = llm.collective_rpc("specplugins_stats")
    accepted, verified = (spec_metrics(llm)[name] for name in ("accepted_tokens", "draft_tokens"))
    # On V2 drafts are late, and their lengths planned: what is not there yet is verified, too.
    assert accepted > 3 * len(prompts) if RUNNER == "v2" else accepted >= 0.9 * verified > 0
    os.killpg(server.pid, SIGKILL)
    assert generate(llm, prompts, SIZES) == expected
    [counters] = llm.collective_rpc("specplugins_stats")
    assert counters["faults"] == {}
