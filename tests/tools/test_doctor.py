"""`doctor`: says yes and no, in words and in exit codes, and starts no engine."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from command_lines import REFUSED as REFUSED_LINES
from command_lines import SERVED
from forked import run

from vllm_specplugins.__main__ import main
from vllm_specplugins.engine.harness.diagnosis import PROBLEM, _command_line, diagnose
from vllm_specplugins.engine.vllm_api import compat
from vllm_specplugins.methods import METHODS

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO_MODEL = EXAMPLES / "demo" / "model"
RECIPES = json.loads((EXAMPLES / "recipes.json").read_text())
THIRD_PARTY = Path(__file__).parents[1] / "third_party"
EARLY = {"method": "early_exit", "exit_layer": 1}


def doctor(*arguments: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Returns exit code, report and stderr of the command in a separate process."""
    command = ["-m", "vllm_specplugins", "doctor", "--json", *arguments]
    done = run(command, {**os.environ, "HF_HUB_OFFLINE": "1", **environment})
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def problems(report: dict[str, Any]) -> list[str]:
    return [finding["value"] for finding in report["findings"] if finding["state"] == PROBLEM]


def test_ready() -> None:
    """A model that can be cut, with another package about: all facts are there, and nothing but JSON is printed."""
    config = json.dumps({**EARLY, "num_speculative_tokens": 3})
    status, report, error = doctor(
        "--model", str(DEMO_MODEL), "--speculative-config", config, PYTHONPATH=str(THIRD_PARTY)
    )
    assert (status, error, problems(report)) == (0, "", [])
    assert report["served"] and json.loads(report["ready"])["exit_layer"] == 1
    found: dict[str, list[str]] = {}
    for finding in report["findings"]:
        found.setdefault(finding["name"], []).append(finding["value"])
    assert found["draft"] == ["at most 3 tokens per request (num_speculative_tokens)"]
    facts = "python", "torch", "vllm", "vllm-specplugins", "device", "vllm version", "replaced in vLLM", "kernels"
    assert {*facts} <= found.keys()
    assert found["runner"][0][:2] in ("V1", "V2") and found["scheduling"][0] in ("synchronous", "asynchronous")
    assert found["drafting"][0].startswith("drafts ") and "synchronous scheduling" in found["drafting"][0]
    assert "LlamaForCausalLM" in found["model"][0]
    assert any("'eagle'" in value and "refused" in value for value in found["registered method"])
    assert any(value.startswith("repeat (") for value in found["registered method"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a field": ({"method": "prompt_lookup", "max_ngram": 99}, "max_ngram must be an integer from 1 to 16, not 99."),
    "a method": ({"method": "prompt_lokup"}, f"method must be {', '.join(METHODS)}"),
    "a misspelt method": ({"method": "promptlookup"}, "not 'promptlookup'; did you mean 'prompt_lookup'?"),
    "a method of both": ({"method": "medusa", "heads": "h", "headz": 1}, "medusa: 'headz' is not a field"),
    "heads misspelt": ({"method": "medusa", "headz": "h"}, "medusa: 'headz' is not a field"),
    "no heads": ({"method": "medusa"}, "medusa: heads is missing"),
    "a field of vLLM's misspelt": ({"method": "ngram", "prompt_lookup_maxx": 5}, "did you mean 'prompt_lookup_max'?"),
    "a stage by a wrong name": ({"method": "cascade", "stages": ["prompt_lokup"]}, "did you mean 'prompt_lookup'?"),
    "a stage that needs more": ({"method": "cascade", "stages": ["prompt_lookup", "medusa"]}, "heads is missing"),
    "no method": ({}, "method is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_without_a_model(name: str) -> None:
    """Fails if a configuration that vLLM refuses is called ready: misspelt and missing fields, also of vLLM's
    methods."""
    raw, words = REFUSED[name]
    [sentence] = [finding.value for finding in diagnose(raw, None) if finding.state == PROBLEM]
    assert words in sentence


def test_advice() -> None:
    """Fails if an exit that nobody trained is recommended without a word, alone or as a stage by its name; if a head, a
    method of vLLM's or another stage is warned of."""
    head = {"method": "early_exit", "exit_head": str(DEMO_MODEL)}
    for raw, warned in (
        ({"method": "early_exit", "exit_layer": 2}, True),
        ({"method": "cascade", "stages": ["prompt_lookup", "early_exit"]}, True),
        (head, False),
        ({"method": "cascade", "stages": ["prompt_lookup", head]}, False),
        ({"method": "ngram", "prompt_lookup_max": 5}, False),
        ({"method": "medusa", "model": "a"}, False),
    ):
        findings = [found for found in diagnose(raw, None) if found.name in ("configuration", "early_exit")]
        assert all(found.state != PROBLEM for found in findings), findings
        assert any("calibrate" in found.value for found in findings) == warned


def test_refused_with_a_model() -> None:
    """An exit that the model does not have; and the plugin switched off. Kills: 0 for what would not be served."""
    config = json.dumps({**EARLY, "exit_layer": 9})
    arguments = ("--model", str(DEMO_MODEL), "--speculative-config", config)
    status, report, error = doctor(*arguments, VLLM_SPECPLUGINS_DISABLE="1")
    assert (status, error, report["served"]) == (1, "", False)
    assert problems(report)[0] == "VLLM_SPECPLUGINS_DISABLE is set: vLLM would serve without speculation"
    assert json.loads(report["ready"]) == {"method": "prompt_lookup"}, "a ready value is one that is allowed"


def test_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a traceback, or pages of names, with a vLLM that is not supported."""
    missing = "vllm/a.py: B is missing", "vllm/c.py: D is missing"
    monkeypatch.setattr(compat, "probe_installed", lambda runner=None: missing)
    monkeypatch.setitem(sys.modules, "vllm.config.speculative", None)
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", None)
    [sentence] = [finding.value for finding in diagnose(None, str(DEMO_MODEL)) if finding.state == PROBLEM]
    assert sentence.startswith("vllm/a.py: B is missing (and 1 more of ") and "without speculation" in sentence


@pytest.mark.parametrize("length", [None, 31])
def test_arguments_of_the_server(length: int | None) -> None:
    """Kills: another K, or another verdict, than the start of the server with LoRA."""
    config = {"method": "prompt_lookup"} | ({"num_speculative_tokens": length} if length else {})
    arguments = ("--model", str(DEMO_MODEL), "--speculative-config", json.dumps(config), "--")
    serve = ("--enable-lora", "--max-num-seqs", "64", "--max-num-batched-tokens", "512", "--port", "80")
    status, report, _ = doctor(*arguments, *serve)
    findings = {finding["name"]: finding["value"] for finding in report["findings"]}
    if length:
        assert status == 1 and findings["model"].startswith(
            "prompt_lookup: max_num_batched_tokens must be at least 2048"
        )
    else:
        assert status == 0 and findings["draft"].startswith("at most 7 tokens")


# CI asks about the refused lines and three others.
@pytest.mark.parametrize("number", range(20) if os.environ.get("SPECPLUGINS_TESTS") == "all" else range(7, 20))
def test_the_verdict_of_a_start(number: int) -> None:
    """Kills: a command line that `doctor` approves and the server refuses, or the other way round, on a CPU. Servers
    are started by hand (command_lines.py)."""
    words, is_served = [*((line, True) for line in SERVED), *((line, False) for line in REFUSED_LINES)][number]
    found = [finding for finding in diagnose(None, None, ("vllm", "serve", *words)) if finding.state == PROBLEM]
    assert (not found) is is_served, found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["title"][:20])
def test_recipes(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a recipe that vLLM's parser or the plugin refuses; on a CPU, without the GPU's size and its drafter."""
    monkeypatch.setenv("REDIS_URL", "redis://localhost:6379")
    words = ["vllm", "serve", *recipe["arguments"], "--speculative-config", json.dumps(recipe["config"])]
    raw, model, _ = _command_line(None, None, words)
    assert raw == recipe["config"] and model == recipe["arguments"][0]
    on_cpu = {**raw, "store_path": None} if raw["method"] == "suffix_lookup" else raw
    if "eagle3" in json.dumps(raw):
        on_cpu = {**raw, "stages": raw["stages"][:1]}
    sizes = ("--max-num-seqs", "16", "--max-model-len", "256")
    assert not [found for found in diagnose(on_cpu, str(DEMO_MODEL), sizes) if found.state == PROBLEM]


def test_the_verdict_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    """Kills: "Ready to use" after a problem; a value that was not asked about, offered as if it were the verdict."""
    assert main(["doctor", "--speculative-config", '{"method":"prompt_lookup"}']) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Ready to use: --speculative-config ")
    assert main(["doctor", "--speculative-config", '{"method":"promptlookup"}']) == 1
    offered, verdict = capsys.readouterr().out.splitlines()[-2:]
    assert offered.startswith("A valid configuration: ") and verdict == "Not ready: 1 problem."


def test_wrong_question() -> None:
    status, report, error = doctor("--speculative-config", "{")
    assert (status, report) == (2, {})
    assert error == "python -m vllm_specplugins doctor: error: --speculative-config: must be a JSON object, not '{'.\n"


def test_plugins_that_vllm_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    sentences = [finding.value for finding in diagnose(None, None) if finding.state == PROBLEM]
    assert sentences == ["VLLM_PLUGINS must include specplugins, not 'another' alone"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, None),
        ({"tree": 7}, "tree"),
        ({"tree": 7, "draft_sample_method": "probabilistic", "rejection": "rounds"}, "tree, rejection 'rounds'"),
        ({"method": "cascade", "stages": ["prompt_lookup", EARLY], "policy": "verify"}, "policy 'verify'"),
        ({"method": "lookahead"}, "lookahead"),
        ({"method": "suffix_lookup", "shared": "redis://host:6379"}, "shared"),
    ],
)
def test_research(more: dict[str, Any], words: str | None) -> None:
    """Kills: a feature without a figure of a gain that looks like the others."""
    raw = {**({} if "method" in more else EARLY), **more}
    values = [found.value for found in diagnose(raw, None) if found.name == "research"]
    assert values == ([] if words is None else [f"no figure shows that {words} makes a server faster"])
