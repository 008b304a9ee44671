"""Finds forced tokens: if a grammar allows only one text next, the tokens with which the model would write it. xgrammar
allows any tokens that spell the text, and a model often prefers short ones. The draft repeats the tokens with which a
request of the tenant last wrote the text, or uses the tokenizer's tokens. It omits the last token if the grammar allows
a longer token with the same beginning. A client's grammar may force an endless text, so reading stops at the draft's
length and at a time budget, which also covers vLLM's masks, one per draft token. A request with a slower grammar gets
no more forced tokens.
"""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from vllm_specplugins.engine.codec import byte_tokenizer
from vllm_specplugins.engine.grammar.vocabulary import NO_TOKEN, Vocabulary

logger = logging.getLogger("vllm.specplugins")

READ_S = 0.001  # CPU time for reading a text
MASKS_S = 0.001  # CPU time for vLLM's masks of a draft
CALL_S = 0.002  # CPU time of a call
GRACE_S = 0.01  # total overrun of a request's calls: a grammar builds its lexer during use
_LONGEST = 16  # limit of a text's mean bytes per token
_MAX_WRITTEN = 1024  # texts with recorded tokens
_MAX_OF_REQUEST = 64  # recorded texts of one request
_MAX_RESTS = 8  # positions of a text at which a request deviated from the recorded tokens
_NOTES = "specplugins_forced"  # attribute of a request
# If the grammar allows two of these, there is a choice. This avoids a mask of all letters, which takes xgrammar up to
# 20 ms with 131,072 tokens.
_PROBES = b"a", b"b", b"A", b"0", b"1", b" ", b"\xe4", b"\xe5"


@dataclass(slots=True)
class _Notes:
    """The forced text that a request writes since its token `start`."""

    start: int = 0
    text: bytes = b""
    rests: list[int] = field(default_factory=list)  # bytes of the text before each deviation from recorded tokens
    num_written: int = 0
    grace_s: float = GRACE_S


class ForcedTokens:
    """Computes the forced tokens of all requests of an engine.

    Args:
        tokenizer: the model's tokenizer, which must be fast.
        vocab_size: the model's vocabulary size, which may exceed the tokenizer's.
        new_bitmask: creates vLLM's bitmask of one row when the first grammar arrives.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, new_bitmask: Callable[[], Any]):
        self._tokenizer = byte_tokenizer(tokenizer, vocab_size)
        self._vocabulary = Vocabulary(self._tokenizer)
        self._new_bitmask, self._bitmask = new_bitmask, None
        self._unknown: set[type] = set()
        self._written: dict[tuple[str | None, bytes], array[int]] = {}  # (tenant, text) -> its last tokens

    def after(self, grammar: Any, draft: Sequence[int], max_num: int, request: Any) -> list[int]:
        """Returns at most `max_num` forced tokens after a draft that the grammar allows, and restores the grammar's
        state. `request` is vLLM's."""
        if type(grammar) not in (XgrammarGrammar, GuidanceGrammar):
            self._refuse(type(grammar))
            return []
        notes: _Notes = vars(request).setdefault(_NOTES, _Notes())
        if notes.grace_s <= 0:
            return []
        if self._bitmask is None:
            self._bitmask = self._new_bitmask()
        began, grace_s, notes.grace_s = time.thread_time(), notes.grace_s, 0.0  # stays 0 if this raises
        cursor = _Cursor(grammar, self._bitmask)
        try:
            tokens = self._after(cursor, draft, max_num, request, notes)
        finally:
            cursor.rollback_to()
        notes.grace_s = grace_s - max(0.0, time.thread_time() - began - CALL_S)
        return tokens

    def _after(self, cursor: "_Cursor", draft: Sequence[int], max_num: int, request: Any, notes: _Notes) -> list[int]:
        if not cursor.read(draft):
            return []
        text, written = b"", array("i")
        if type(cursor.grammar) is GuidanceGrammar:
            text, max_num = _guidance_text(cursor, max_num)
        elif draft:
            text = self._xgrammar_text(cursor, max_num)
        else:
            text, written = self._text_of(request, notes, partial(self._xgrammar_text, cursor, max_num))
        spelt = list(written) or (self._tokenizer.tokenize_bytes(text[: _LONGEST * (max_num + 1)]) if text else [])
        tokens: list[int] = cursor.grammar.validate_tokens(spelt[:max_num])
        if written or not tokens or len(tokens) < len(spelt):
            return tokens
        cursor.read(tokens[:-1])
        return tokens[:-1] if self._vocabulary.can_extend(cursor.mask(), tokens[-1]) else tokens

    def _xgrammar_text(self, cursor: "_Cursor", max_num: int) -> bytes:
        """Reads the text forced from here on, token by token. `find_jump_forward_string` is unbounded, so it is called
        only if a choice limits the text."""
        matcher, start, deadline = cursor.grammar.matcher, cursor.num_read, time.thread_time() + READ_S
        tokens, is_choice = list[int](), False
        while len(tokens) <= max_num and time.thread_time() < deadline and not is_choice:
            token = None if _is_free(matcher) else self._vocabulary.forced(cursor.mask())
            is_choice = token is None
            if token is None or token == NO_TOKEN or not cursor.read([token]):
                break
            tokens.append(token)
        cursor.rollback_to(start)
        return _jump_forward(matcher) if is_choice else self._vocabulary.text(tokens)

    def _text_of(self, request: Any, notes: _Notes, read: Callable[[], bytes]) -> tuple[bytes, "array[int]"]:
        """Returns the text that the grammar forces now, and its recorded tokens, if any. It reads a text only at its
        beginning."""
        emitted = request.all_token_ids[notes.start :] if notes.text else []
        text = self._vocabulary.text(emitted)
        if text.startswith(notes.text):
            self._record(request.cache_salt, emitted, notes)
        if not (notes.text and notes.text.startswith(text)):
            notes.start, notes.text, notes.rests, text = request.num_tokens, read(), [0], b""
        rest, none = notes.text[len(text) :], array("i")
        written = self._written.get((request.cache_salt, rest), none)
        if text and not written:
            whole = self._written.get((request.cache_salt, notes.text), none)
            places = (self._vocabulary.ends(whole) == len(text)).nonzero()[0]
            written = whole[places[0] + 1 :] if len(places) else none
            if not written and len(notes.rests) < _MAX_RESTS:
                notes.rests.append(len(text))
        return rest, written

    def _record(self, tenant: str | None, tokens: Sequence[int], notes: _Notes) -> None:
        """Records the tokens of a text that has ended; it is a prefix of `tokens`."""
        text, notes.text, ends = notes.text, b"", self._vocabulary.ends(tokens)
        for num_bytes in notes.rests if text else ():
            key = tenant, text[num_bytes:]
            notes.num_written += key not in self._written
            if notes.num_written > _MAX_OF_REQUEST:
                return
            first, end = np.searchsorted(ends, (num_bytes, len(text)), side="right").tolist()
            end -= ends[end - 1] == len(text)
            self._written.pop(key, None)
            self._written[key] = array("i", tokens[first : end + 1])
            if len(self._written) > _MAX_WRITTEN:
                del self._written[next(iter(self._written))]

    def _refuse(self, kind: type) -> None:
        if kind not in self._unknown:
            self._unknown.add(kind)
            name = kind.__name__.removesuffix("Grammar")
            logger.warning(
                "grammar drafts nothing: the structured-output backend is %s. Use xgrammar or guidance.", name
            )


