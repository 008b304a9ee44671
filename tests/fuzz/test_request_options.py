"""Options of requests: any text or dictionary is refused with one sentence, or bounds what the request gets."""

import json
from typing import Any

import msgspec
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from rubbish import JSON, TEXTS, check_sentence, dictionary

from vllm_specplugins.config import ConfigError, methods_of
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.request_options import Limits, draft_limit, read_options, received, resolved, understood

VOCAB_SIZE, MAX_MODEL_LEN = 100, 50
LOOKUP = {"method": "prompt_lookup"}
METHODS = [
    LOOKUP,
    {"method": "early_exit"},
    {"method": "cascade", "stages": [LOOKUP, {"method": "early_exit"}]},
    {"method": "custom", "proposer": "json:loads"},
]
LIMITS = [Limits(parse_config(method), VOCAB_SIZE, MAX_MODEL_LEN) for method in METHODS]
OPTIONS = dictionary(
    {
        "enabled": st.booleans(),
        "max_draft": st.integers(0, 64),
        "max_context": st.integers(0, 2**31 - 1),
        "stages": st.lists(st.sampled_from(["prompt_lookup", "early_exit"]), min_size=1, max_size=3),
        "reference": TEXTS | st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8),
    }
)


@st.composite
def raw_options(draw: st.DrawFn) -> Any:
    """A dictionary, its JSON text, or that text spoilt."""
    options = draw(OPTIONS | JSON)
    kind = draw(st.sampled_from(["as it is", "text", "spoilt"]))
    if kind == "as it is":
        return options
    text = json.dumps(options)
    if kind == "spoilt":
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(TEXTS) + text[start + draw(st.integers(0, 3)) :]
    return text


def ids_of(reference: Any) -> list[int]:
    return np.frombuffer(reference or b"", np.int32).tolist()


@given(raw_options(), st.sampled_from(LIMITS), st.integers(1, MAX_MODEL_LEN))
@example("[" * 200_000, LIMITS[0], 10)
@example('{"a":' * 200_000, LIMITS[3], 10)
@example('{"max_draft": ' + "9" * 10_000 + "}", LIMITS[0], 10)
@example('{"reference": "\\ud800"}', LIMITS[0], 10)
@example({"reference": [10**4299]}, LIMITS[0], 10)
@example({"reference": [1.0] * 10**6}, LIMITS[2], 10)
@example({"stages": ["prompt_lookup"] * 100 + ["\ud800"]}, LIMITS[2], 10)
@example('{"stages":[' + '"prompt_lookup",' * 100 + "[" * 500 + "]" * 501 + "}", LIMITS[2], 10)
def test_bounded_or_refused(raw: Any, limits: Limits, num_tokens: int) -> None:
    """Kills: an option of a wrong type that passes, another exception than the front end expects, an essay, a
    reference that is longer than a request may be."""
    try:
        options = understood(read_options(raw, MAX_MODEL_LEN), limits)
        reference = options.get("reference")
        sent = resolved(options, limits, [len(reference) % VOCAB_SIZE] * 3 if isinstance(reference, str) else None)
    except ConfigError as error:
        check_sentence(error)
        return
    found = received(sent)
    assert {**found, "reference": None} == {**options, "reference": None}
    assert set(options.get("stages", ())) <= set(methods_of(limits.config))
    limit = draft_limit(found, num_tokens, 5, MAX_MODEL_LEN)
    assert isinstance(limit, int) and 0 <= limit <= max(0, min(5, MAX_MODEL_LEN - num_tokens - 1))
    if options.get("enabled") is False:
        assert limit == 0
    if isinstance(reference, str):
        reference.encode()
    ids = found.get("reference", np.empty(0, np.int32))
    assert ids.dtype == np.int32 and len(ids) <= MAX_MODEL_LEN
    assert ((ids >= 0) & (ids < VOCAB_SIZE)).all() and (isinstance(reference, str) or list(ids) == ids_of(reference))
    msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
