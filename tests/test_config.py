"""Configurations: what is accepted, and that everything else is refused with one clear sentence."""

import importlib
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_specplugins import parsing
from vllm_specplugins.config import ConfigError
from vllm_specplugins.config.built_in import built_in_stage
from vllm_specplugins.methods import BUILT_IN, METHODS
from vllm_specplugins.parsing import parse_config

RUBBISH: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    65,
    10**30,
    -(10**30),
    2.0,
    0.5,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "5",
    "five",
    b"5",
    [],
    [5],
    (5,),
    {},
    {"a": {"b": [1, {}]}},
    {5},
    object(),
    "x" * 10_000,
]
LOOKUP, EXIT = {"method": "prompt_lookup"}, {"method": "early_exit"}
FIELDS = ["num_speculative_tokens", "time_budget_ms", "max_ngram", "min_ngram"]


def malformed() -> list[dict[str, Any]]:
    """More than 200 dictionaries that must be refused; each has one thing wrong, some of them several."""
    wrong = [
        {"method": "prompt_lookup", field: value}
        for field in FIELDS
        for value in RUBBISH
        if not (field == "time_budget_ms" and value == 65 and value is not True)
    ]
    wrong += [{"method": "prompt_lookup", key: 5} for key in ("", "max-n", "MAX_NGRAM", "model", "stages", "é", "a b")]
    wrong += [{"method": "prompt_lookup", key: 5} for key in (5, None, (1, 2), 2.5, True)]  # type: ignore[dict-item]
    wrong += [{"method": "prompt_lookup", "min_ngram": low, "max_ngram": low - 1} for low in range(2, 17)]
    wrong += [{"method": "custom", "proposer": value} for value in RUBBISH]
    wrong += [{"method": "custom", "proposer": path} for path in ("a", "a:", ":b", "a.b", "a:b:c", "a b:c", "1:2")]
    wrong += [{"method": "custom", "proposer": "json:nothing_there"}, {"method": "custom", "proposer": "nope.x:Y"}]
    wrong += [{"method": "custom", "options": {}}]
    wrong += [
        {"method": "early_exit", field: value}
        for field, allowed in (("exit_layer", 65), ("draft_sample_method", "greedy"), ("exit_head", None))
        for value in RUBBISH
        if value is not allowed and not (field == "exit_head" and isinstance(value, str) and value)
        and not (field == "exit_layer" and value == 65)
    ]  # fmt: skip
    listed = (
        *(value for value in RUBBISH if value not in (None, [5], (5,))),
        [1, 0],
        [2, 2],
        [-1],
        [0, 10_000],
        [True],
    )
    wrong += [{"method": "early_exit", "layers": value} for value in listed]
    wrong += [{"method": "early_exit", "layers": [1, 3], **more} for more in ({"exit_layer": 3}, {"look_ahead": "x"})]
    stages = [LOOKUP, EXIT]
    wrong += [{"method": "cascade", "stages": value} for value in RUBBISH]
    wrong += [{"method": "cascade", "stages": [stages[0], value]} for value in [*RUBBISH, {"method": "cascade"}]]
    wrong += [{"method": "cascade", "stages": [{"method": value}, stages[1]]} for value in RUBBISH]
    wrong += [
        {"method": "cascade", "stages": stages, field: value} for field in ("policy", "gate") for value in RUBBISH
    ]
    wrong += [
        {"method": "cascade"},
        {"method": "cascade", "policy": "verify", "stages": stages[::-1]},  # it cannot check with a lookup
        {"method": "cascade", "stages": [{**stages[0], "time_budget_ms": 3}, stages[1]]},
        {"method": "cascade", "stages": [{**stages[0], "max_ngram": 99}, stages[1]]},
    ]
    wrong += [
        {"method": "cascade", "stages": [{**stages[0], "num_speculative_tokens": value}, stages[1]]}
        for value in [*RUBBISH, 32]  # more than the cascade's 31
        if value is not None
    ]
    draft_model = {"method": "draft_model", "model": "m"}
    wrong += [
        {"method": "cascade", "stages": [stages[0], {"method": method, "model": value}]}
        for method in BUILT_IN
        for value in RUBBISH
        if not (isinstance(value, str) and value) and not (value is None and method == "mtp")
    ]
    wrong += [
        {"method": "cascade", "stages": [stages[0], {**draft_model, key: 5}]}
        for key in ("exit_layer", "draft_sample_method", "x" * 100, 5, None)  # type: ignore[dict-item]
    ]
    wrong += [
        {"method": "cascade", "policy": "verify", "stages": [stages[0], draft_model]},  # `verify` cannot check with it
        {"method": "cascade", "stages": [draft_model, {"method": "mtp"}]},
        {"method": "cascade", "stages": [draft_model, {**stages[1], "draft_sample_method": "probabilistic"}]},
    ]
    options: list[Any] = [value for value in RUBBISH if value != {} and not isinstance(value, dict)]
    wrong += [{"method": "custom", "proposer": "json:loads", "options": value} for value in [*options, {5: 6}]]
    rng = random.Random(0)
    for _ in range(40):
        keys = rng.sample([*FIELDS, "unknown", "nested"], 3)
        config = {"method": "prompt_lookup", **{key: rng.choice(RUBBISH[2:]) for key in keys}}
        wrong.append(config)
    return wrong


