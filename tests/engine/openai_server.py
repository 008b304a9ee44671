"""Runs vLLM's OpenAI-compatible server in other processes, with a client."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
from forked import started


@contextmanager
def served(model: Path, *arguments: str) -> Iterator[openai.OpenAI]:
    """A server of a model, called "demo", with contexts of 512 tokens; it ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--block-size", "32"]
    command += ["--num-gpu-blocks-override", "512", *arguments]  # a start fills the KV cache
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "NO_PROXY": "127.0.0.1"}
    environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "600"  # a connection that it closes may be in use again by then
    server = started(command, environment)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        for _ in range(1200):
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                assert server.is_alive(), "the server did not come up"
                time.sleep(0.5)
        yield client
    finally:
        server.terminate()
        server.join(60)
