"""An engine on the vLLM of tomorrow: what is missing there costs drafts, as little as can be, or ends the start if the
user asks for that."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import upgraded
from cases import PROMPT_LOOKUP
from conftest import DEMO_MODEL, RUNNER

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.frontend import fallback, plugin
from vllm_specplugins.engine.vllm_api import compat

ON_BOTH = RUNNER == "v2"  # the front end is the same on both runners
ARGUMENTS: dict[str, Any] = {
    "model": str(DEMO_MODEL), "max_model_len": 256, "max_num_seqs": 4, "block_size": 32, "num_gpu_blocks_override": 64,
}  # fmt: skip
LOOKUP = {**PROMPT_LOOKUP, "gate": "off"}
FLAGS = ("spec_method", "spec_model", "spec_tokens")


def start(folder: Path, config: Any = LOOKUP, **environment: str) -> upgraded.Started:
    return upgraded.start(folder, environment, **ARGUMENTS, speculative_config=config)


@pytest.fixture(scope="module")
def without_a_name(tmp_path_factory: pytest.TempPathFactory) -> upgraded.Started:
    """An engine whose vLLM lacks a name of the runner, started where that is refused, and then where it is served."""
    folder = upgraded.upgraded(tmp_path_factory.mktemp("vllm"), upgraded.without_a_name(RUNNER), "0.33.9")
    return start(folder, VLLM_SPECPLUGINS_ON_ERROR="refuse")


@pytest.fixture(scope="module")
def expected(without_a_name: upgraded.Started) -> Any:
    """What an engine without speculation emits."""
    found = without_a_name
    assert found.result and not found.result["speculates"], found.log[-3000:]
    return found.result["outputs"]


@pytest.mark.slow
def test_a_name_is_missing(without_a_name: upgraded.Started, expected: Any) -> None:
    """Under serve, the default, it serves without drafts; under refuse a sentence ends the start. Fails if a name of
    the runner that runs is not looked at."""
    refused, log = without_a_name.result["refused"], without_a_name.log  # type: ignore[index]
    assert refused.startswith("ConfigError: vllm-specplugins does not support this vLLM (vllm/")
    assert "is missing; the plugin supports vLLM" in refused and refused.endswith(
        "VLLM_SPECPLUGINS_ON_ERROR is refuse."
    )
    words = "; the server runs without speculative decoding.", "is missing; the plugin supports vLLM"
    assert [log.count(each) for each in words] == [1, 1]


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v1", reason="it is gone")
def test_v1_is_gone(tmp_path: Path, expected: Any) -> None:
    """V2 drafts, and one warning names the tested versions. Fails if V1's names are wanted of a vLLM that runs V2, or
    if something for V2 imports V1."""
    found = start(upgraded.upgraded(tmp_path, upgraded.without_v1()))
    assert found.result, found.log[-3000:]
    assert found.result["outputs"] == expected and found.result["speculates"] and found.result["drafted"] > 0
    assert found.log.count(f"was tested with vLLM {compat.SUPPORTED}, not 0.34.0+cpu. It drafts") == 1


@pytest.mark.slow
def test_a_runner_of_another_class(tmp_path: Path, expected: Any) -> None:
    """A server with such a runner serves without drafts, and logs it once. Fails if the class is not checked, so that
    the start ends, or if the scheduler plans drafts that no rank makes."""
    found = start(upgraded.upgraded(tmp_path, upgraded.another_runner(RUNNER)))
    assert found.result, found.log[-3000:]
    assert found.result["outputs"] == expected and found.result["drafted"] == 0
    words = {"v1": "does not support vLLM's model runner CPUModelRunner", "v2": "cannot build vLLM's model runner ("}
    assert found.log.count(words[RUNNER]) == found.log.count("; the server runs without speculative decoding.") == 1


def arguments(config: Any) -> Any:
    return SimpleNamespace(speculative_config=config, **dict.fromkeys(FLAGS))


CASCADE = {"method": "cascade", "stages": ["prompt_lookup", {"method": "eagle3", "model": "HEAD"}]}


@pytest.mark.skipif(ON_BOTH, reason="the front end is the same on both runners")
@pytest.mark.parametrize(
    ("config", "alone"),
    [
        (LOOKUP, None),
        (CASCADE, {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 5}),
        ({**CASCADE, "num_speculative_tokens": 3}, {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}),
        ({"method": "cascade", "stages": ["prompt_lookup", "mtp"]}, {"method": "mtp"}),
    ],
)
def test_what_serves(
    config: Any, alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a missing name, and with VLLM_SPECPLUGINS_DISABLE=1: nothing, or the drafter of vLLM that a cascade holds.
    Fails if a server does not start for our absence, or loses vLLM's drafter, too."""
    monkeypatch.setattr(compat, "probe_installed", lambda runner=None: ("vllm/x.py: Y is missing",))
    for entrance in plugin._engine_config, plugin._without_ours:
        caplog.clear()
        args = arguments(config)
        assert entrance(lambda self: self.speculative_config, args) == alone
        assert args.speculative_config is config, "the arguments are put back"
        how = f"with {alone['method']} alone." if alone else "without speculative decoding."
        ours = [record.message for record in caplog.records if record.name == "vllm.specplugins"]
        assert [message.endswith(f"the server runs {how}") for message in ours] == [True]


@pytest.mark.skipif(ON_BOTH, reason="the front end is the same on both runners")
def test_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With refuse, an untested version ends the start as well, but VLLM_SPECPLUGINS_DISABLE=1 does not. Fails if the
    choice is not asked there, or is here, or if another word is taken."""
    versions = ["0.31.2", "0.32.0+cpu", "0.33.1", "0.34.0rc1", "dev", None, "0.34.0"]
    monkeypatch.setattr(compat, "version_of", lambda *_: versions[0])
    untested = []
    while len(versions) > 1:
        untested.append(compat.untested_version())
        versions.pop(0)
    assert untested == ["0.31.2", None, None, "0.34.0rc1", "dev", "unknown"]
    assert not fallback.refuses() and compat.untested_version() == "0.34.0"
    monkeypatch.setenv("VLLM_SPECPLUGINS_ON_ERROR", "refuse")
    with pytest.raises(
        ConfigError, match=r"was tested with vLLM .*, not 0\.34\.0; .*, because VLLM_SPECPLUGINS_ON_ERROR "
    ):
        plugin._engine_config(lambda *_: None, arguments(LOOKUP))
    assert plugin._without_ours(lambda self: self.speculative_config, arguments(CASCADE)), "DISABLE serves all the same"
    monkeypatch.setenv("VLLM_SPECPLUGINS_ON_ERROR", "stop")
    with pytest.raises(ConfigError, match="VLLM_SPECPLUGINS_ON_ERROR must be serve or refuse, not 'stop'"):
        fallback.refuses()


@pytest.mark.skipif(ON_BOTH, reason="the same on both runners")
def test_who_asks_for_the_choice() -> None:
    """Only a vLLM that lacks a name or is untested, and another runner, end the start with refuse (`diagnosis` tells
    what would). Fails if a damaged store, a server that does not answer or a kernel's check asks, too."""
    folder = Path(fallback.__file__).parents[2]
    asking = {path.stem for path in folder.rglob("*.py") if re.search(r"\b(refuses|check_choice)\(", path.read_text())}
    assert asking == {"fallback", "plugin", "worker", "diagnosis"}
