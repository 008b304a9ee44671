"""What a grammar forces, with matchers of xgrammar and llguidance and the demo model's tokenizer."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import DEMO_MODEL, RUNNER
from transformers import AutoTokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from vllm_specplugins.engine.grammar import forced
from vllm_specplugins.engine.grammar.forced import ForcedTokens

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
K = 15
BACKENDS = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend, "outlines": OutlinesBackend}
TOKENIZER = AutoTokenizer.from_pretrained(DEMO_MODEL)
SIZE = len(TOKENIZER)
KEYS = ("customer_number", "delivery_address")
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "integer"} for key in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}


class Case:
    """A grammar of a backend, and what it forces."""

    def __init__(self, name: str, any_whitespace: bool = False):
        structured = SimpleNamespace(disable_any_whitespace=not any_whitespace, disable_additional_properties=False)
        config = SimpleNamespace(
            structured_outputs_config=structured,
            model_config=None,
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
        )
        self.backend: Any = BACKENDS[name](config, tokenizer=TOKENIZER, vocab_size=SIZE)
        self.forced = ForcedTokens(TOKENIZER, SIZE, lambda: self.backend.allocate_token_bitmask(1))

    def compile(self, spec: Any, read: str = "") -> Any:
        """The grammar of a schema or a regular expression, after it has read a text."""
        is_regex = isinstance(spec, str)
        kind = StructuredOutputOptions.REGEX if is_regex else StructuredOutputOptions.JSON
        grammar = self.backend.compile_grammar(kind, spec if is_regex else json.dumps(spec))
        assert all(grammar.accept_tokens("", [token]) for token in ids(read))
        return grammar

    def after(self, grammar: Any, draft: str = "", most: int = K) -> str:
        """The text that is forced. Kills: a state that is not rolled back."""
        before = self.allowed(grammar)
        tokens = self.forced.after(grammar, ids(draft), most, Writer(None))
        assert self.allowed(grammar) == before and len(tokens) <= most
        assert tokens == ids(TOKENIZER.decode(tokens))[: len(tokens)]  # as the model would
        return str(TOKENIZER.decode(tokens))

    def allowed(self, grammar: Any) -> list[int]:
        bitmask = self.backend.allocate_token_bitmask(1)
        if not grammar.is_terminated():
            grammar.fill_bitmask(bitmask, 0)
        return list(np.flatnonzero(np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does."""
    for name in ("READ_S", "MASKS_S", "CALL_S"):
        monkeypatch.setattr(forced, name, 10.0)


