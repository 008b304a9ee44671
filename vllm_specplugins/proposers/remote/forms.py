"""What is asked and answered: token ids where the drafter has the target's tokenizer, else text.

Text is held as bytes, since a token may end within a character. It becomes tokens of the target's when it is drafted,
from where the history ends: there both tokenizers agree. What the history says in other tokens is still as guessed.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from vllm_specplugins.draft import Codec, Int32Array

Guess = Any  # tuple[int, ...] or bytes: has a length, slices, sums
TOKEN_BYTES, MOST_TOKEN_BYTES = 4, 64  # of text, on average and at most


class Refused(ValueError):
    """The server does not answer this question as asked; it may answer those of other requests."""


def newest(tokens: Guess, most: int) -> Guess:
    """The newest of them, more than a half of `most` where there are as many, from the same place on for many steps,
    for the server's prefix cache."""
    half = max(1, most // 2)
    return tokens[max(0, len(tokens) // half - 1) * half :]


class Form(Protocol):
    """One of the two."""

    none: Guess
    asks: Mapping[str, Any]  # of a question, beside what both forms ask

    def of(self, token_ids: Int32Array) -> Guess:
        """What these tokens of a history are in this form."""

    def unfinished(self, token_ids: Int32Array) -> Guess:
        """What of the history's end no question can hold: an answer begins with it."""

    def prompt(self, guess: Guess, max_tokens: int, vocab_size: int) -> list[int] | str:
        """For a question to a drafter that takes at most so many tokens, with ids in [0, vocab_size)."""

    def read(self, choice: Mapping[str, Any], most: int) -> Guess:
        """A piece of an answer that has at most so many tokens; Refused where it has more, or others than the target;
        whatever else where it is none."""

    def num_tokens(self, guess: Guess) -> int:
        """About how many they are."""

    def draft(self, guess: Guess, limit: int) -> list[int]:
        """Its first tokens, at most so many."""


class TokenIds:
    """See the module; ids are in [0, vocab_size)."""

    none: Guess = ()
    asks: Mapping[str, Any] = {"return_token_ids": True}

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def of(self, token_ids: Int32Array) -> Guess:
        return tuple(token_ids.tolist())

    def unfinished(self, token_ids: Int32Array) -> Guess:
        return ()

    def prompt(self, guess: Guess, max_tokens: int, vocab_size: int) -> list[int] | str:
        places = range(len(guess), 0, -1)
        begin = next((place for place in places if guess[place - 1] >= vocab_size), 0)
        return list(newest(guess[begin:], max_tokens))

    def read(self, choice: Mapping[str, Any], most: int) -> Guess:
        tokens = choice["token_ids"]
        if len(tokens) > most or not all(type(token) is int and 0 <= token < self._vocab_size for token in tokens):
            raise Refused("more tokens than asked for, or outside of the vocabulary")
        return tuple(tokens)

    def num_tokens(self, guess: Guess) -> int:
        return len(guess)

    def draft(self, guess: Guess, limit: int) -> list[int]:
        return list(guess[:limit])


class Text:
    none: Guess = b""
    asks: Mapping[str, Any] = {}

    def __init__(self, codec: Codec):
        self._codec = codec

    def of(self, token_ids: Int32Array) -> Guess:
        return self._codec.decode_bytes(token_ids.tolist())

    def unfinished(self, token_ids: Int32Array) -> Guess:
        text = self.of(token_ids[-3:])  # a character has at most four bytes
        begin = next((place for place in range(len(text) - 1, -1, -1) if text[place] & 0xC0 != 0x80), len(text))
        return b"" if text[begin:].decode(errors="ignore") else text[begin:]

    def prompt(self, guess: Guess, max_tokens: int, vocab_size: int) -> list[int] | str:
        return str(newest(guess, max_tokens), errors="ignore")  # a token has a byte or more

    def read(self, choice: Mapping[str, Any], most: int) -> Guess:
        text: bytes = choice["text"].encode()
        if len(text) > MOST_TOKEN_BYTES * most:
            raise Refused("more text than asked for")
        return text

    def num_tokens(self, guess: Guess) -> int:
        return len(guess) // TOKEN_BYTES

    def draft(self, guess: Guess, limit: int) -> list[int]:
        text = guess[: 2 * TOKEN_BYTES * (limit + 1)]
        tokens = self._codec.tokenize_bytes(text)
        return tokens[: min(limit, len(tokens) - (len(text) < len(guess)))]  # the last one may go on
