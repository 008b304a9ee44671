"""The plugin in vLLM's configuration: inert until a method of ours is asked for, and clear when it refuses."""

import logging
import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from cases import PROMPT_LOOKUP, generate
from conftest import DEMO_MODEL, EXAMPLES, RUNNER

from vllm_specplugins import plan, register
from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.frontend import spec_config
from vllm_specplugins.engine.frontend.spec_config import take_over
from vllm_specplugins.engine.vllm_api import compat

ONCE = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def engine_config(speculative_config: Any = None, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"model": str(DEMO_MODEL), "max_model_len": 512, "enforce_eager": True}
    return EngineArgs(**{**defaults, **arguments}, speculative_config=speculative_config).create_engine_config()


def described(speculative_config: Any) -> str:
    """The configuration as text, without what is unique to every engine."""
    text = repr(engine_config(speculative_config))
    return re.sub(r"(instance_id|0x)[-=' ]*[0-9a-f-]+|tmp\w+", "", text)


def snapshot() -> dict[tuple[str, ...], int]:
    """The identity of every function, class and class member of every vLLM module that is loaded."""
    seen: dict[tuple[str, ...], int] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "vllm" or module_name == "vllm.envs":  # vLLM swaps a cache into it
            continue
        for name, value in list(vars(module).items()):
            if callable(value):
                seen[module_name, name] = id(value)
            if isinstance(value, type) and value.__module__ == module_name:
                seen |= {
                    (module_name, name, member): id(entry) for member, entry in vars(value).items() if callable(entry)
                }
    return seen


def changes(before: dict[tuple[str, ...], int], after: dict[tuple[str, ...], int]) -> set[tuple[str, ...]]:
    return {key for key in before if before[key] != after.get(key, before[key])}


IMPORT_EVERYTHING = f"""
import importlib, sys
sys.path[:0] = {[os.path.dirname(__file__), str(EXAMPLES / "demo")]!r}
from vllm_specplugins.engine.vllm_api import compat
for file in compat.names():
    name = "vllm." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        importlib.import_module(name)
    except ImportError:
        assert ".gpu." in name, name  # V2's modules need Triton
from test_plugin import NGRAM, changes, described, engine_config, snapshot
before = snapshot()
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )


def results(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the program printed, without vLLM's log."""
    return [line.removeprefix("OUT ") for line in done.stdout.splitlines() if line.startswith("OUT ")]


@pytest.mark.skipif(RUNNER == "v1", reason="on V2 more of vLLM can be imported, V1's modules among them")
def test_inert_when_unused() -> None:
    """Loading the plugin changes two methods of EngineArgs and nothing else; vLLM's own methods get vLLM's own config,
    and without the plugin vLLM refuses ours. Kills: any patch at import or at load.
    """
    code = (
        IMPORT_EVERYTHING
        + """
try:
    engine_config({"method": "prompt_lookup", "num_speculative_tokens": 3})
except ValueError as error:
    print("OUT", "prompt_lookup" in str(error))
import vllm_specplugins
vllm_specplugins.register(); vllm_specplugins.register()
print("OUT", sorted(".".join(key) for key in changes(before, snapshot())))
from vllm.engine.arg_utils import EngineArgs
wrapped = [described(config) for config in (None, dict(NGRAM))]
kinds = [type(engine_config(dict(NGRAM)).speculative_config).__name__]
for name in ("create_speculative_config", "create_engine_config"):
    setattr(EngineArgs, name, getattr(EngineArgs, name).__wrapped__)
print("OUT", [described(config) for config in (None, dict(NGRAM))] == wrapped, kinds)
print("OUT", sorted(changes(before, snapshot())))
"""
    )
    done = python(code, VLLM_PLUGINS="")
    assert done.returncode == 0, done.stderr[-3000:]
    refused, changed, same, restored = results(done)
    assert refused == "True"
    module = "vllm.engine.arg_utils.EngineArgs"
    assert changed == repr([f"{module}.create_engine_config", f"{module}.create_speculative_config"])
    assert same == "True ['SpeculativeConfig']"
    assert restored == "[]"