MALFORMED = malformed()
assert len(MALFORMED) >= 200


@pytest.mark.parametrize("config", MALFORMED, ids=lambda config: repr(config)[:60])
def test_refused_with_a_sentence(config: dict[str, Any]) -> None:
    """Kills: any other exception, an essay, or a message that names neither field nor what is allowed."""
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    sentence = str(caught.value)
    assert sentence.endswith((".", "?")) and "\n" not in sentence and len(sentence) < 300
    assert sentence.startswith(("prompt_lookup: ", "early_exit: ", "cascade: ", "custom: ", "speculative_config: "))
    assert any(str(key) in sentence or repr(key)[:50] in sentence for key in config if key != "method") or (
        re.search("(proposer|stages) is missing|max_ngram", sentence)
    )
    says = r"must be|must run|: remove |: set |: keep only one |supports only|fields are|cannot be imported"
    assert re.search(f"{says}|is missing", sentence)


RENAMED = [
    ({"method": "prompt_lookup", "prompt_lookup_max": 5, "prompt_lookup_min": 2}, {"max_ngram": 5, "min_ngram": 2}),
    ({"method": "prompt_lookup", "prompt_lookup_max": 5, "rejection_sample_method": "standard"}, {"max_ngram": 5}),
    ({"method": "suffix_lookup", "suffix_decoding_max_tree_depth": 24}, {"num_speculative_tokens": 24}),
    ({"method": "custom", "model": "json.decoder.JSONDecoder"}, {"proposer": "json.decoder:JSONDecoder"}),
]


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize(("theirs", "ours"), RENAMED)
def test_names_of_vllm(theirs: dict[str, Any], ours: Any, stage: bool, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's names give the same configuration, and one line reports the translation. Kills: a name that is dropped, or
    read in a method but not in a stage; a line for each name; a line where there is nothing to say.
    """

    def parsed(fields: dict[str, Any]) -> Any:
        stages = [{"method": "early_exit", "exit_layer": 1}, fields]
        cascade = {"method": "cascade", "num_speculative_tokens": 31, "stages": stages}
        return parse_config(cascade if stage else fields)

    with caplog.at_level("INFO", "vllm.specplugins"):
        expected = parsed({"method": theirs["method"], **ours})
        assert not caplog.records
        assert parsed(theirs) == expected
    [line] = caplog.messages
    names = theirs.keys() - {"method"}
    assert line.startswith(f"{theirs['method']}: vLLM's names are accepted (") and all(
        f"{name} " in line for name in names
    )


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"method": "prompt_lookup", "max_ngram": 4, "prompt_lookup_max": 5},
            "prompt_lookup: remove prompt_lookup_max: it is vLLM's name for max_ngram, which is also set.",
        ),
        (
            {"method": "early_exit", "exit_layer": 1, "rejection_sample_method": "block"},
            "early_exit: rejection_sample_method must be 'standard', not 'block'. Block verification does not help "
            "lookups; for drafts of a model, set draft_sample_method to 'coupled' instead.",
        ),
        ({"method": "prompt_lookup", "prompt_lookup_max": 99}, "max_ngram must be an integer from 1 to 16, not 99."),
        ({"method": "custom", "model": "nowhere"}, "proposer must be a string like 'package.module:Class', not "),
    ],
)
def test_names_that_are_refused(config: dict[str, Any], sentence: str) -> None:
    """Kills: a name of vLLM's with another meaning that is taken for ours; a value that none of ours means."""
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["draft_confidence_threshold", "prompt_lookup_max", "prompt_lookup_min"])
def test_settings_that_are_the_cascades(name: str) -> None:
    """Fails if a drafter of vLLM looks tokens up, or chooses lengths, in a cascade that does both."""
    stage = {"method": "mtp", name: 5}
    with pytest.raises(ConfigError, match=rf"stages\[1\]: remove {name}: the cascade does lookups"):
        parse_config({"method": "cascade", "stages": ["prompt_lookup", stage]})


def test_settings_of_the_next_version() -> None:
    """Kills: a setting of a drafter that vLLM is about to have, and that the stage refuses."""
    settings = {"draft_token_map": "map.json", "draft_token_map_quantization": "fp8", "draft_token_map_dynamic_rows": 8}
    config = parse_config({"method": "cascade", "stages": ["prompt_lookup", {"method": "mtp", **settings}]})
    assert config.stages[1].method_config.settings == settings


