"""The OpenAI-compatible server with a cascade, asked by the OpenAI client: options of single requests, and bad ones."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from cases import mixed_prompts
from conftest import DEMO_MODEL, RUNNER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(RUNNER == "v2", reason="the front end is the same on both runners"),
]
STAGES = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}]
CASCADE = {"method": "cascade", "num_speculative_tokens": 4, "policy": "first", "gate": "off", "stages": STAGES}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL)]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--speculative-config", json.dumps(CASCADE)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "NO_PROXY": "127.0.0.1"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        for _ in range(240):
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                assert server.poll() is None, "the server did not come up"
                time.sleep(0.5)
        yield client
    finally:
        server.terminate()
        server.wait(60)


def complete(client: openai.OpenAI, prompt: list[int], options: Any = None) -> str:
    extra = {} if options is None else {"vllm_xargs": {"specplugins": options}}
    done = client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0, extra_body=extra)
    return done.choices[0].text


def test_options_of_requests(client: openai.OpenAI) -> None:
    """Requests with good options, with bad ones and with none at once: 400 for the bad ones, in one sentence, and the
    tokens of no other request change."""
    prompts = mixed_prompts(str(DEMO_MODEL), 8)
    plain = [complete(client, prompt) for prompt in prompts]
    good = ['{"enabled":false}', '{"max_draft":2}', '{"stages":["prompt_lookup"]}', '{"max_context":64}', None]
    bad = {
        '{"enabled":"no"}': "specplugins: enabled must be true or false, not 'no'.",
        '{"max_draft":-1}': "specplugins: max_draft must be an integer from 0 to 64, not -1.",
        '{"stages":["eagle"]}': "specplugins: stages must be a list of one or more of 'prompt_lookup', 'early_exit', "
        "not ['eagle'].",
        '{"draft":1}': "specplugins: 'draft' is not an option; the options are enabled, max_draft, max_context, "
        "stages, reference.",
        "{": "specplugins must be a dictionary or its JSON text, not '{'.",
    }

    def refused(options: str) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, prompts[0], options)
        message: str = caught.value.body["message"]  # type: ignore[index, call-overload]
        return message

    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(complete, client, prompts[i], good[i % len(good)]) for i in range(len(prompts))]
        refusals = {options: pool.submit(refused, options) for options in bad}
        assert [answer.result() for answer in answers] == plain
        assert {options: message.result() for options, message in refusals.items()} == bad
    assert complete(client, prompts[0]) == plain[0]