@ONCE
def test_switched_off() -> None:
    """VLLM_SPECPLUGINS_DISABLE=1: nothing is changed but that our methods are left out. Fails if a server that names
    one does not start (it would start again and again)."""
    code = (
        IMPORT_EVERYTHING
        + """
import vllm_specplugins
vllm_specplugins.register(); vllm_specplugins.register()
print("OUT", sorted(".".join(key) for key in changes(before, snapshot())))
print("OUT", type(engine_config(dict(NGRAM)).speculative_config).__name__)
for arguments in {"speculative_config": {"method": "prompt_lookup"}}, {"spec_method": "cascade"}:
    print("OUT", engine_config(**arguments).speculative_config)
"""
    )
    done = python(code, VLLM_SPECPLUGINS_DISABLE="1")
    sentence = "VLLM_SPECPLUGINS_DISABLE is set; the server runs without speculative decoding."
    assert results(done) == [
        "['vllm.engine.arg_utils.EngineArgs.create_engine_config']",
        "SpeculativeConfig",
        "None",
        "None",
    ], done.stderr[-3000:]
    assert (done.stdout + done.stderr).count(sentence) == 2


def test_nothing_stays_swapped(engine: Any) -> None:
    """After an engine with a method of ours was built and used, vLLM's modules are what they were. But for the records
    of kind "patch", which mend vLLM where our methods run.
    """
    engine()
    before = snapshot()
    generate(engine(PROMPT_LOOKUP), [[5, 6, 7, 5, 6]], [1], max_tokens=4)
    patches = {name for record in compat.replaced() if record.kind == "patch" for name in record.names}
    assert {".".join(key[1:]) for key in changes(before, snapshot())} <= patches


def test_our_config_passes_through() -> None:
    config = engine_config(PROMPT_LOOKUP)
    assert config.speculative_config.method == "prompt_lookup"
    assert config.num_speculative_tokens == 4
    assert config.num_lookahead_tokens == 0, "a history proposer writes no KV"
    assert config.parallel_config.worker_cls == "vllm_specplugins.engine.worker.CPUWorker"
    assert config.use_v2_model_runner == (RUNNER == "v2")
    assert config.scheduler_config.async_scheduling == (RUNNER == "v2")


REFUSED = [({"worker_cls": "some.other.Worker"}, "worker_cls must be one of")]
if RUNNER == "v1":  # where an engine would die of a first stage that has no drafter
    REFUSED += [({"pipeline_parallel_size": 2}, r"pipeline_parallel_size must be 1 on Model Runner V1, not 2: vLLM ")]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^prompt_lookup: {words}"):
        engine_config(PROMPT_LOOKUP, **arguments)


def test_batch_invariance_is_refused_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a server starts that dies of its first request: vLLM's kernels for it want Triton."""
    from vllm import envs

    monkeypatch.setitem(vars(envs), "VLLM_BATCH_INVARIANT", True)
    with pytest.raises(ConfigError, match=r"^prompt_lookup: VLLM_BATCH_INVARIANT must be 0 on a CPU"):
        engine_config(PROMPT_LOOKUP)


def test_flags() -> None:
    """--spec-method and --spec-tokens, as well as keys written with dashes."""
    config = engine_config(spec_method="prompt_lookup", spec_tokens=3)
    assert (config.speculative_config.method, config.num_speculative_tokens) == ("prompt_lookup", 3)
    own = engine_config({"method": "prompt_lookup", "max-ngram": 5}).speculative_config.plugin_config.method_config
    assert own.max_ngram == 5
    with pytest.raises(ConfigError, match="is set twice"):
        engine_config({"method": "prompt_lookup", "num_speculative_tokens": 3}, spec_tokens=4)
    with pytest.raises(ConfigError, match="max_ngram is set twice, as 'max-ngram' and as 'max_ngram'"):
        engine_config({"method": "prompt_lookup", "max-ngram": 5, "max_ngram": 6})


@pytest.mark.parametrize(
    "method, end",
    [
        ("promt_lookup", "not 'promt_lookup'; did you mean 'prompt_lookup'?"),
        ("eagle33", "not 'eagle33'; did you mean 'eagle3'?"),
        ("", "not ''."),
        (5, "not 5."),
        (["prompt_lookup"], "not ['prompt_lookup']; did you mean 'prompt_lookup'?"),
    ],
)
def test_unknown_method(method: Any, end: str) -> None:
    """The sentence lists the plugin's names, says where vLLM lists its names, and is short. Fails if the suggestion
    considers only the plugin's names."""
    with pytest.raises(ConfigError, match=r"method must be prompt_lookup, .* or one of vLLM's, ") as error:
        engine_config({"method": method, "num_speculative_tokens": 3})
    assert str(error.value).endswith(end) and len(str(error.value)) <= 220


