"""The plugin's metrics in an engine of this process: their sums equal vLLM's totals, also for a registered method."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import generate, mixed_prompts
from conftest import DEMO_MODEL, RUNNER, TAPES, spec_metrics

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.frontend.plugin import requested
from vllm_specplugins.engine.metrics.names import PREFIX, SHAPE, TABLE
from vllm_specplugins.methods import METHODS as OURS

STAGES = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}]
METHODS: dict[str, dict[str, Any]] = {
    "registered": {"method": "repeat", "times": 3},
    "auto": {"method": "cascade", "stages": STAGES},
    "early_exit": {"method": "early_exit", "exit_layer": 1},
    "verify": {"method": "cascade", "policy": "verify", "gate": "off", "stages": STAGES},
}
FLAGS = ("spec_method", "spec_model", "spec_tokens")
Series = dict[tuple[str, ...], Any]


def ours(llm: Any, method: str) -> dict[str, Series]:
    """Returns the plugin's metrics by name, and by the values of their labels."""
    own = {metric.name: metric.labels for metric in TABLE}
    found: dict[str, Series] = {name: {} for name in own}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            name = metric.name.removeprefix(PREFIX)
            assert metric.labels["method"] == method and metric.labels["engine"] == "0"
            labels = tuple(metric.labels[label] for label in own[name])
            value = metric.count if hasattr(metric, "count") else metric.value
            assert found[name].setdefault(labels, value) == value
    return found


def check_sums(found: Mapping[str, Series], theirs: Mapping[str, float], trims: bool) -> None:
    """Kills: a stage's tokens counted twice or not at all; positions off by one; drafts counted as verified. vLLM
    counts what was planned to be verified; where that is trimmed on the device, ours is what was.
    """
    for stage, drafted in found["drafted_tokens"].items():
        kept, verified = found["kept_tokens"][stage], found["num_draft_tokens"][stage]
        accepted = found["num_accepted_tokens"][stage]
        assert 0 <= accepted <= verified <= kept <= drafted
        assert found["num_drafts"][stage] <= found["asked"][stage]
        by_position = [n for labels, n in found["num_accepted_tokens_per_pos"].items() if labels[0] == stage[0]]
        assert sum(by_position) == accepted
    verified = sum(found["num_draft_tokens"].values())
    assert theirs["accepted_tokens"] <= verified <= theirs["draft_tokens"]
    assert trims or verified == theirs["draft_tokens"]
    assert sum(found["num_accepted_tokens"].values()) == theirs["accepted_tokens"]
    assert theirs["accepted_tokens"] > 0
    lengths = {int(labels[0]): n for labels, n in found["draft_lengths"].items()}
    assert sum(n for length, n in lengths.items() if length) >= theirs["drafts"]


@pytest.fixture(scope="module", autouse=True)
def another_package() -> Iterator[None]:
    """It registers the method `repeat`."""
    folder = str(Path(__file__).parents[1] / "third_party")
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


@pytest.mark.parametrize("name", [name for name in METHODS if name != ("early_exit" if RUNNER == "v1" else "verify")])
def test_adds_up(engine: Any, name: str) -> None:
    """Histograms hold what their counters say, every name is there, and tokens that are dropped at a stop id are taken
    off. Fails if a report passes with them, or counts other steps than those after a request's first token, or if a
    request whose slot another one takes at once loses its rate. Scheduled synchronously: asynchronously a request's
    last step may be verified in vain, which vLLM does not count.
    """
    config = METHODS[name] | {"num_speculative_tokens": 4}
    llm = engine(config, async_scheduling=False, max_num_seqs=2 if name == "registered" else 8)
    prompts = mixed_prompts(str(DEMO_MODEL), 4)
    answers = generate(llm, prompts, [12])
    llm.llm_engine.step()  # as a server does when nothing is left to do, and `LLM` with its next request
    found = ours(llm, config["method"])
    missing = {name for name, series in found.items() if not series}
    absent = {
        "faults",
        "stored_outputs",
        "stored_tokens",
        "exchanges",
        "learned",
        "learned_length",
        "step_cost_seconds",
        "undrafted_steps",
    }
    if drafts_in_graphs := TAPES and name in ("early_exit", "auto"):
        absent |= {
            "draft_time_seconds",
            "step_draft_time_seconds",
            "shape_draft_time_seconds",
            "store_bytes",
        }  # the host only launches them
    if name != "auto" or RUNNER == "v2":  # what its gate chooses on the device is not counted
        absent |= {"gate_lengths", "store_bytes"}
    assert missing <= absent
    check_sums(found, spec_metrics(llm), trims=drafts_in_graphs and name == "auto")  # a lookup's next draft is unsure
    emitted = sum(map(len, generate(llm, prompts, [12], stop_token_ids=[answers[0][5], answers[1][7]])))
    llm.llm_engine.step()
    more = ours(llm, config["method"])
    came = [sum(series[name].values()) for name in ("steps", "num_accepted_tokens") for series in (more, found)]
    assert came[0] - came[1] + came[2] - came[3] == emitted - len(prompts)
    by_position = sum(more["num_accepted_tokens_per_pos"].values())
    assert by_position == came[2] <= spec_metrics(llm)["accepted_tokens"], "vLLM counts what is dropped, too"
    if drafts_in_graphs:
        assert not any(found["draft_time_seconds"].values())
    else:
        num_steps = found["step_draft_time_seconds"][()]
        assert 0 < max(found["draft_time_seconds"].values()) <= num_steps
    assert found["request_acceptance_rate"][()] == len(prompts), "each has drafts"
    if "gate" not in config and config["method"] == "cascade" and not drafts_in_graphs:
        assert sum(found["gate_lengths"].values()) > 0
    check_steps(llm, more)


def check_steps(llm: Any, found: Mapping[str, Series]) -> None:
    """Kills: steps whose draft is counted by another step's length, or that lack a time or a reason; a graph that is
    not seen on the (simulated) device."""
    num_steps, undrafted = (sum(found[name].values()) for name in ("shape_steps", "undrafted_steps"))
    assert num_steps > 10
    assert undrafted == sum(num for series, num in found["shape_steps"].items() if series[2] == "0")
    assert {reason for (reason,) in found["undrafted_steps"]} <= {"scheduler", "gate", "trimmed", "no draft", "limits"}
    emitted = sum(found["steps"].values()) + sum(found["num_accepted_tokens"].values())
    assert 0 < sum(found["shape_tokens"].values()) <= 2 * emitted
    times = {
        tuple(metric.labels[label] for label in SHAPE): metric.sum
        for metric in llm.get_metrics() if metric.name == f"{PREFIX}shape_time_seconds"
    }  # fmt: skip
    assert times
    for series, seconds in times.items():
        assert 0 <= found["shape_draft_time_seconds"].get(series, 0) < seconds < 60
    graphs = {labels[3] for labels in found["shape_steps"]}
    assert graphs == {"unknown"} if RUNNER == "v1" else graphs <= {"full", "piecewise", "none"}


def test_registered_names_in_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Kills: a user who misspells a registered name and is told ours alone; a package that takes vLLM's name unseen."""

    def asked(method: str) -> Any:
        return requested(SimpleNamespace(speculative_config={"method": method}, **dict.fromkeys(FLAGS)))

    with pytest.raises(ConfigError, match=f"method must be {', '.join(OURS)}, .* repeat"):
        asked("repaet")
    assert asked("repeat") == {"method": "repeat"}
    with caplog.at_level("ERROR", "vllm.specplugins"):
        assert asked("eagle") is None
    assert "the method 'eagle' of the package 'specplugins-example' is refused" in caplog.text
