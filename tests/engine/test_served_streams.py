"""Streams of a server whose steps have many tokens, with parsers that lose calls or text in such steps."""

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import DEMO_MODEL, RUNNER, long
from openai_server import served
from test_streams import FUNCTIONS, TEXTS, tokenizer_with

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v2", reason="the front end is the same on both runners")]
LOOKUP = {"method": "prompt_lookup", "gate": "off"}  # K = 31
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in FUNCTIONS.items()
]


def model_with(folder: Path, tokenizer: Any) -> Path:
    """A random Llama, with the markers of a parser in its vocabulary."""
    tokenizer.save_pretrained(folder)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def streamed(client: openai.OpenAI, text: str, token_ids: list[int], options: dict[str, Any]) -> tuple[Any, int]:
    """What a client puts together of a stream, and the number of its chunks."""
    content, reasoning, calls, num_chunks = "", "", dict[int, list[str]](), 0
    stream: Any = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=300, temperature=0, stream=True,
        tools=TOOLS, tool_choice="auto",
        extra_body={
            "structured_outputs": {"regex": re.escape(text)},
            "allowed_token_ids": sorted({*token_ids}),
            "vllm_xargs": {"specplugins": json.dumps(options)},
        },
    )  # type: ignore[call-overload]  # fmt: skip
    for chunk in stream:
        num_chunks += 1
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or ():
            parts = calls.setdefault(call.index, ["", ""])
            parts[0] += call.function.name or ""
            parts[1] += call.function.arguments or ""
    return (reasoning, content, calls), num_chunks


@pytest.mark.parametrize(
    ("tool", "reasoning"),
    [("deepseek_v31", "olmo3"), long("llama3_json", None), long("hunyuan_a13b", "hunyuan_a13b")],
    ids=str,
)
def test_streams_are_those_without_drafts(tool: str, reasoning: str | None, tmp_path: Path) -> None:
    """An agent repeats a call word for word, in fewer steps than tokens. Kills: a server whose parser is not split:
    deepseek_v31 then has no call, llama3_json one without a name, olmo3 no beginning of its answer, and hunyuan_a13b
    ends the stream with an error."""
    row, thought = TEXTS["tools"][tool], TEXTS["reasoning"].get(reasoning, {"tokens": [], "end": ""})
    tokenizer = tokenizer_with((*row["tokens"], *thought["tokens"]))
    arguments = ["--load-format", "dummy", "--speculative-config", json.dumps(LOOKUP), "--tool-call-parser", tool]
    arguments += ["--reasoning-parser", reasoning] if reasoning else []
    begins = f"Yes.{thought['end']}" if reasoning else ""
    with served(model_with(tmp_path, tokenizer), *arguments) as client:
        for text in (begins + "Four.", begins + row["calls"]["twice"]):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            allowed = [*token_ids, tokenizer.eos_token_id]
            plain, num_plain = streamed(client, text, allowed, {"enabled": False})
            drafted, num_chunks = streamed(client, text, allowed, {"reference": token_ids})
            assert drafted == plain and any(plain)
    assert num_chunks < num_plain
    if tool != "hunyuan_a13b":  # its markers are other tokens here, so the reasoning does not end
        assert [name for name, _ in drafted[2].values()] == 2 * ["get_weather"]