@pytest.mark.skipif(RUNNER == "v1", reason="refused there")
@pytest.mark.parametrize("method", ["prompt_lookup", "suffix_lookup"])
def test_pipeline_on_v2(method: str) -> None:
    """Fails if what reads tokens on the host keeps a pipeline synchronous, where vLLM plans drafts for requests whose
    last step is still on its way; or if who asks for that is not told."""
    spec = {"method": method, "num_speculative_tokens": 4}
    scheduler = engine_config(spec, pipeline_parallel_size=2).scheduler_config
    assert scheduler.async_scheduling and scheduler.scheduler_cls.endswith(".PlannedScheduler")
    words = rf"^{method}: pipeline_parallel_size must be 1 without async_scheduling, not 2: vLLM "
    with pytest.raises(ConfigError, match=words):
        engine_config(spec, pipeline_parallel_size=2, async_scheduling=False)


def test_asynchronous_scheduling() -> None:
    """On V2 it selects the plugin's scheduler; on V1 it is refused with a sentence (on a CPU vLLM itself switches it
    off)."""
    config = engine_config(PROMPT_LOOKUP, async_scheduling=True)
    if RUNNER == "v1":
        assert config.scheduler_config.async_scheduling is False
        config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
        config.scheduler_config.async_scheduling = True
        with pytest.raises(ConfigError, match="async_scheduling must be false on Model Runner V1"):
            take_over(config, True)
        return
    assert config.scheduler_config.scheduler_cls == plan.PLANNED
    with pytest.raises(ConfigError, match=r"remove async_scheduling .* grammar needs"):
        engine_config({"method": "grammar"}, async_scheduling=True)
    assert engine_config({"method": "grammar"}).scheduler_config.scheduler_cls == plan.GRAMMAR
    with pytest.raises(ConfigError, match="remove scheduler_cls"):
        engine_config(PROMPT_LOOKUP, async_scheduling=True, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")


@pytest.mark.parametrize(
    ("spec", "place", "who", "why"),
    [
        (
            {"method": "prompt_lookup"},
            "on the device, without CUDA graphs",
            "the scheduler sets draft lengths",
            "it needs full CUDA graphs",
        ),
        (
            {"method": "early_exit", "exit_layer": 1, "gate": "off"},
            "on the device, without CUDA graphs",
            "drafts have their full length",
            'gate is "off"',
        ),
        (
            {"method": "suffix_lookup"},
            "on the device, without CUDA graphs, and also in a thread on the host",
            "the scheduler sets draft lengths",
            "it needs full",
        ),
        ({"method": "grammar"}, "on the host", "the gate sets draft lengths", "drafts have exact lengths"),
    ],
)
def test_where_drafts_are_made(
    caplog: pytest.LogCaptureFixture, spec: dict[str, Any], place: str, who: str, why: str
) -> None:
    """One line at the start states it. Fails if it names a wrong place, chooser or reason, or none."""
    is_late = RUNNER == "v2" and spec["method"] != "grammar"
    with caplog.at_level("INFO", "vllm.specplugins"):
        engine_config(spec, **({"async_scheduling": True} if is_late else {}))
    if RUNNER == "v1":
        place, why = "on the host", "drafts have exact lengths"
        who = "drafts have their full length" if "gate" in spec else "the gate sets draft lengths"
    line = next(message for message in caplog.messages if "synchronous scheduling" in message)
    assert line.startswith(f"{spec['method']}: drafts {place}") and f"; {who}; " in line
    assert f"; {'a' if is_late else ''}synchronous scheduling (" in line and f"no trimming on the device ({why}" in line


@pytest.mark.parametrize("method", ["prompt_lookup", "suffix_lookup", "early_exit"])
def test_checked_again(method: str) -> None:
    """As an engine's own process does with the configuration that it was sent. Fails if vLLM then refuses our method
    asynchronous scheduling, so that no engine starts but in the process that asks for it, or drops our scheduler."""
    spec = {"method": method, "num_speculative_tokens": 4}
    config = pickle.loads(pickle.dumps(engine_config(spec, async_scheduling=RUNNER == "v2")))
    config.__post_init__()
    assert config.scheduler_config.async_scheduling is (RUNNER == "v2")
    assert config.scheduler_config.scheduler_cls is not None
    assert config.num_lookahead_tokens == (4 if method == "early_exit" else 0)


def test_scheduling_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous, as vLLM's default is, where nothing of the method reads tokens on the host; and a sentence says so.
    Kills: a default that the user did not ask for, and one that overrides him.
    """
    early_exit = {"method": "early_exit", "exit_layer": 1}
    cascade = {"method": "cascade", "stages": [{"method": "prompt_lookup"}, early_exit]}

    said: list[str] = []
    monkeypatch.setattr(spec_config.logger, "info", lambda text, *words: said.append(text % words))

    def asynchronous(speculative_config: Any, **arguments: Any) -> tuple[bool, Any]:
        said.clear()
        scheduler = engine_config(speculative_config, **arguments).scheduler_config
        return scheduler.async_scheduling, scheduler.scheduler_cls

    planned, ours = plan.PLANNED, plan.CHOOSING
    says = "asynchronous scheduling;" if RUNNER == "v2" else "synchronous scheduling (Model Runner V1 needs"
    for speculative_config in (early_exit, PROMPT_LOOKUP):
        assert asynchronous(speculative_config) == ((True, planned) if RUNNER == "v2" else (False, ours))
        assert [says in sentence for sentence in said] == [True]
    assert asynchronous(cascade) == (False, ours)
    assert ["reads tokens on the host" in sentence for sentence in said] == [True]
    assert asynchronous(early_exit, async_scheduling=False) == (False, ours)
    assert ["; synchronous scheduling (async_scheduling is set)" in sentence for sentence in said] == [True]
    theirs = "vllm.v1.core.sched.scheduler.Scheduler"
    assert asynchronous(early_exit, scheduler_cls=theirs) == (False, theirs)


def test_unsupported_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After a failed probe, the log has one sentence and vLLM runs without the plugin; bad input is still refused."""
    problem = "vllm/x.py: Y is missing; the plugin supports vLLM >=0.32"
    monkeypatch.setattr(compat, "probe_installed", lambda runner=None: (problem,))
    with caplog.at_level(logging.ERROR, "vllm.specplugins"):
        assert engine_config(PROMPT_LOOKUP).speculative_config is None
    assert [record.message for record in caplog.records] == [
        "vllm-specplugins does not support this vLLM (vllm/x.py: Y is missing; the plugin supports vLLM >=0.32); "
        "the server runs without speculative decoding."
    ]
    with pytest.raises(ConfigError):
        engine_config({"method": "prompt_lookup", "max_ngram": 99})


@pytest.mark.parametrize("module", [None, SimpleNamespace(EngineArgs=object)])
def test_vllm_without_our_entrance(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kills: a later vLLM that does not start with any method, since the entry point raises."""
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    register()
    [sentence] = caplog.messages
    assert sentence.startswith("vllm-specplugins does not support this vLLM (")


@ONCE
@pytest.mark.slow
def test_server_refuses() -> None:
    """The command line of the server: the sentence, exit code not 0, no traceback."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL)]
    command += ["--speculative-config", '{"method":"prompt_lookup","max_ngram":99}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "error: prompt_lookup: " in done.stderr
    assert "Traceback" not in done.stderr


def test_default_length_of_a_target_with_state() -> None:
    """Fails if a hybrid target, which keeps a state for each token, has long drafts that nobody asked for, or loses
    those that somebody did."""
    from vllm_specplugins.config.lengths import with_length_for_target
    from vllm_specplugins.engine.target.admission import has_state
    from vllm_specplugins.parsing import parse_config

    plain = SimpleNamespace(is_hybrid=False, has_inner_state=False, is_attention_free=False)
    hybrid = SimpleNamespace(is_hybrid=True, has_inner_state=True, is_attention_free=False)
    lookup = parse_config({"method": "prompt_lookup"})
    here, there = (with_length_for_target(lookup, len, has_state(model)) for model in (plain, hybrid))
    assert [here.length, there.length] == [31, 5] and not there.says_length
