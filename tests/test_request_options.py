"""Per-request options: what passes, and that everything else is refused with one sentence."""

import doctest
from typing import Any

import pytest

from vllm_specplugins import request_options
from vllm_specplugins.config import ConfigError
from vllm_specplugins.methods import parse_config
from vllm_specplugins.request_options import Limits, check_options, draft_limit, read_options, received, resolved

LOOKUP = {"method": "prompt_lookup"}
CASCADE = {"method": "cascade", "stages": [LOOKUP, {"method": "early_exit"}]}
CUSTOM = {"method": "custom", "proposer": "json:loads"}
RUBBISH: list[Any] = [None, -1, 65, 2.0, "5", b"5", [5], {}, {"a": 1}, 10**30, float("nan"), object()]


def limits(config: dict[str, Any], max_model_len: int = 1000) -> Limits:
    return Limits(parse_config(config), 100, max_model_len)


def test_docstrings() -> None:
    assert doctest.testmod(request_options).failed == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enabled": False},
        {"max_draft": 0},
        {"max_draft": 64},
        {"max_context": 32768},
        {"stages": ["early_exit"]},
        {"stages": ["prompt_lookup", "early_exit"]},
        {"reference": "text"},
        {"reference": [0, 99]},
        {"reference": []},
    ],
)
def test_allowed(options: dict[str, Any]) -> None:
    check_options(options, limits(CASCADE))


@pytest.mark.parametrize("name", ["enabled", "max_draft", "max_context", "stages", "reference"])
@pytest.mark.parametrize("value", RUBBISH, ids=lambda value: repr(value)[:12])
def test_refused(name: str, value: Any) -> None:
    """Kills: a check that lets a wrong type through; a message without option, value or what is allowed."""
    if (name == "max_context" and value == 65) or (name == "reference" and value in ("5", [5])):
        return
    with pytest.raises(ConfigError, match=rf"^specplugins: {name} must be .*, not .*\.$"):
        check_options({name: value}, limits(CASCADE))


@pytest.mark.parametrize("reference", [[100], [-1], [1.0], [True], [1, True], [[1]], [10**30]])
def test_bad_reference(reference: Any) -> None:
    with pytest.raises(ConfigError, match="token ids from 0 to 99"):
        check_options({"reference": reference}, limits(LOOKUP))


@pytest.mark.parametrize("stages", [[], ["cascade"], ["early_exit"], [5]])
def test_bad_stages(stages: Any) -> None:
    """Only stages that there are; a method alone is its own only stage."""
    with pytest.raises(ConfigError, match="stages must be a list of one or more of 'prompt_lookup', not"):
        check_options({"stages": stages}, limits(LOOKUP))


def test_unknown() -> None:
    """Unless a proposer of the user's own may want it."""
    with pytest.raises(ConfigError, match="'k' is not an option; the options are enabled, "):
        check_options({"k": 1}, limits(CASCADE))
    check_options({"k": object()}, limits(CUSTOM))


@pytest.mark.parametrize("raw", ["{", "7", "[]", 7, [1], None, "[" * 80_000, '{"a":' * 10_000, "1" * 5000, [1] * 10**6])
def test_unreadable(raw: Any) -> None:
    """Kills: a nesting that ends in a RecursionError; a message as long as what it is about."""
    with pytest.raises(ConfigError, match=r"^specplugins must be a dictionary or its JSON text, not ") as error:
        read_options(raw, max_model_len=1000)
    assert len(str(error.value)) < 130


def test_text() -> None:
    assert read_options('{"max_draft": 2}', max_model_len=1000) == {"max_draft": 2}


def test_long_text_is_not_parsed() -> None:
    """Kills: a bound that lets a longer text through to the parser, or refuses one of the length that is allowed."""
    longest = (1 << 16) + 24 * 1000
    assert read_options("{}".ljust(longest), max_model_len=1000) == {}
    with pytest.raises(ConfigError) as error:
        read_options("{}".ljust(longest + 1), max_model_len=1000)
    assert str(error.value) == (
        "specplugins must be at most 89536 characters of JSON text where max_model_len is 1000, not 89537."
    )


@pytest.mark.parametrize(
    "reference, message",
    [
        ("abc \ud800 def", r"reference must be valid UTF-8, not 'abc \\ud800 def'\."),
        ("x" * 81, r"reference must be at most 80 bytes of text where max_model_len is 10, not 81\."),
        ("\u20ac" * 27, r"reference must be at most 80 bytes of text where max_model_len is 10, not 81\."),
        ([1] * 11, r"reference must be at most 10 tokens \(max_model_len\), not 11\."),
        ([object()] * 10**6, r"reference must be at most 10 tokens \(max_model_len\), not 1000000\."),
    ],
)
def test_bounds_of_a_reference(reference: Any, message: str) -> None:
    """Kills: characters for bytes, a limit that is off by one, and ids that are looked at before they are counted."""
    with pytest.raises(ConfigError, match=f"^specplugins: {message}$"):
        check_options({"reference": reference}, limits(CASCADE, max_model_len=10))


def test_tokens_of_a_text() -> None:
    """Kills: tokens of a text that are neither counted nor held against the vocabulary."""
    for token_ids, message in (([1] * 11, "at most 10 tokens"), ([100], "from 0 to 99")):
        with pytest.raises(ConfigError, match=message):
            resolved({"reference": "text"}, token_ids, limits(LOOKUP, max_model_len=10))


def test_what_travels() -> None:
    """A reference is bytes and its digest, whoever tokenised it. Kills: a digest that a client writes itself."""
    options = {"max_draft": 2, "reference": [1, 2, 99], "reference_digest": "mine"}
    found = resolved(options, None, limits(CUSTOM))
    assert found == resolved({"max_draft": 2, "reference": "text"}, [1, 2, 99], limits(CUSTOM))
    assert found["reference_digest"] != resolved({}, [1, 2, 98], limits(CUSTOM))["reference_digest"]
    arrived = received(found)
    assert arrived["reference"].tolist() == [1, 2, 99] and arrived["max_draft"] == 2
    assert not arrived["reference"].flags.writeable
    assert resolved({"reference": [], "reference_digest": "mine"}, None, limits(CUSTOM)) == {}


@pytest.mark.parametrize(
    "value",
    [
        "x" * 20_000,
        [0] * 20_000,
        [["x" * 100] * 20] * 20,
        [[[[[[[[1]]]]]]]],
        {"a\ud800": 1},
        ["\ud800"],
        2**63,
        -(2**64),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_options_of_a_custom_proposer_are_small(value: Any) -> None:
    """Kills: an unbounded walk, a depth that is not counted, and what cannot travel to the engine."""
    with pytest.raises(ConfigError, match=r"proposer's own must be at most 16384 values and characters"):
        check_options({"k": value}, limits(CUSTOM))
    check_options({"k": [[[[[["x" * 16_000]]]]]], "l": 2**63 - 1}, limits(CUSTOM))


def test_limit() -> None:
    """Kills: a limit that is off by one at the end of the context or of `max_context`."""
    assert [draft_limit({}, n, 4, 100) for n in (94, 95, 96, 98, 99, 100)] == [4, 4, 3, 1, 0, 0]
    assert [draft_limit({"max_context": 10}, n, 4, 100) for n in (9, 10, 11)] == [4, 4, 0]
    assert draft_limit({"enabled": False}, 1, 4, 100) == 0
    assert draft_limit({"max_draft": 9}, 1, 4, 100) == 4
