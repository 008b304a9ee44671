"""Parses streams as without drafts. A step with accepted drafts emits several tokens at once, and some of vLLM's
parsers of tool calls and reasoning then lose text or calls. Parsers without a passing test of several tokens at once
get the stream token by token; the server still sends one chunk per step."""

import logging
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

from vllm.parser import ParserManager
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from vllm_specplugins.engine.hooks import wrap

logger = logging.getLogger("vllm.specplugins")

# Parsers of vLLM that read several tokens at once like single tokens (tests/engine/test_streams.py), in addition to
# those that vLLM's parser engine runs; of the latter, all but UNPROVEN.
_TOOLS = (
    "Dots GptOss Granite4 HYV3 HYV4 Hermes2Pro KimiK3 Lfm2 Llama4Pythonic LongcatFlash MuseGlimmer Olmo3Pythonic "
    "PoolsideV1 Pythonic"
)
_REASONING = "DeepSeekR1 DeepSeekV3 GptOss HYV3 HYV4 K2Horizon KimiK3 MiniMaxM2AppendThink MiniMaxM3 MuseGlimmer"
PROVEN = {
    *(f"{name}ToolParser" for name in _TOOLS.split()),
    *(f"{name}ReasoningParser" for name in _REASONING.split()),
    "DeepSeekV3ReasoningWithThinkingParser",
    "PoolsideV1ReasoningParser",
    "Step3ReasoningParser",
}
UNPROVEN = (
    "InklingParserReasoningAdapter"  # one token at a time, a marker ends its answers; in longer steps it does not
)


def split_streams() -> None:
    """Makes vLLM's front end split steps for parsers without a passing test. Applied once per process."""
    wrap(ParserManager, "get_parser", _parser)


def _parser(original: Any, *args: Any, **kwargs: Any) -> Any:
    parser = original(*args, **kwargs)
    parts = () if parser is None else (parser.reasoning_parser_cls, parser.tool_parser_cls)
    unproven = [part.__name__ for part in parts if part is not None and not is_proven(part)]
    if not unproven:
        return parser
    _tell(" and ".join(unproven))
    return type(parser.__name__, (_TokenByToken, parser), {})


@cache
def _tell(names: str) -> None:
    """Logs once, since a server asks for its parser six times."""
    logger.info("%s parses streams token by token, because tests do not cover it with several tokens at once.", names)


def is_proven(parser: Any) -> bool:
    is_engine: bool = parser.engine_based_streaming and parser.__name__ != UNPROVEN
    return parser.__module__.startswith("vllm.") and (is_engine or parser.__name__ in PROVEN)


class _TokenByToken:
    """A mixin for vLLM's parsers."""

    model_tokenizer: Any
    _text: Any = None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        if self._text is None:
            self._text = _detokenizer(self.model_tokenizer, request, prompt_token_ids)
        message, num_left = None, len(delta_token_ids)
        for text, token_ids in _split(self._text, delta_text, delta_token_ids):
            num_left -= 1
            is_last = finished and num_left <= 0
            step = super().parse_delta(text, token_ids, request, prompt_token_ids, finished=is_last)  # type: ignore[misc]
            message = _merged(message, step)
        return message


def _detokenizer(tokenizer: Any, request: Any, prompt_token_ids: list[int] | None) -> Any:
    """Returns vLLM's detokenizer of the request, which holds back text that may become a stop string."""
    names = "stop", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"
    params = SamplingParams(**{name: getattr(request, name) for name in names if hasattr(request, name)})
    like: Any = SimpleNamespace(
        sampling_params=params, request_id="", prompt_token_ids=prompt_token_ids or [], prompt_embeds=None
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, like)
    detokenizer.stop = []  # vLLM has already searched for them
    return detokenizer


def _split(detokenizer: Any, text: str, token_ids: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Returns each token with its text. The last token has the rest, since only vLLM knows how a request ends."""
    for token_id in token_ids[:-1]:
        length = len(_next(detokenizer, token_id))
        yield text[:length], [token_id]
        text = text[length:]
    if token_ids:
        _next(detokenizer, token_ids[-1])
    yield text, token_ids[-1:]


def _next(detokenizer: Any, token_id: int) -> str:
    detokenizer.update([token_id], False)
    return detokenizer.get_next_output_text(False, True)


def _merged(first: Any, second: Any) -> Any:
    """Returns one message for two consecutive messages."""
    if first is None or second is None:
        return first or second
    for name in "reasoning", "content":
        if (text := getattr(second, name)) is not None:
            setattr(first, name, (getattr(first, name) or "") + text)
    for call in second.tool_calls:
        last, part = first.tool_calls[-1] if first.tool_calls else None, call.function
        last_part = last and last.index == call.index and last.function
        if last_part and part and not (call.id or part.name):
            last_part.arguments = (last_part.arguments or "") + (part.arguments or "")
        else:
            first.tool_calls = [*first.tool_calls, call]
    return first