class _Cursor:
    """Advances a grammar, or a copy of it, over tokens and rolls it back. `bitmask` is a buffer, [1, vocab_size / 32]
    int32."""

    def __init__(self, grammar: Any, bitmask: Any):
        if type(grammar) is GuidanceGrammar:  # errors of llguidance, as for an endless text, are final
            grammar = replace(grammar, ll_matcher=grammar.ll_matcher.deep_copy(), printed_error=True)
        self.grammar, self.num_read, self._bitmask = grammar, 0, bitmask

    def read(self, tokens: Sequence[int]) -> bool:
        """Advances over the tokens, and returns whether the grammar allows them and may continue after them."""
        for token in tokens:
            if self.grammar.is_terminated() or not self.grammar.accept_tokens("", [token]):
                return False
            self.num_read += 1
        return not self.grammar.is_terminated()

    def rollback_to(self, num_read: int = 0) -> None:
        if self.num_read > num_read:
            self.grammar.rollback(self.num_read - num_read)
        self.num_read = num_read

    def mask(self) -> Any:
        self.grammar.fill_bitmask(self._bitmask, 0)
        return self._bitmask


def _guidance_text(cursor: _Cursor, max_num: int) -> tuple[bytes, int]:
    """Returns the forced text, which llguidance bounds, and a draft length whose masks fit the time budget, since the
    time of a mask grows with the text."""
    if text := cursor.grammar.ll_matcher.compute_ff_bytes():
        cursor.mask()  # the first mask builds a part of the lexer
        began = time.thread_time()
        cursor.mask()
        max_num = min(max_num, int(MASKS_S / max(1e-9, time.thread_time() - began)))
    return text, max_num


def _jump_forward(matcher: Any) -> bytes:
    try:
        text: str = matcher.find_jump_forward_string()
    except UnicodeDecodeError as error:  # the text ends within a character
        return error.object
    return text.encode()


def _is_free(matcher: Any) -> bool:
    num_allowed = 0
    for probe in _PROBES:
        if matcher.accept_string(probe):
            matcher.rollback(1)
            num_allowed += 1
            if num_allowed == 2:
                return True
    return False
