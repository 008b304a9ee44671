"""Per-request options: what passes, and that everything else is refused with one sentence."""

import contextlib
import json
import time
import tracemalloc
from typing import Any

import pytest

from vllm_specplugins.config import ConfigError
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.request_options import Limits, draft_limit, read_options, received, resolved, understood

LOOKUP = {"method": "prompt_lookup"}
EXIT = {"method": "early_exit"}
CASCADE = {"method": "cascade", "stages": [LOOKUP, EXIT]}
CUSTOM = {"method": "custom", "proposer": "json:loads"}
RUBBISH: list[Any] = [None, -1, 65, 2.0, "5", b"5", [5], {}, {"a": 1}, 10**30, float("nan"), object()]


def limits(config: dict[str, Any], max_model_len: int = 1000) -> Limits:
    return Limits(parse_config(config), 100, max_model_len)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enabled": False},
        {"max_draft": 0},
        {"max_draft": 64},
        {"max_context": 32768},
        {"stages": ["early_exit"]},
        {"stages": ["early_exit", "prompt_lookup"]},
        {"reference": "text"},
    ],
)
def test_allowed(options: dict[str, Any]) -> None:
    assert understood(options, limits(CASCADE)) == {**options}


@pytest.mark.parametrize("name", ["enabled", "max_draft", "max_context", "stages", "reference"])
@pytest.mark.parametrize("value", RUBBISH, ids=lambda value: repr(value)[:12])
def test_refused(name: str, value: Any) -> None:
    """Kills: a check that lets a wrong type through; a message without option, value or what is allowed."""
    if (name == "max_context" and value == 65) or (name == "reference" and value in ("5", [5])):
        return
    with pytest.raises(ConfigError, match=rf"^specplugins: {name} must be .*, not .*\.$"):
        understood({name: value}, limits(CASCADE))


@pytest.mark.parametrize("stages", [[], ["cascade"], ["early_exit"], [5]])
def test_bad_stages(stages: Any) -> None:
    """Only existing stages are allowed; a single method is its only stage."""
    with pytest.raises(ConfigError, match="stages must be up to 1 of 'prompt_lookup', not"):
        understood({"stages": stages}, limits(LOOKUP))


DEEP = [[]]  # type: ignore[var-annotated]
for _ in range(500):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "stages",
    [
        ["prompt_lookup"] * 3,
        ["prompt_lookup"] * 100 + DEEP,
        ["prompt_lookup", DEEP],
        ["2 early_exit"],
        ["\ud800"],
        [10**40],
    ],
    ids=lambda stages: repr(stages)[:20],
)
def test_stages_are_checked_whole(stages: Any) -> None:
    """Kills: names that are checked up to some place, and travel behind it; more of them than there are stages."""
    with pytest.raises(ConfigError, match="stages must be up to 2 of 'prompt_lookup', 'early_exit', not"):
        understood({"stages": stages}, limits(CASCADE))


def test_names_of_stages() -> None:
    """By method, or as metrics have them. Kills: a number that names another stage, or all of its method."""
    twice = {**CASCADE, "policy": "verify", "stages": [LOOKUP, EXIT, {**EXIT, "exit_layer": 2}]}
    for config, asked, names in (
        (LOOKUP, ["0 prompt_lookup"], ["prompt_lookup"]),
        (CASCADE, ["1 early_exit"], ["early_exit"]),
        (CASCADE, ["early_exit", "1 early_exit"], ["early_exit"]),
        (twice, ["0 prompt_lookup", "2 early_exit"], ["2 early_exit", "prompt_lookup"]),
        (twice, ["early_exit"], ["1 early_exit", "2 early_exit"]),
    ):
        assert understood({"stages": asked}, limits(config)) == {"stages": names}


def test_unknown() -> None:
    """An unknown option is refused, unless a custom proposer may read it."""
    with pytest.raises(ConfigError, match="'k' is not an option; the options are enabled, "):
        understood({"k": 1}, limits(CASCADE))
    assert understood({"k": (1, {"a": 2.0})}, limits(CUSTOM)) == {"k": [1, {"a": 2.0}]}


