"""Defines two forms of requests and answers: token ids, if the drafter has the target's tokenizer, and text. Text is
stored as bytes, since a token may end within a character. A draft is the target's tokenization of the text after the
history, where both tokenizers agree. Histories with different tokens may still agree as text.
"""

from collections.abc import Mapping
from typing import Any

from vllm_specplugins.draft import Codec, Int32Array

Guess = Any  # tuple[int, ...] or bytes: has a length, slices, sums
TOKEN_BYTES, MAX_TOKEN_BYTES = 4, 64  # of text, on average and at most


class Refused(ValueError):
    """The server refuses this request; it may answer others."""


def newest(tokens: Guess, limit: int) -> Guess:
    """Returns between `limit` / 2 and `limit` of the newest tokens. The beginning stays the same for many steps, for
    prefix caches."""
    half = max(1, limit // 2)
    return tokens[max(0, len(tokens) // half - 1) * half :]


class TokenIds:
    """Guesses are tuples of token ids in [0, vocab_size)."""

    none: Guess = ()
    fields: Mapping[str, Any] = {"return_token_ids": True}  # of a question

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def guess_of(self, token_ids: Int32Array) -> Guess:
        return tuple(token_ids.tolist())

    def unfinished(self, token_ids: Int32Array) -> Guess:
        """Returns the end of the history that the prompt omits; an answer must begin with it."""
        return ()

    def prompt(self, guess: Guess, limit: int) -> list[int] | str:
        """Returns a prompt for a drafter that takes at most `limit` tokens."""
        return list(newest(guess, limit))

    def read(self, choice: Mapping[str, Any], limit: int) -> Guess:
        """Reads a piece of an answer. Raises Refused if it has too many tokens, or unknown ones."""
        tokens = choice["token_ids"]
        if len(tokens) > limit or not all(type(id_) is int and 0 <= id_ < self._vocab_size for id_ in tokens):
            raise Refused("the answer has more tokens than requested, or ids outside of the vocabulary")
        return tuple(tokens)

    def num_tokens(self, guess: Guess) -> int:
        """Counts tokens; for a text the result is an estimate."""
        return len(guess)

    def draft(self, guess: Guess, limit: int) -> list[int]:
        return list(guess[:limit])


class Text:
    """Guesses are bytes of UTF-8; the methods have the meaning of those of TokenIds."""

    none: Guess = b""
    fields: Mapping[str, Any] = {}

    def __init__(self, codec: Codec):
        self._codec = codec

    def guess_of(self, token_ids: Int32Array) -> Guess:
        return self._codec.decode_bytes(token_ids.tolist())

    def unfinished(self, token_ids: Int32Array) -> Guess:
        text = self.guess_of(token_ids[-3:])  # a character has at most four bytes
        begin = next((place for place in range(len(text) - 1, -1, -1) if text[place] & 0xC0 != 0x80), len(text))
        return b"" if text[begin:].decode(errors="ignore") else text[begin:]

    def prompt(self, guess: Guess, limit: int) -> list[int] | str:
        return str(newest(guess, limit), errors="ignore")  # a token has at least one byte

    def read(self, choice: Mapping[str, Any], limit: int) -> Guess:
        text: bytes = choice["text"].encode()
        if len(text) > MAX_TOKEN_BYTES * limit:
            raise Refused("the answer has more text than requested")
        return text

    def num_tokens(self, guess: Guess) -> int:
        return len(guess) // TOKEN_BYTES

    def draft(self, guess: Guess, limit: int) -> list[int]:
        text = guess[: 2 * TOKEN_BYTES * (limit + 1)]
        tokens = self._codec.tokenize_bytes(text)
        return tokens[: min(limit, len(tokens) - (len(text) < len(guess)))]  # the last token may be incomplete


Form = TokenIds | Text