@pytest.fixture(params=["xgrammar", "guidance"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_keys_of_a_schema(name: str) -> None:
    """Kills: nothing forced at the start; a draft whose tokens the grammar has not read; more than was asked for."""
    case = Case(name)
    grammar = case.compile(SCHEMA)
    assert case.after(grammar) == '{"customer_number":'
    assert case.after(grammar, most=3) == TOKENIZER.decode(ids('{"customer_number":')[:3])
    assert case.after(grammar, '{"customer_number":') == case.after(grammar, '{"customer_number":1') == ""
    assert case.after(grammar, '{"customer_number":1,') == '"delivery_address":'
    assert case.after(case.compile(SCHEMA, '{"customer_number":1,'), '"deli') == 'very_address":'


def test_last_token_may_join() -> None:
    """Where white space may follow, a key's last quote may be one token with the colon: it is left out. Kills: the last
    token kept always; left out always.
    """
    case = Case("xgrammar", any_whitespace=True)
    assert case.after(case.compile(SCHEMA, '{"')) == "customer_number"
    assert case.after(case.compile(SCHEMA, '{"customer_number": 1, "')) == "delivery_address"


def pair() -> tuple[str, str]:
    """A word that is a token, of which a letter more makes another token."""
    words = {TOKENIZER.decode([token]): token for token in range(SIZE)}
    whole = (word for word in words if word.isascii() and word.isalpha() and word.islower() and len(word) > 2)
    return next((word[:-1], word) for word in whole if ids(word[:-1]) == [words.get(word[:-1])] and len(ids(word)) == 1)


def test_words_that_join(name: str) -> None:
    case, (short, long) = Case(name), pair()
    assert case.after(case.compile(short + "[a-z]+")) == ""
    assert case.after(case.compile(short + "[A-Z]{9}")) == short
    assert case.after(case.compile(f"({long})({long})")).startswith(long)


def test_ends(name: str) -> None:
    """Kills: a state that is wrong where a draft, or what was read, ends the grammar, or where it refuses the draft."""
    case, eos = Case(name), TOKENIZER.eos_token_id
    grammar = case.compile("abc")
    assert "abc".startswith(case.after(grammar)) and case.after(grammar, "ab") in ("", "c")
    before = case.allowed(grammar)
    assert case.forced.after(grammar, [*ids("abc"), eos], K, Writer(None)) == [] and case.allowed(grammar) == before
    assert all(grammar.accept_tokens("", [token]) for token in [*ids("abc"), eos])
    assert case.forced.after(grammar, [], K, Writer(None)) == []
    grammar = case.compile("abc")
    before = case.allowed(grammar)
    for draft in ("x", "abx", "abcx"):
        assert case.forced.after(grammar, ids(draft), K, Writer(None)) == [] and case.allowed(grammar) == before


def test_endless(name: str) -> None:
    """A client's grammar without an end, which llguidance gives up for good when it reads a token. Kills: a draft that
    is read before the target has sampled it, after which the request may only end."""
    case = Case(name)
    for word in ("aaaa", '\\"'):
        grammar = case.backend.compile_grammar(StructuredOutputOptions.GRAMMAR, f'root ::= "{word}" root')
        allowed = case.allowed(grammar)
        for draft in ([], allowed[:1], []):
            case.forced.after(grammar, draft, K, Writer(None))
            assert case.allowed(grammar) == allowed != [TOKENIZER.eos_token_id]


def test_free_choice_and_long_texts(name: str) -> None:
    case = Case(name)
    assert case.after(case.compile("[a-z ]{40}")) == ""
    assert len(case.forced.after(case.compile("ab " * 60), [], K, Writer(None))) == K


def test_text_that_ends_within_a_character(name: str) -> None:
    """Kills: a client's grammar with which nothing is forced any more."""
    case = Case(name)
    grammar = case.compile({"enum": ["\u00e91", "\u00e82"]})
    before = case.allowed(grammar)
    assert case.forced.after(grammar, [], K, Writer(None)) == ids('"\u00e9')[:2] and case.allowed(grammar) == before


class Writer:
    """A request."""

    def __init__(self, cache_salt: str | None):
        self.cache_salt, self.all_token_ids = cache_salt, list[int]()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def test_as_it_was_written() -> None:
    """Kills: tokens of another tenant's; of a text that is not whole yet; more or less than its own."""
    case, text = Case("xgrammar"), '{"customer_number":'
    letters, grammar = [token for letter in text for token in ids(letter)], case.compile(SCHEMA)
    request = Writer("a")
    for begin, end in ((0, 5), (5, 17), (17, 19)):
        assert case.forced.after(grammar, [], K, request) == ids(text[begin:])[:K]
        assert case.forced.after(case.compile(SCHEMA), [], K, Writer("a")) == ids(text)[:K]
        request.all_token_ids += letters[begin:end]
        assert all(grammar.accept_tokens("", [token]) for token in letters[begin:end])
    assert case.forced.after(grammar, [], K, request) == []
    for salt, expected in (("a", letters), (None, ids(text))):
        assert case.forced.after(case.compile(SCHEMA), [], K, Writer(salt)) == expected[:K]
    request = Writer("a")
    case.forced.after(case.compile(SCHEMA), [], K, request)
    request.all_token_ids += letters[:5]
    assert case.forced.after(case.compile(SCHEMA, text[:5]), [], K, request) == letters[5:][:K]


def test_too_long(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes longer than it may, and one that fails, are their request's last. Fails if others lose drafts,
    or if the request is asked for again.
    """
    case, slow, failing = Case(name), Writer(None), Writer(None)
    grammar = case.compile(SCHEMA)
    with monkeypatch.context() as patch:
        patch.setattr(forced, "CALL_S", -1.0)
        assert case.forced.after(grammar, [], K, slow) == ids('{"customer_number":')
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(type(grammar), "validate_tokens", lambda *_: 1 // 0)
        case.forced.after(grammar, [], K, failing)
    assert case.forced.after(grammar, [], K, slow) == case.forced.after(grammar, [], K, failing) == []
    assert case.after(grammar) == '{"customer_number":'


def test_no_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a text is read to its end where the time is over, or drafted where its masks take too long."""
    for limit in ("READ_S", "MASKS_S"):
        monkeypatch.setattr(forced, limit, 0.0)
    assert Case(name).after(Case(name).compile(SCHEMA)) == ""


def test_remembered_texts_are_bounded() -> None:
    """Fails if a request may add any number of texts, or if a long text adds one in each step."""
    case, request = Case("xgrammar"), Writer("a")
    for index in range(100):
        word = f"key{index:03}"
        assert case.forced.after(case.compile(word + "[0-9]"), [], K, request)
        request.all_token_ids += ids(word)
    assert len(case.forced._written) == 64
    long, letter = case.compile("a" * 1500), ids("a")
    request = Writer("b")
    while len(request.all_token_ids) < 1500 and long.accept_tokens("", letter):
        request.all_token_ids += letter
        case.forced.after(long, [], K, request)
    longest = forced._LONGEST * (K + 1)
    assert all(len(text) <= longest and len(written) <= longest for (_, text), written in case.forced._written.items())
    assert len(case.forced._written) <= 64 + 64


def test_other_backends(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a backend that does not expose its forced text counts as one that does, or if each step logs a
    warning."""
    case = Case("outlines")
    grammar = case.compile(SCHEMA)
    with caplog.at_level(logging.WARNING, "vllm.specplugins"):
        assert all(case.forced.after(grammar, [], K, Writer(None)) == [] for _ in range(2))
    assert len(caplog.messages) == 1 and "backend is Outlines" in caplog.messages[0]
