"""A reasoning parser for servers with a model that does not think: its thoughts end with the first line."""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.identity_reasoning_parser import IdentityReasoningParser


@ReasoningParserManager.register_module("one_line")
class OneLine(IdentityReasoningParser):
    """Attributes:
    ends: the tokens with a line break in them.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any):
        super().__init__(tokenizer, *args, **kwargs)
        self.ends = {token for token in range(len(tokenizer)) if "\n" in tokenizer.decode([token])}

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return False

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        return not self.ends.isdisjoint(delta_ids)
