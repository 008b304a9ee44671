"""A server of a real chat model, as README starts one: what an application asks, with drafts and without."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_model import chat_model
from conftest import DEMO_MODEL, RUNNER
from openai_server import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v2", reason="the front end is the same on both runners")]
CODE = "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result"
EDIT = f"Repeat this code, and rename `result` to `amount`:\n\n```python\n{CODE}\n```"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "invoice": {"type": "integer"}},
    "required": ["name", "invoice"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "invoice", "schema": SCHEMA}}
CASES: dict[str, dict[str, Any]] = {
    EDIT: {},
    f"{EDIT} Use no tabs.": {"extra_body": {"min_p": 0.1}, "logit_bias": {"197": -5.0}},  # vLLM refuses these drafts
    "Extract name and invoice as JSON: Peter Novak asks about invoice 2291.": {"response_format": FORMAT},
}


@pytest.fixture(scope="module")
def model() -> Path:
    """The chat model, which the first run makes; the demo model, and why, where it cannot be had."""
    try:
        return chat_model()
    except RuntimeError as error:
        warnings.warn(f"The demo model is served instead: {error}.", stacklevel=1)
        return Path(DEMO_MODEL)


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[openai.OpenAI]:
    with served(model, "--speculative-config", '{"method": "prompt_lookup", "gate": "off"}') as client:
        yield client


def ask(client: openai.OpenAI, question: str, asked: dict[str, Any], **specplugins: Any) -> tuple[str, int]:
    """A streamed answer, and in how many parts it came."""
    body = {**asked.get("extra_body", {}), "vllm_xargs": {"specplugins": json.dumps(specplugins)}}
    stream: Any = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": question}], max_tokens=48, temperature=0, stream=True,
        **{**asked, "extra_body": body},
    )  # fmt: skip
    parts = [text for chunk in stream if (text := chunk.choices[0].delta.content)]
    return "".join(parts), len(parts)


@pytest.mark.parametrize("question", CASES, ids=["edit", "parameters", "schema"])
def test_answers(question: str, client: openai.OpenAI, model: Path) -> None:
    """Fails if drafts change an answer, if an answer that repeats its question comes token by token, or if an answer
    violates its schema."""
    asked = CASES[question]
    (text, num_parts), (expected, num_tokens) = (ask(client, question, asked, enabled=on) for on in (True, False))
    assert text == expected and len(text) > 20
    if model != DEMO_MODEL:
        assert "response_format" in asked or num_parts < 0.8 * num_tokens
        assert "response_format" not in asked or json.loads(text)["invoice"] == 2291
