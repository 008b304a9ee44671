"""Per-request options: what passes, and that everything else is refused with one sentence."""

import doctest
from typing import Any

import pytest

from vllm_specplugins import request_options
from vllm_specplugins.config import ConfigError
from vllm_specplugins.methods import parse_config
from vllm_specplugins.request_options import check_options, draft_limit, read_options

LOOKUP = {"method": "prompt_lookup"}
CASCADE = {"method": "cascade", "stages": [LOOKUP, {"method": "early_exit"}]}
RUBBISH: list[Any] = [None, -1, 65, 2.0, "5", b"5", [5], {}, {"a": 1}, 10**30, float("nan"), object()]


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
    check_options(options, parse_config(CASCADE), vocab_size=100)


@pytest.mark.parametrize("name", ["enabled", "max_draft", "max_context", "stages", "reference"])
@pytest.mark.parametrize("value", RUBBISH, ids=lambda value: repr(value)[:12])
def test_refused(name: str, value: Any) -> None:
    """Kills: a check that lets a wrong type through; a message without option, value or what is allowed."""
    if (name == "max_context" and value == 65) or (name == "reference" and value in ("5", [5])):
        return
    with pytest.raises(ConfigError, match=rf"^specplugins: {name} must be .*, not .*\.$"):
        check_options({name: value}, parse_config(CASCADE), vocab_size=100)


@pytest.mark.parametrize("reference", [[100], [-1], [1.0], [True], [[1]]])
def test_bad_reference(reference: Any) -> None:
    with pytest.raises(ConfigError, match="token ids from 0 to 99"):
        check_options({"reference": reference}, parse_config(LOOKUP), vocab_size=100)


@pytest.mark.parametrize("stages", [[], ["cascade"], ["early_exit"], [5]])
def test_bad_stages(stages: Any) -> None:
    """Only stages that there are; a method alone is its own only stage."""
    with pytest.raises(ConfigError, match="stages must be a list of one or more of 'prompt_lookup', not"):
        check_options({"stages": stages}, parse_config(LOOKUP), vocab_size=100)


def test_unknown() -> None:
    """Unless a proposer of the user's own may want it."""
    with pytest.raises(ConfigError, match="'k' is not an option; the options are enabled, "):
        check_options({"k": 1}, parse_config(CASCADE), vocab_size=100)
    custom = parse_config({"method": "custom", "proposer": "json:loads"})
    check_options({"k": object()}, custom, vocab_size=100)


@pytest.mark.parametrize("raw", ["{", "7", "[]", 7, [1], None])
def test_unreadable(raw: Any) -> None:
    with pytest.raises(ConfigError, match=r"^specplugins must be a dictionary or its JSON text, not "):
        read_options(raw)


def test_text() -> None:
    assert read_options('{"max_draft": 2}') == {"max_draft": 2}


def test_limit() -> None:
    """Kills: a limit that is off by one at the end of the context or of `max_context`."""
    assert [draft_limit({}, n, 4, 100) for n in (94, 95, 96, 98, 99, 100)] == [4, 4, 3, 1, 0, 0]
    assert [draft_limit({"max_context": 10}, n, 4, 100) for n in (9, 10, 11)] == [4, 4, 0]
    assert draft_limit({"enabled": False}, 1, 4, 100) == 0
    assert draft_limit({"max_draft": 9}, 1, 4, 100) == 4