@pytest.mark.parametrize("raw", ["{", "7", "[]", 7, [1], None, "[" * 4_000, '{"a":' * 2_000, "1" * 5000, [1] * 10**6])
def test_unreadable(raw: Any) -> None:
    """Kills: a nesting that ends in a RecursionError; a message as long as what it is about."""
    with pytest.raises(ConfigError, match=r"^specplugins must be a dictionary or its JSON text, not ") as error:
        read_options(raw, max_model_len=1000)
    assert len(str(error.value)) < 130


def test_text() -> None:
    assert read_options('{"max_draft": 2}', max_model_len=1000) == {"max_draft": 2}


@pytest.mark.parametrize(
    "text, options",
    [
        ('{"reference": "%s", "max_draft": 2}' % ("[" * 89_000), {"reference": "[" * 89_000, "max_draft": 2}),
        ('{"reference": "%s"}' % ("\\u4f60\\ud83d\\ude00\\n" * 50), {"reference": "\u4f60\U0001f600\n" * 50}),
        ('{"a": 1, "reference" :  [1, 2 ,3]}', {"a": 1, "reference": [1, 2, 3]}),
        ('{"a": {"reference": [1, {"b": "x"}]}}', {"a": {"reference": [1, {"b": "x"}]}}),
        ('{"a": {"reference": [1]}}', {"a": {"reference": [1]}}),
        ('{"a": {"reference": 1}, "reference": "x"}', {"a": {"reference": 1}, "reference": "x"}),
        ('{"a": "\\"reference\\": 1"}', {"a": '"reference": 1'}),
        ('{"reference": null}', {"reference": None}),
        ('{"reference": "a", "reference": "b"}', {"reference": "b"}),
        ('{"\\u0072eference": "a"}', {"reference": "a"}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_reference_is_read_by_itself(text: str, options: Any) -> None:
    """Kills: a reference that gets lost, is read where it is another's, or counts towards the bound of the rest."""
    found = dict(read_options(text, max_model_len=1000))
    assert found == options == json.loads(text)


@pytest.mark.parametrize("string", ['"\\x"', '"\\u12g4"', '"\n"', '"a', '"\\"', '"\\u123"'])
def test_a_text_that_is_no_json(string: str) -> None:
    """Kills: a string that is decoded where it is tokenised, and not refused where it is read."""
    with pytest.raises(ConfigError, match="must be a dictionary or its JSON text"):
        read_options(f'{{"reference": {string}}}', max_model_len=100)


@pytest.mark.parametrize(
    "piece",
    ["[],", "{},", '"ab",', "1.5,", "9" * 4299 + ",", '"\\\\",', "7,", '"a":1,', '{"reference":[],', '"reference":"'],
    ids=lambda piece: piece[:12],
)
@pytest.mark.parametrize(
    "around", ["[%s1]", '{"k":[%s1]}', '{"reference":[%s1]}', '{"reference":"a","k":[%s1]}', '{"k":"%s']
)
def test_what_reading_costs(around: str, piece: str) -> None:
    """Kills: lists of lists, which take 25 times the bytes of their text; reading whose time grows with the square."""
    text = around % (piece * (160_000 // len(piece)))
    tracemalloc.start()
    began = time.process_time()
    with contextlib.suppress(ConfigError):
        understood(read_options(text, max_model_len=4096), limits(CUSTOM, max_model_len=4096))
    assert time.process_time() - began < 5, "a hundred times what is promised"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_long_text_is_not_parsed() -> None:
    """Kills: a bound that lets a longer text or number through to the parser, or refuses one of the length that is
    allowed."""
    longest, around = (1 << 16) + 24 * 1000, len('{"reference": ""}')
    assert len(read_options(json.dumps({"reference": "x" * (longest - around)}), max_model_len=1000)) == 1
    with pytest.raises(
        ConfigError, match="the JSON text without the reference must be at most 65536 bytes and 4096 brackets"
    ):
        read_options("{}".ljust(longest), max_model_len=1000)
    with pytest.raises(ConfigError, match="must be a dictionary"):
        read_options('{"a": %s}' % ("9" * 5000), max_model_len=1000)  # costs grow with the square
    with pytest.raises(ConfigError) as error:
        read_options("{}".ljust(longest + 1), max_model_len=1000)
    assert str(error.value) == (
        "specplugins must be at most 89536 characters of JSON text for max_model_len 1000, not 89537."
    )


@pytest.mark.parametrize(
    "reference, message",
    [
        ("abc \ud800 def", r"reference must be valid UTF-8, not 'abc \\ud800 def'\."),
        ("x" * 81, r"reference must be at most 80 bytes of text where max_model_len is 10, not 81\."),
        ("\u20ac" * 27, r"reference must be at most 80 bytes of text where max_model_len is 10, not 81\."),
        ([1] * 11, r"reference must be at most 10 tokens \(max_model_len\), not 11\."),
        ([object()] * 10**6, r"reference must be at most 10 tokens \(max_model_len\), not 1000000\."),
        *(
            (ids, r"reference must be a text or a list of token ids from 0 to 99, not \[.*\]\.")
            for ids in ([100], [-1], [1.0], [True], [1, True], [[1]], [10**30])
        ),
    ],
)
def test_bounds_of_a_reference(reference: Any, message: str) -> None:
    """Kills: characters for bytes, a limit that is off by one, and ids that are looked at before they are counted."""
    with pytest.raises(ConfigError, match=f"^specplugins: {message}$"):
        understood({"reference": reference}, limits(CASCADE, max_model_len=10))


def test_tokens_of_a_text() -> None:
    """Kills: tokens of a text that are neither counted nor held against the vocabulary."""
    for token_ids, message in (([1] * 11, "at most 10 tokens"), ([100], "from 0 to 99")):
        with pytest.raises(ConfigError, match=message):
            resolved({"reference": "text"}, limits(LOOKUP, max_model_len=10), token_ids)


def test_what_travels() -> None:
    """A reference is bytes, whoever tokenised it."""
    own = limits(CUSTOM)
    found = resolved(understood({"max_draft": 2, "reference": [1, 2, 99]}, own), own)
    assert found == resolved({"max_draft": 2, "reference": "text"}, own, [1, 2, 99])
    arrived = received(found)
    assert arrived["reference"].tolist() == [1, 2, 99] and arrived["max_draft"] == 2
    assert not arrived["reference"].flags.writeable
    assert resolved(understood({"reference": []}, own), own) == {}


@pytest.mark.parametrize(
    "value",
    [
        "x" * 20_000,
        [0] * 20_000,
        [["x" * 100] * 20] * 20,
        [[[[[[[[1]]]]]]]],
        {"a\ud800": 1},
        ["\ud800"],
        2**64,
        -(2**64),
        object(),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_options_of_a_custom_proposer_are_small(value: Any) -> None:
    """Kills: an unbounded walk, a depth that is not counted, and what cannot travel to the engine."""
    with pytest.raises(ConfigError, match=r"options of a custom proposer must be at most 16384 bytes"):
        understood({"k": value}, limits(CUSTOM))
    understood({"k": [[[[[["x" * 16_000]]]]]], "l": 2**63 - 1}, limits(CUSTOM))


def test_limit() -> None:
    """Kills: a limit that is off by one at the end of the context or of `max_context`."""
    assert [draft_limit({}, n, 4, 100) for n in (94, 95, 96, 98, 99, 100)] == [4, 4, 3, 1, 0, 0]
    assert [draft_limit({"max_context": 10}, n, 4, 100) for n in (9, 10, 11)] == [4, 4, 0]
    assert draft_limit({"enabled": False}, 1, 4, 100) == 0
    assert draft_limit({"max_draft": 9}, 1, 4, 100) == 4
