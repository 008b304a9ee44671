"""Unexpected values for the fuzz tests."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from vllm_specplugins.config import ConfigError

ODD_TEXTS = ["", " ", "\ud800", "a\x00b", "\n", "é", "x" * 5000, "NaN", "null", "0", "../..", "{}", "[", "5"]
ODD_NUMBERS = [0, 1, -1, 2, 5, 16, 17, 64, 65, 1000, 60_000, 2**31 - 1, 2**31, 10**30, -(10**30), 10**4299]

TEXTS = st.text(max_size=20) | st.sampled_from(ODD_TEXTS)
NUMBERS = st.sampled_from(ODD_NUMBERS) | st.integers() | st.floats(allow_nan=True)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)


def dictionary(values: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of these keys with values that mostly fit, and now and then rubbish of either."""
    fitting = st.fixed_dictionaries({}, optional=dict(values))
    keys = st.sampled_from(sorted(values)) | TEXTS
    spoilt = st.tuples(fitting, st.dictionaries(keys, JSON, min_size=1, max_size=2)).map(lambda two: two[0] | two[1])
    return fitting | spoilt


def check_sentence(error: ConfigError) -> None:
    """One sentence for the user: no essay, no new line, and it can be printed and sent."""
    words = str(error)
    assert words.endswith((".", "?")) and "\n" not in words and len(words) <= 300, words
    words.encode()
