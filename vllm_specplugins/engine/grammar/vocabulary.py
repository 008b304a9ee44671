"""Sorts the bytes of a model's tokens, to find allowed tokens that are prefixes of each other."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from vllm_specplugins.structures.arrays import Ints

NO_TOKEN = -1
_SPECIAL = b"\xff"  # no UTF-8 text begins with it


class Vocabulary:
    """The bytes of all tokens, from llguidance's tokenizer. Special tokens are never forced."""

    def __init__(self, codec: Any):
        texts = [
            _SPECIAL * codec.is_special_token(token) + codec.decode_bytes([token]) for token in range(codec.vocab_size)
        ]
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._texts, self._tokens = [texts[token] for token in order], order
        self._ranks = np.argsort(order)  # [vocab_size], token -> rank
        self._num_bytes = np.array([len(text) for text in texts])

    def text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._texts[self._ranks[token]] for token in tokens)

    def ends(self, tokens: Sequence[int]) -> Ints:
        """Returns the end of each token in the bytes of all tokens, [num_tokens]."""
        return self._num_bytes[list(tokens)].cumsum()

    def forced(self, bitmask: Any) -> int | None:
        """Returns the longest token of a text that must come next: every other allowed token is a prefix of it, or has
        it as a prefix. The text may also be written in several tokens. None if the mask allows a choice or the end;
        NO_TOKEN if it allows no token."""
        ranks = np.sort(self._allowed(bitmask))
        if not len(ranks):
            return NO_TOKEN
        last = self._texts[ranks[-1]]
        chain = list(takewhile(lambda rank: last.startswith(self._texts[rank]), ranks.tolist()))
        return self._tokens[chain[-1]] if chain and not last.startswith(_SPECIAL) else None

    def can_extend(self, bitmask: Any, token: int) -> bool:
        """Returns whether the mask allows a longer token with this prefix."""
        text, ranks = self.text([token]), self._allowed(bitmask)
        first, end = bisect_right(self._texts, text), bisect_left(self._texts, text + _SPECIAL)
        return bool(((first <= ranks) & (ranks < end)).any())

    def _allowed(self, bitmask: Any) -> Ints:
        """Returns the ranks of the tokens that vLLM's bitmask allows, [1, vocab_size / 32] int32."""
        words = bitmask.numpy()[0]
        places = words.nonzero()[0]
        bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").nonzero()[0]
        tokens = places[bits >> 5] * 32 + (bits & 31)
        return self._ranks[tokens[tokens < len(self._ranks)]]
