"""The bytes of a model's tokens, in order: which of the tokens that a mask allows begin one another."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from vllm_specplugins.structures.arrays import Ints

NO_TOKEN = -1
_SPECIAL = b"\xff"  # begins no text in UTF-8


class Vocabulary:
    """See the module.

    Args:
        codec: llguidance's tokenizer. A special token counts as no text: it is never forced.
    """

    def __init__(self, codec: Any):
        texts = [
            _SPECIAL * codec.is_special_token(token) + codec.decode_bytes([token]) for token in range(codec.vocab_size)
        ]
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._texts, self._tokens = [texts[token] for token in order], order
        self._ranks = np.argsort(order)  # [vocab_size], the place of each token in that order
        self._num_bytes = np.array([len(text) for text in texts])

    def text(self, tokens: Sequence[int]) -> bytes:
        """The bytes of these tokens."""
        return b"".join(self._texts[self._ranks[token]] for token in tokens)

    def ends(self, tokens: Sequence[int]) -> Ints:
        """[num_tokens], after how many bytes each of these tokens ends."""
        return self._num_bytes[list(tokens)].cumsum()

    def forced(self, bitmask: Any) -> int | None:
        """The longest token that must be written next, in one piece or in several.

        Each other token that the mask allows begins it, or begins with it. None: there is a choice, or the end;
        NO_TOKEN: the mask allows none.
        """
        ranks = np.sort(self._allowed(bitmask))
        if not len(ranks):
            return NO_TOKEN
        last = self._texts[ranks[-1]]
        chain = list(takewhile(lambda rank: last.startswith(self._texts[rank]), ranks.tolist()))
        return self._tokens[chain[-1]] if chain and not last.startswith(_SPECIAL) else None

    def goes_on(self, bitmask: Any, token: int) -> bool:
        """Whether the mask allows a longer token that begins with this one."""
        text, ranks = self.text([token]), self._allowed(bitmask)
        first, end = bisect_right(self._texts, text), bisect_left(self._texts, text + _SPECIAL)
        return bool(((first <= ranks) & (ranks < end)).any())

    def _allowed(self, bitmask: Any) -> Ints:
        """The ranks of the tokens that vLLM's bitmask, [1, vocab_size / 32] int32, allows."""
        words = bitmask.numpy()[0]
        places = words.nonzero()[0]
        bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").nonzero()[0]
        tokens = places[bits >> 5] * 32 + (bits & 31)
        return self._ranks[tokens[tokens < len(self._ranks)]]
