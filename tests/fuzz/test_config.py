"""Configurations: any dictionary is parsed correctly or refused with one sentence."""

from dataclasses import fields
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from rubbish import JSON, check_sentence, dictionary

from vllm_specplugins.config import CommonConfig, ConfigError, SpecConfig
from vllm_specplugins.config.built_in import BUILT_IN_SETTINGS, BuiltInConfig
from vllm_specplugins.methods import BUILT_IN, METHODS
from vllm_specplugins.parsing import parse_config

COMMON: dict[str, st.SearchStrategy[Any]] = {
    "num_speculative_tokens": st.integers(1, 64),
    "time_budget_ms": st.integers(1, 60_000),
}
CLASSES = ["json:loads", "json:nothing", "nope.x:Y", "os:sep", "a:", ":b", "json", "json:loads:x"]
OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "prompt_lookup": {"max_ngram": st.integers(1, 16), "min_ngram": st.integers(1, 16)},
    "early_exit": {
        "exit_layer": st.integers(1, 10_000),
        "draft_sample_method": st.sampled_from(["greedy", "probabilistic"]),
        "exit_head": st.none() | st.just("folder"),
    },
    "jump": {"head": st.just("folder"), "draft_sample_method": st.sampled_from(["greedy", "coupled"])},
    "custom": {"proposer": st.sampled_from(CLASSES), "options": st.dictionaries(st.text(), JSON, max_size=2)},
}
BUILT_IN_OWN = {"model": st.none() | st.just("m"), **{key: JSON for key in BUILT_IN_SETTINGS}}


def named(method: str, own: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return own.map(lambda found: {**found, "method": method})


STAGES = st.one_of(
    *(named(method, dictionary(own)) for method, own in OWN.items()),
    *(named(method, dictionary(BUILT_IN_OWN)) for method in BUILT_IN),
)
CASCADE = {
    "stages": st.lists(STAGES, max_size=4) | st.lists(STAGES | JSON, max_size=4),
    "policy": st.sampled_from(["auto", "verify"]),
    "gate": st.sampled_from(["auto", "off"]),
}
CONFIGS = st.one_of(
    *(named(method, dictionary(own | COMMON)) for method, own in OWN.items()),
    named("cascade", dictionary(CASCADE | COMMON)),
    named("cascade", dictionary(CASCADE | COMMON)),
    st.builds(
        lambda method, found: found | {"method": method},
        st.sampled_from(sorted(METHODS)),
        st.dictionaries(st.text(), JSON),
    ),
)


def written(config: SpecConfig) -> dict[str, Any]:
    """Returns the dictionary of a configuration."""
    common = {entry.name: getattr(config.common, entry.name) for entry in fields(CommonConfig)}
    return {**_own(config.method, config.method_config), **common}


def _own(method: str, own: Any) -> dict[str, Any]:
    if isinstance(own, BuiltInConfig):
        return {"method": method, "model": own.model, **own.settings}
    values = {entry.name: getattr(own, entry.name) for entry in fields(own)}
    if "stages" in values:
        values["stages"] = [
            _own(stage.method, stage.method_config)
            | ({"num_speculative_tokens": length} if (length := stage.num_speculative_tokens) else {})
            for stage in own.stages
        ]
    return {"method": method, **values}


@given(CONFIGS)
@example({"method": "prompt_lookup", "max_ngram": 10**4299})
@example({"method": "custom", "proposer": "a" * 5000 + ":b"})
@example({"method": "custom", "proposer": "json:" + "b" * 5000})
@example({"method": "cascade", "stages": [{"method": ["prompt_lookup"]}] * 2})
def test_parses_or_is_refused(raw: dict[str, Any]) -> None:
    """Kills: a field whose check lets a wrong type through to a TypeError; a message that quotes all of a value; a
    field that is parsed and dropped."""
    try:
        config = parse_config(raw)
    except ConfigError as error:
        check_sentence(error)
        return
    again = written(config)
    assert parse_config(again) == config
    for key, value in raw.items():
        if key != "stages":
            assert repr(again[key]) == repr(value), "what was asked for"
    assert 1 <= config.common.num_speculative_tokens <= 64
