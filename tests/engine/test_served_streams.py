"""Streams of vLLM's server whose steps have many tokens, with parsers that lose calls or text in such steps. The server
is vLLM's application before an engine of this process, which emits given tokens; one engine serves all parsers."""

import asyncio
import json
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from async_front_end import async_llm
from conftest import DEMO_MODEL, RUNNER
from test_forced_log import forced
from test_streams import FUNCTIONS, TEXTS, tokenizer_with
from transformers import AutoTokenizer
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_specplugins.engine.harness.serving import LOGGED

ON_BOTH = pytest.mark.skipif(RUNNER == "v2", reason="the front end is the same on both runners")
pytestmark = [pytest.mark.slow, ON_BOTH]
LOOKUP = {"method": "prompt_lookup", "gate": "off"}  # K = 31
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in FUNCTIONS.items()
]
# Those that hunyuan_a13b's reasoning parser knows by their ids.
HUNYUAN = {14023: "<th", 771: "ink", 397: ">\n", 198: "\n", 524: "</", 27963: "think", 27: "<", 9399: "answer", 29: ">"}
VOCAB_SIZE = 27_964
CALL = [["get_weather", '{"city": "Oslo"}']] * 2
Message = tuple[str, str, list[list[str]]]


class Served(NamedTuple):
    """A server's parsers, what its model answers, and how a client understands that."""

    tool: str
    reasoning: str | None
    answer: tuple[str | int, ...]  # texts and tokens
    message: Message


def cases() -> list[Served]:
    llama, deepseek, hunyuan = (
        TEXTS["tools"][name]["calls"]["twice"] for name in ("llama3_json", "deepseek_v31", "hunyuan_a13b")
    )
    begin, end, last = [14023, 771, 397], [198, 524, 27963, 397, 27, 9399, 397], [198, 524, 9399, 29]
    return [
        Served("llama3_json", None, (llama,), ("", "", CALL)),
        Served("deepseek_v31", None, (f"Four.{deepseek}",), ("", "Four.", CALL)),
        Served(
            "deepseek_v31",
            "olmo3",
            ("Yes, two and two.</think>Four, my friend.",),
            ("Yes, two and two.", "Four, my friend.", []),
        ),
        Served(
            "hunyuan_a13b",
            "hunyuan_a13b",
            (*begin, "Yes, two and two.", *end, "Four.", *last),
            ("Yes, two and two.", "Four.\n</answer>", []),  # as vLLM reads it token by token
        ),
        Served("hunyuan_a13b", None, (hunyuan,), ("", "<tool_calls>", CALL)),  # as vLLM reads it token by token
    ]


def tokenizer_in(folder: Path) -> Any:
    """The demo model's, with the markers of all parsers."""
    tokens = [TEXTS[kind][name]["tokens"] for kind, name in (("tools", "deepseek_v31"), ("reasoning", "olmo3"))]
    tokenizer_with(("<|python_tag|>", *chain.from_iterable(tokens))).save_pretrained(folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    for number, (token_id, text) in enumerate(HUNYUAN.items()):
        other = next((token for token, its_id in vocab.items() if its_id == token_id), None)
        name = text.replace("\n", "\u010a")  # as the byte level writes it
        vocab |= {} if other is None else {other: vocab.get(name, VOCAB_SIZE - 20 + number)}
        vocab[name] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return AutoTokenizer.from_pretrained(folder)


async def streamed(client: openai.AsyncOpenAI, **options: Any) -> tuple[Message, int]:
    """What a client puts together of a stream, and the number of its chunks."""
    reasoning, content, calls, num_chunks = "", "", list[list[str]](), 0
    stream: Any = await client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=300, temperature=0, stream=True,
        tools=TOOLS, tool_choice="auto", extra_body={"vllm_xargs": options},
    )  # type: ignore[call-overload]  # fmt: skip
    async for chunk in stream:
        num_chunks += 1
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or ():
            calls += [["", ""]] * (call.index + 1 - len(calls))
            name, arguments = calls[call.index]
            calls[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
    return (reasoning, content, calls), num_chunks


async def asked(llm: Any, model: str, log: list[list[int]]) -> list[Any]:
    """What a client gets, and in how many chunks: by case without drafts and with them; then, of the last one, while
    drafting is switched off over HTTP, and on."""
    found = []
    async with async_llm(llm) as engine:
        for row, case in enumerate(cases()):
            words = ["--model", model, "--served-model-name", "demo", "--enable-auto-tool-choice"]
            words += ["--tool-call-parser", case.tool, "--api-key", "none"]  # /collective_rpc asks for no key
            words += ["--reasoning-parser", case.reasoning] if case.reasoning else []
            args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
            args.structured_outputs_config.reasoning_parser = case.reasoning or ""  # as vLLM's engine does at its start
            app = build_app(args, ("generate",), engine.model_config)
            await init_app_state(engine, app.state, args, ("generate",))
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://demo")
            client = openai.AsyncOpenAI(base_url="http://demo/v1", api_key="none", max_retries=0, http_client=http)
            for options in ({"enabled": False}, drafted := {"reference": log[row]}):
                found.append(await streamed(client, **{LOGGED: row, "specplugins": json.dumps(options)}))
        for mode in ("none", "auto"):
            answer = await http.post("/collective_rpc", json={"method": "specplugins_gate", "args": [mode]})
            assert answer.json() == {"results": [mode]}
            found.append(await streamed(client, **{LOGGED: row, "specplugins": json.dumps(drafted)}))
    return found


def test_streams_are_those_without_drafts(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent repeats a call word for word, in a third of the steps. Kills: a server whose parser is not split:
    deepseek_v31 then has no call, llama3_json one without a name, olmo3 no beginning of its answer, and hunyuan_a13b
    ends the stream with an error; a switch that vLLM's route does not reach."""
    monkeypatch.setattr(envs, "VLLM_SERVER_DEV_MODE", True, raising=False)
    tokenizer = tokenizer_in(tmp_path)
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def ids(part: str | int) -> list[int]:
        return [part] if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=False)

    log = [[*chain.from_iterable(map(ids, case.answer)), tokenizer.eos_token_id] for case in cases()]
    llm = engine(LOOKUP, model=str(tmp_path), load_format="dummy", max_model_len=512)
    with forced(llm, log):
        *found, off, on = asyncio.run(asked(llm, str(tmp_path), log))
    for case, plain, drafted in zip(cases(), found[::2], found[1::2], strict=True):
        assert drafted[0] == plain[0], case
        assert plain[0] == case.message, case
        assert drafted[1] <= plain[1] / 3, case
    assert (off, on) == (plain, drafted)
