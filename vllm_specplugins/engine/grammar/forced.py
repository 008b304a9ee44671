"""The tokens that a grammar forces: of the one text that it allows next, those that the model would emit.

A grammar knows the text (xgrammar's jump-forward string, llguidance's forced bytes). With xgrammar any tokens that
spell it are allowed, and a model that would write another text takes short ones: it is drafted as it was written when
it was last forced for that tenant. Else the tokenizer's tokens are the likeliest. Where the text ends, the last of
these may be one with what follows: it is left out if the grammar allows a longer token that begins alike. A wrong guess
is rejected as any draft is.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from vllm_specplugins.engine.codec import byte_tokenizer

logger = logging.getLogger("vllm.specplugins")


def _xgrammar_text(grammar: Any) -> bytes:
    try:
        text: str = grammar.matcher.find_jump_forward_string()
    except UnicodeDecodeError as error:  # it ends within a character
        return error.object
    return text.encode()


_TEXT: Mapping[type, Callable[[Any], bytes]] = {
    XgrammarGrammar: _xgrammar_text,
    GuidanceGrammar: lambda grammar: grammar.ll_matcher.compute_ff_bytes(),
}
_LONGEST = 64  # bytes of a token, on average, in a text that is looked at: it may be long
_MOST_WRITTEN = 1024  # texts whose tokens are known
_BEGUN = "specplugins_begun"  # attribute of a request: where texts began that were forced on it, and the texts


class ForcedTokens:
    """Of all grammars of an engine.

    Args:
        tokenizer: the model's, a fast one.
        vocab_size: of the model, whose tokenizer may know fewer tokens.
        new_bitmask: makes vLLM's bitmask of one row, once there is a grammar.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, new_bitmask: Callable[[], Any]):
        self._tokenizer = byte_tokenizer(tokenizer, vocab_size)
        self._new_bitmask = new_bitmask
        self._unknown: set[type] = set()
        self._written: dict[tuple[str | None, bytes], list[int]] = {}  # by tenant and text, its newest tokens

    def after(self, grammar: Any, draft: Sequence[int], most: int, request: Any = None) -> list[int]:
        """At most so many tokens that follow a draft which the grammar allows; its state is as before.

        Args:
            request: whose own tokens the draft follows; None: whatever was written before says nothing.
        """
        if type(grammar) not in _TEXT:
            self._refuse(type(grammar))
            return []
        num_read, written = 0, list[int]()
        if request is not None:
            self._learn(request)
        try:
            for token in draft:
                if grammar.is_terminated() or not grammar.accept_tokens("", [token]):
                    return []
                num_read += 1
            text = b"" if grammar.is_terminated() else _TEXT[type(grammar)](grammar)
            text = text[: _LONGEST * (most + 1)]
            if text and request is not None and not draft:
                getattr(request, _BEGUN).append((request.num_tokens, text))
                written = self._written.get((request.cache_salt, text), [])
            spelt = written or (self._tokenizer.tokenize_bytes(text) if text else [])
            tokens: list[int] = grammar.validate_tokens(spelt[:most])
            if written or not tokens or len(tokens) < len(spelt):
                return tokens
            for token in tokens[:-1]:
                grammar.accept_tokens("", [token])
                num_read += 1
            return tokens[:-1] if self._goes_on(grammar, tokens[-1]) else tokens
        finally:
            if num_read:
                grammar.rollback(num_read)

    def _learn(self, request: Any) -> None:
        """Keeps how texts were written that end where the last one did, once it has."""
        if not (begun := vars(request).setdefault(_BEGUN, [])):
            return
        start, text = begun[-1]
        ends = accumulate(len(self._bytes_of(token)) for token in request.all_token_ids[start:])
        end = next((place for place, num in enumerate(ends, start + 1) if num >= len(text)), None)
        if end is None:
            return
        for begin, forced in begun:
            self._written[request.cache_salt, forced] = request.all_token_ids[begin:end]
        begun.clear()
        while len(self._written) > _MOST_WRITTEN:
            del self._written[next(iter(self._written))]

    def _goes_on(self, grammar: Any, token: int) -> bool:
        """Whether a longer token that begins with this one is allowed now."""
        bitmask, own = self._new_bitmask(), self._bytes_of(token)
        grammar.fill_bitmask(bitmask, 0)
        allowed = np.flatnonzero(np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little"))
        texts = map(self._bytes_of, allowed[allowed < self._tokenizer.vocab_size].tolist())
        return any(len(text) > len(own) and text.startswith(own) for text in texts)

    def _bytes_of(self, token: int) -> bytes:
        return bytes(self._tokenizer.decode_bytes([token]))

    def _refuse(self, kind: type) -> None:
        """Says once that a backend tells nothing."""
        if kind not in self._unknown:
            self._unknown.add(kind)
            name = kind.__name__.removesuffix("Grammar")
            logger.warning(
                "grammar: the structured outputs' backend must be xgrammar or guidance, not %s: drafts nothing.", name
            )