ODD_CLASSES = """
class Number:
    check_options = 5
"""


@pytest.mark.parametrize(
    "name, sentence", [("Number", "check_options of odd_classes:Number must be a function, not 5.")]
)
def test_odd_classes(name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a `check_options` that every request is refused by."""
    (tmp_path / "odd_classes.py").write_text(ODD_CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = {"method": "custom", "proposer": f"odd_classes:{name}"}
    for raw in (custom, {"method": "cascade", "stages": [custom]}):
        with pytest.raises(ConfigError) as caught:
            parse_config(raw)
        assert str(caught.value) == f"custom: {sentence}"


def test_stages_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: entry points that are read for each stage; stages without end, refused or not after minutes."""
    read: list[int] = []
    monkeypatch.setattr(parsing, "registered_methods", lambda: (read.append(1), {})[1])
    stages = [{"method": "early_exit", "exit_layer": layer} for layer in range(1, 9)]
    assert len(parse_config({"method": "cascade", "stages": stages}).method_config.stages) == 8 and len(read) == 1
    for number in (9, 100_000):
        with pytest.raises(ConfigError, match="stages must be a list of 1 to 8 dictionaries or names, not"):
            parse_config({"method": "cascade", "stages": stages[:1] * number})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def broken(:", "(SyntaxError: invalid syntax"),
        ("import sys; sys.exit(0)", "(SystemExit: 0)"),
        ("raise RuntimeError('one\\ntwo')", "(RuntimeError: one two)"),
        ("import not_installed_anywhere", "PYTHONPATH=. adds the current folder to the path)"),
        ("value = 1", "has no attribute 'Class')"),
        ("Class = '/'", "must name a class or a function that creates a proposer, not '/'"),
    ],
)
def test_broken_module_of_a_custom_proposer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    """One sentence, whatever the module does. Kills: what is no ImportError goes through; a value that is no class."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_custom_module", raising=False)
    (tmp_path / "a_custom_module.py").write_text(source)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError) as error:
        parse_config({"method": "custom", "proposer": "a_custom_module:Class"})
    sentence = str(error.value)
    assert said in sentence and sentence.endswith(".") and "\n" not in sentence and len(sentence) < 300


@pytest.mark.parametrize(
    ("raw", "lengths"),
    [
        (LOOKUP, [31]),
        ({"method": "suffix_lookup"}, [31]),
        ({"method": "early_exit"}, [5]),
        ({"method": "cascade", "stages": [LOOKUP, EXIT]}, [31, None, 5]),
        ({"method": "cascade", "stages": [LOOKUP, {**EXIT, "num_speculative_tokens": 3}]}, [31, None, 3]),
        ({"method": "cascade", "stages": [LOOKUP, EXIT], "num_speculative_tokens": 7}, [7, None, None]),
        ({"method": "cascade", "stages": [LOOKUP, {**EXIT, "draft_sample_method": "probabilistic"}]}, [5, None, None]),
        ({"method": "cascade", "stages": [EXIT, LOOKUP]}, [5, None, None]),
        ({"method": "cascade", "stages": [LOOKUP, {"method": "mtp"}]}, [31, None, None]),
        ({"method": "grammar"}, [31]),
        ({"method": "cascade", "stages": [LOOKUP, {"method": "grammar"}]}, [31, None, None]),
    ],
)
def test_default_lengths(raw, lengths) -> None:
    """Fails if a lookup has no long drafts, if a stage beside it has as long ones or loses what it says, or if drawn
    drafts keep the logits of 31 places."""
    config = parse_config(raw)
    stages = getattr(config.method_config, "stages", ())
    assert [config.length, *(stage.num_speculative_tokens for stage in stages)] == lengths
    assert config.says_length == ("num_speculative_tokens" in raw)


def test_built_in_stage() -> None:
    stage = {"method": "eagle3", "model": "m", "quantization": "fp8", "num_speculative_tokens": 3}
    config = parse_config({"method": "cascade", "stages": [{"method": "prompt_lookup"}, stage]})
    assert [own.num_speculative_tokens for own in config.method_config.stages] == [None, 3]
    found = built_in_stage(config)
    assert found is config.method_config.stages[1] and found is not None and found.method == "eagle3"
    assert (found.method_config.model, found.method_config.settings) == ("m", {"quantization": "fp8"})
    assert built_in_stage(parse_config({"method": "prompt_lookup"})) is None


def test_grammar() -> None:
    """Kills: a grammar twice."""
    grammar, drawn = {"method": "grammar"}, {**EXIT, "draft_sample_method": "probabilistic"}
    with pytest.raises(ConfigError, match="keep only one grammar"):
        parse_config({"method": "cascade", "stages": [grammar, grammar]})
    parse_config({"method": "cascade", "stages": [drawn, grammar]})


@pytest.mark.parametrize("name", METHODS)
def test_frozen(name: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "custom": {"proposer": "json:loads"},
        "cascade": {"stages": [EXIT] * 2},
        "medusa": {"heads": "folder"},
        "jump": {"head": "folder"},
        "remote": {"url": "http://host/v1", "model": "name"},
    }
    config = parse_config({"method": name, **needed.get(name, {})})
    with pytest.raises(AttributeError):
        config.common.num_speculative_tokens = 7  # type: ignore[misc]


STAGE = {"method": "cascade", "stages": [LOOKUP]}


@pytest.mark.parametrize(
    ("config", "end"),
    [
        ({**LOOKUP, "max_ngrams": 5}, "; did you mean 'max_ngram'?"),
        ({**EXIT, "exit_layers": 5}, "; did you mean 'exit_layer'?"),
        ({**STAGE, "stages": [{"method": "promt_lookup"}]}, "; did you mean 'prompt_lookup'?"),
        ({**STAGE, "stages": [{"method": "eagle_3", "model": "m"}]}, "; did you mean 'eagle3'?"),
        ({**STAGE, "stages": [{"method": "mtp", "modell": "m"}]}, "; did you mean 'model'?"),
        ({"method": "suffix_lookup", "suffix_decoding_max_cached_requests": 0}, "vLLM's; here it is store_bytes."),
        ({"method": "suffix_lookup", "draft-p-min": 1}, "draft-p-min is llama.cpp's; here it is gate."),
        ({**STAGE, "draft-p-min": 0.5}, "draft-p-min is llama.cpp's; here it is gate."),
        ({**STAGE, "stages": [{"method": "NGRAM"}]}, "NGRAM is SGLang's; here it is prompt_lookup."),
        ({**STAGE, "policy": "first"}, "policy must be one of 'auto', 'verify', not 'first'."),
        ({**EXIT, "exit_layer": "auto"}, "exit_layer must be an integer from 1 to 10000, not 'auto'."),
    ],
)
def test_what_to_use_instead(config: dict[str, Any], end: str) -> None:
    """Fails if a misspelt field or stage, or a setting of another engine is refused
    without the names that are allowed."""
    with pytest.raises(ConfigError, match=re.escape(end) + "$"):
        parse_config(config)


def test_trees() -> None:
    """K is a tree's size. Kills: a tree that V2 would verify as a chain, or with a q that is lost."""
    assert parse_config({**EXIT, "tree": 15}).length == 15
    assert parse_config({**EXIT, "tree": 7, "num_speculative_tokens": 7}).length == 7
    assert parse_config(EXIT).longest_chain == parse_config(LOOKUP).longest_chain == 0
    assert parse_config({**EXIT, "tree": 15}).longest_chain == 6
    for more, words in (
        ({"tree": 0}, "tree must be an integer from 1 to 31 or null, not 0"),
        ({"tree": 32}, "tree must be an integer from 1 to 31 or null, not 32"),
        ({"tree": 7, "num_speculative_tokens": 5}, "num_speculative_tokens must be 7, the value of tree, or left out"),
        ({"tree": 7, "look_ahead": "/folder"}, "remove look_ahead: it is untested with tree"),
        ({"tree": 7, "draft_sample_method": "probabilistic"}, "set rejection 'rounds' if, and only if, tree is set"),
        ({"tree": 7, "rejection": "rounds"}, "set rejection 'rounds' if, and only if, tree is set"),
        (
            {"draft_sample_method": "probabilistic", "rejection": "rounds"},
            "set rejection 'rounds' if, and only if, tree is set",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^early_exit: {words}"):
            parse_config({**EXIT, **more})
    merged = {"method": "cascade", "stages": [LOOKUP, EXIT], "tree": 15}
    assert [stage.num_speculative_tokens for stage in parse_config(merged).stages] == [None, 6]
    assert parse_config(merged).length == parse_config({**merged, "num_speculative_tokens": 15}).length == 15
    for wrong in (
        {"policy": "verify"}, {"stages": [EXIT, LOOKUP]}, {"stages": [LOOKUP]}, {"stages": [LOOKUP, EXIT, EXIT]},
        {"stages": [LOOKUP, {**EXIT, "num_speculative_tokens": 4}]}, {"stages": [{"method": "suffix_lookup"}, EXIT]},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="tree supports only stages "):
            parse_config({**merged, **wrong})
    with pytest.raises(ConfigError, match=r"num_speculative_tokens must be 15, the value of tree, or left out, not 31"):
        parse_config({**merged, "num_speculative_tokens": 31})
    with pytest.raises(ConfigError, match=r"remove tree from stages\[1\]"):
        parse_config({"method": "cascade", "stages": [LOOKUP, {**EXIT, "tree": 7}]})
