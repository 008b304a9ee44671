"""Streams of vLLM's parsers of tool calls and reasoning, in steps of several tokens: their messages are those of one
token at a time. parser_texts.json has, for each parser, texts as its model writes them."""

import json
import random
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from conftest import ALL, DEMO_MODEL, RUNNER
from tokenizers import AddedToken
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from vllm_specplugins.engine.frontend import streams

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the front end is the same on both runners")
TEXTS = json.loads(Path(__file__).with_name("parser_texts.json").read_text())
NOT_HERE = {
    **dict.fromkeys(("openai", "openai_gptoss"), "its vocabulary is not here; HarmonyParser reads token by token"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "it needs a package"),
    **dict.fromkeys(("hf", "beam"), "it needs a template"),
}
STREAM_NOTHING = {"phi4_mini_json", "muse_glimmer", "muse", "musespark1x"}  # Muse: of reasoning that is cut
TOOLS = sorted(ToolParserManager.lazy_parsers)
REASONING = sorted(ReasoningParserManager.lazy_parsers)
LONG_THOUGHT = "The user asks for the weather; so I need the city, and then I can answer at once."
LONG_ANSWER = "The answer is 42: use a < b, and then go home by the 7 o'clock train, my friend."
PLAIN = "If a < b and {x} then use [1, 2]; no tool is needed here, my friend."
WEATHER = {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": "string"}}
FUNCTIONS = {"get_weather": WEATHER, "get_time": {"zone": {"type": "string"}}}
Message = tuple[str, str, tuple[tuple[int, str, str], ...]]


class Case(NamedTuple):
    """A text that a model answers with, and the parsers of the server."""

    tokens: tuple[str, ...]  # of the parser, beside the tokenizer's
    text: str
    prompt: str = "assistant\n"
    tool: str | None = None
    reasoning: str | None = None
    template_kwargs: dict[str, Any] | None = None
    fields: dict[str, Any] | None = None  # of the request


def rows(kind: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((key, row) for key, row in TEXTS[kind].items() if key.split("/")[0] == name)


def tool_cases(name: str) -> Iterator[Case]:
    for _, row in rows("tools", name):
        calls, (before, after) = row["calls"], row.get("content", ("", ""))
        texts = [calls.get("twice", calls["short"])]
        if ALL:
            texts += [*calls.values(), f"{before}{PLAIN}{after}"]
        if not row.get("no_content_before"):
            texts = [f"{before}Ok.{after}{text}" for text in texts[:1]] + texts[1:]
            texts += [f"{before}I will look it up now.\n{after}{calls['long']}"] if ALL else []
        for text in dict.fromkeys(texts):
            yield Case(tuple(row["tokens"]), text, tool=name)


def reasoning_cases(name: str) -> Iterator[Case]:
    for _, row in rows("reasoning", name):
        family, start, end = TEXTS["tools"][row["tools"]], row["start"], row["end"]
        before, after = family.get("content", ("", ""))
        after += "\n</answer>" if name == "hunyuan_a13b" else ""
        line, calls = "\n" if end.startswith("</") else "", family["calls"]
        tool, thinks = row["tools"].split("/")[0], f"assistant\n{start}"
        case = partial(
            Case, (*row["tokens"], *family["tokens"]), reasoning=name, template_kwargs=row.get("template_kwargs")
        )
        yield case(f"{start}Yes.{end}{before}Four.{after}")
        yield case(f"Yes.{end}{calls.get('twice', calls['short'])}", prompt=thinks, tool=tool)
        yield case(f"Yes.{end}{before}Four.{after}", prompt=thinks)
        if ALL:
            long = f"{LONG_THOUGHT}{line}{end}{line}"
            yield case(f"{start}{long}{before}{LONG_ANSWER}{after}")
            yield case(f"{long}{before}{LONG_ANSWER}{after}", prompt=thinks)
            yield case(LONG_THOUGHT, prompt=thinks)
            yield case(f"{before}{LONG_ANSWER}{after}")
            yield case(f"{long}{calls['long']}", prompt=thinks, tool=tool)


@cache
def tokenizer_with(tokens: tuple[str, ...]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in dict.fromkeys(tokens)])
    return get_cached_tokenizer(tokenizer)


get_parser = getattr(ParserManager.get_parser, "__wrapped__", ParserManager.get_parser)  # vLLM's


class Stream:
    """A case, its tokens, and the text that vLLM's detokenizer emits for each."""

    def __init__(self, case: Case):
        self.case, self.tokenizer = case, tokenizer_with(case.tokens)
        self.prompt = self.tokenizer.encode(case.prompt, add_special_tokens=False)
        self.token_ids = [*self.tokenizer.encode(case.text, add_special_tokens=False), self.tokenizer.eos_token_id]
        names = {"tool_parser_name": case.tool, "reasoning_parser_name": case.reasoning, "model_name": "m"}
        self.kinds = [
            kind(**names, enable_auto_tools=case.tool is not None)
            for kind in (get_parser, partial(streams._parser, get_parser))
        ]
        _, request = self._fresh(self.kinds[0])
        fields = {"stop", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"}
        params = SamplingParams(**{name: getattr(request, name) for name in fields})
        like: Any = SimpleNamespace(
            sampling_params=params, request_id="", prompt_token_ids=self.prompt, prompt_embeds=None
        )
        text = IncrementalDetokenizer.from_new_request(self.tokenizer, like)
        self.pieces = list[str]()
        for i, token_id in enumerate(self.token_ids, 1):
            is_last = i == len(self.token_ids)
            text.update([token_id], is_last)
            self.pieces.append(text.get_next_output_text(is_last, True))

    def _fresh(self, kind: Any) -> tuple[Any, Any]:
        request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        if self.case.tool:
            functions = [
                {"name": name, "description": "d", "parameters": {"type": "object", "properties": properties}}
                for name, properties in FUNCTIONS.items()
            ]
            request |= {
                "tools": [{"type": "function", "function": function} for function in functions],
                "tool_choice": "auto",
            }
        if self.case.template_kwargs:
            request["chat_template_kwargs"] = self.case.template_kwargs
        made = ChatCompletionRequest(**request, **(self.case.fields or {}))
        parser = kind(self.tokenizer, made.tools, chat_template_kwargs=self.case.template_kwargs or {})
        for part in (parser, parser.reasoning_parser, parser.tool_parser):
            made = made if part is None else part.adjust_request(made) or made
        return parser, made

    def message(self, kind: Any, steps: list[int]) -> Message:
        """What a client puts together when steps emit so many tokens."""
        parser, request = self._fresh(kind)
        reasoning, content, calls, at = "", "", dict[int, tuple[str, str]](), 0
        for num in steps:
            token_ids, text, at = self.token_ids[at : at + num], "".join(self.pieces[at : at + num]), at + num
            delta = parser.parse_delta(text, token_ids, request, self.prompt, finished=at >= len(self.token_ids))
            if delta is None:
                continue
            reasoning += delta.reasoning or ""
            content += delta.content or ""
            for call in delta.tool_calls:
                name, arguments = calls.get(call.index, ("", ""))
                if (part := call.function) is not None:
                    calls[call.index] = name + (part.name or ""), arguments + (part.arguments or "")
        return reasoning, content, tuple((index, *calls[index]) for index in sorted(calls))

    def steps(self) -> Iterator[list[int]]:
        """One token of the prefill, then 2, 6 or 32 a step; all at once."""
        num, rng = len(self.token_ids) - 1, random.Random(0)
        for size in (2, 6, 32):
            for phase in range(size) if ALL else sorted({0, size // 2}):
                yield [1, *sizes(num, phase, lambda size=size: size)]
            for _ in range(8 if ALL else 0):
                yield [1, *sizes(num, 0, lambda size=size: rng.randint(1, size))]
        yield [num + 1]

    def check(self) -> int:
        """The number of streams; AssertionError: one that is split differs from one token at a time, or one that is not
        differs from it and from the whole answer, but for white space at the ends."""
        theirs, ours = self.kinds
        expected, whole = self.message(theirs, [1] * len(self.token_ids)), self.whole()
        assert any(expected) or {self.case.tool, self.case.reasoning} & STREAM_NOTHING, self.case
        all_steps = list(self.steps())
        for steps in all_steps:
            message = self.message(ours, steps)
            if not issubclass(ours, streams._TokenByToken):
                assert read(message) in (read(expected), whole and read(whole)), (steps, self.case)
            else:
                assert message == expected, (steps, self.case)
        return len(all_steps)

    def whole(self) -> Message | None:
        """What a client gets that does not stream; None where vLLM fails."""
        parser, request = self._fresh(self.kinds[0])
        try:
            reasoning, content, calls = parser.parse(
                "".join(self.pieces),
                request,
                enable_auto_tools=self.case.tool is not None,
                model_output_token_ids=self.token_ids[:-1],
            )
        except Exception:
            return None
        return (
            reasoning or "",
            content or "",
            tuple((i, call.name, call.arguments) for i, call in enumerate(calls or ())),
        )


def read(message: Message) -> Any:
    reasoning, content, calls = message
    return reasoning.strip(), content.strip(), [(name, "".join(arguments.split())) for _, name, arguments in calls]


def sizes(num: int, phase: int, size: Any) -> Iterator[int]:
    """Parts of `num`, of which the first is `phase` if that is not 0."""
    while num > 0:
        part = min(num, phase or size())
        phase, num = 0, num - part
        yield part


@pytest.mark.parametrize("name", TOOLS)
def test_tool_parsers(name: str) -> None:
    """Kills: a parser in PROVEN that loses a call, a name, arguments or text in steps of 2, 6 or 32 tokens; a merge
    that does; a parser of a new vLLM that is proven without texts."""
    assert check("tools", name, tool_cases, ToolParserManager.get_tool_parser)


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_parsers(name: str) -> None:
    """Kills: a parser in PROVEN that loses the end of the reasoning or the beginning of the answer; one that raises."""
    assert check("reasoning", name, reasoning_cases, ReasoningParserManager.get_reasoning_parser)


def check(kind: str, name: str, cases: Any, get: Any) -> int:
    if not any(rows(kind, name)):
        assert name in NOT_HERE or not streams.is_proven(get(name)), f"parser_texts.json has no texts of {name}"
        pytest.skip(NOT_HERE.get(name, "no texts, so it reads token by token"))
    return sum(Stream(case).check() for case in cases(name))


class OneToken(Hermes2ProToolParser):  # type: ignore[misc]
    def extract_tool_calls_streaming(self, before: str, text: str, delta: str, ids: Any, *more: Any) -> Any:
        assert len(more[0]) - len(ids) <= 1
        return super().extract_tool_calls_streaming(before, text, delta, ids, *more)


class LosesText(Hermes2ProToolParser):  # type: ignore[misc]
    def extract_tool_calls_streaming(self, before: str, text: str, delta: str, ids: Any, *more: Any) -> Any:
        message = super().extract_tool_calls_streaming(before, text, delta, ids, *more)
        return None if len(more[0]) - len(ids) >= 7 else message


@pytest.mark.parametrize("planted", [OneToken, LosesText])
def test_parsers_of_plugins(planted: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser of --tool-parser-plugin reads token by token, with a name of vLLM's class, too. If it did not, the table
    would show it: one that asserts a single token, and one that loses text in steps of 7. Kills: trust by name."""
    planted.__name__ = "Hermes2ProToolParser"
    monkeypatch.setitem(ToolParserManager.tool_parsers, "planted", planted)
    monkeypatch.setitem(TEXTS["tools"], "planted", TEXTS["tools"]["hermes"])
    assert check("tools", "planted", tool_cases, ToolParserManager.get_tool_parser)
    monkeypatch.setattr(streams, "is_proven", lambda parser: True)
    with pytest.raises(AssertionError):
        check("tools", "planted", tool_cases, ToolParserManager.get_tool_parser)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(include: bool) -> None:
    """With a stop string, text lags behind the tokens as it does one token at a time. Kills: text that is not held
    back, and so reaches a parser with other tokens than without drafts."""
    row = TEXTS["tools"]["hunyuan_a13b"]
    text = f"I think that I will look it up.{row['calls']['twice']}"
    for stop in ("Bergen, Norway", "look it"):
        fields = {"stop": [stop, "x" * 9], "include_stop_str_in_output": include}
        assert Stream(Case(tuple(row["tokens"]), text, tool="hunyuan_a13b", fields=fields)).check()


def test_one_message_a_step() -> None:
    """A step's calls are one message: parts of arguments are one text, and a second call is a second entry. Kills: an
    entry for each token; a name that is lost to the call before."""
    row = TEXTS["tools"]["llama3_json"]
    stream = Stream(Case(tuple(row["tokens"]), row["calls"]["twice"], tool="llama3_json"))
    parser, request = stream._fresh(stream.kinds[1])
    message = parser.parse_delta("".join(stream.pieces), stream.token_ids, request, stream.prompt, finished=True)
    calls = [(call.index, call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [(i, "get_weather", '{"city": "Oslo"}') for i in (0, 1)]
    assert all(call.id for call in message.tool_calls)


def test_the_server_gets_our_parser(caplog: pytest.LogCaptureFixture) -> None:
    """The front end asks vLLM's manager for its parser, several times. Kills: a wrapper around another name, or around
    each parser; a line of the log each time."""
    streams.split_streams()
    streams._tell.cache_clear()
    names = {"tool_parser_name": "llama3_json", "enable_auto_tools": True}
    with caplog.at_level("INFO", "vllm.specplugins"):
        assert all(issubclass(ParserManager.get_parser(**names), streams._TokenByToken) for _ in range(3))
    assert [record.args for record in caplog.records] == [("Llama3JsonToolParser",)]
    names["tool_parser_name"] = "hermes"
    assert not issubclass(ParserManager.get_parser(**names), streams._TokenByToken)
    assert ParserManager.get_parser() is None


def test_proven_parsers_exist() -> None:
    """Kills: a name in PROVEN that vLLM has no more."""
    classes = {ToolParserManager.get_tool_parser(name).__name__ for name in TOOLS}
    classes |= {ReasoningParserManager.get_reasoning_parser(name).__name__ for name in REASONING}
    assert classes >= {*streams.PROVEN, streams.UNPROVEN}
