"""Options of requests: any text or dictionary is refused with one sentence, or bounds what the request gets."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from rubbish import JSON, TEXTS, check_sentence, dictionary

from vllm_specplugins.config import ConfigError, SpecConfig
from vllm_specplugins.methods import parse_config
from vllm_specplugins.request_options import check_options, draft_limit, read_options

VOCAB_SIZE = 100
LOOKUP = {"method": "prompt_lookup"}
CONFIGS = [
    parse_config(LOOKUP),
    parse_config({"method": "early_exit"}),
    parse_config({"method": "cascade", "stages": [LOOKUP, {"method": "early_exit"}]}),
    parse_config({"method": "custom", "proposer": "json:loads"}),
]
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


@given(raw_options(), st.sampled_from(CONFIGS), st.integers(1, 5000))
@example("[" * 200_000, CONFIGS[0], 10)
@example('{"a":' * 200_000, CONFIGS[3], 10)
@example('{"max_draft": ' + "9" * 10_000 + "}", CONFIGS[0], 10)
@example('{"reference": "\\ud800"}', CONFIGS[0], 10)
@example({"reference": [10**4299]}, CONFIGS[0], 10)
def test_bounded_or_refused(raw: Any, config: SpecConfig, num_tokens: int) -> None:
    """Kills: an option of a wrong type that passes, another exception than the front end expects, an essay."""
    try:
        options = read_options(raw)
        check_options(options, config, VOCAB_SIZE)
    except ConfigError as error:
        check_sentence(error)
        return
    limit = draft_limit(options, num_tokens, 5, 4096)
    assert isinstance(limit, int) and 0 <= limit <= max(0, min(5, 4096 - num_tokens - 1))
    if options.get("enabled") is False:
        assert limit == 0
    reference = options.get("reference", "")
    if isinstance(reference, str):
        reference.encode()
    else:
        assert all(0 <= token < VOCAB_SIZE for token in reference)
