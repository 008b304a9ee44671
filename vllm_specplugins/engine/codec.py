"""Converts token ids to the bytes of their text and back, with the target's tokenizer."""

from collections.abc import Sequence
from typing import Any

from llguidance.hf import from_tokenizer


def byte_tokenizer(tokenizer: Any, vocab_size: int) -> Any:
    """Returns llguidance's version of a vLLM tokenizer, which may have fewer tokens than the model. Raises ValueError
    for a slow tokenizer."""
    of_mistral = getattr(tokenizer, "llg_tokenizer", None)
    return of_mistral or from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)))


class TextCodec:
    """A `draft.Codec`. Raises ValueError if the engine has no fast tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        if tokenizer is None:
            raise ValueError("the engine has no tokenizer")
        self._tokenizer, self._bos = byte_tokenizer(tokenizer, vocab_size), tokenizer.bos_token_id

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        return bytes(self._tokenizer.decode_bytes([token for token in token_ids if token != self._bos]))

    def tokenize_bytes(self, text: bytes) -> list[int]:
        return list(self._tokenizer.tokenize_bytes(text))
