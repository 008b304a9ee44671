"""The version contract against real sources: the installed vLLM, the wheel of 0.33.0, and mutants of both."""

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import newest_vllm
import pytest
import vllm_names
from conftest import RUNNER

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.built_in import refuse_second_owner, speculative_config_of
from vllm_specplugins.engine.vllm_api import compat
from vllm_specplugins.parsing import parse_config

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
FOR_V1 = ("engine/v1/", "engine/harness/forced.py")  # the latter has a class for each runner
WHEEL_VERSION = "0.33.0"  # has no CPU build yet: its source is read, not imported


@pytest.fixture(scope="module")
def source_033() -> Path:
    """vLLM 0.33.0's Python files, downloaded once into .cache/."""
    unpacked = ROOT / ".cache" / f"vllm-{WHEEL_VERSION}"
    if not (unpacked / "vllm" / "version.py").exists():
        newest_vllm.unpack(WHEEL_VERSION, unpacked)
    return unpacked / "vllm"


def installed() -> Path:
    import vllm

    return Path(vllm.__path__[0])


def test_installed_version() -> None:
    assert [compat.probe_installed(runner) for runner in (None, "v1", "v2")] == [()] * 3


def test_names_of_a_runner() -> None:
    """Fails if a name of V1 alone is wanted where V2 runs, or the other way round."""
    sizes = dict.fromkeys((None, "v1", "v2"), 0)
    for file, names in compat.names().items():
        sizes[compat.runner_of(file)] += len(names)
    assert sizes["v1"] > 100 and sizes["v2"] > 200, sizes
    for use in vllm_names.uses():  # where an object may be either's, a name for V1 stands beside one for V2
        if not use.where.startswith(FOR_V1):
            assert {compat.runner_of(file) for file, _ in use.names} != {"v1"}, use


@pytest.mark.slow
def test_033(source_033: Path) -> None:
    assert list(compat.probe(source_033)) == []


NAMES = [(file, name) for file, names in compat.names().items() for name in names]


@pytest.mark.parametrize(("file", "name"), NAMES, ids=[name for _, name in NAMES])
def test_every_name_can_fail(file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renames one name's target in a copy of its file: exactly that is reported. Kills: a probe that sees nothing."""
    # The other files are as they were: reading all of them for each name takes minutes.
    here = {file: compat.names()[file]}
    monkeypatch.setattr(compat, "names", lambda: here)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_renamed((installed() / file).read_text(), name.rpartition(".")[2]))
    assert any(f"vllm/{file}: {name} is missing" in problem for problem in compat.probe(tmp_path))


def _renamed(source: str, name: str) -> str:
    import re

    return re.sub(rf"\b{re.escape(name)}\b", f"renamed_{name}", source)


def copy_installed(folder: Path) -> None:
    """Copies the files of vLLM that have names of ours."""
    for file in compat.names():
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed() / file, target)


def test_changed_signature(tmp_path: Path) -> None:
    """One sentence reports a parameter that vLLM adds to a replaced method."""
    copy_installed(tmp_path)
    path = tmp_path / "v1/worker/gpu_model_runner.py"
    source = path.read_text().replace(
        "def _update_states(self, scheduler_output", "def _update_states(self, new, scheduler_output"
    )
    path.write_text(source)
    [problem] = compat.probe(tmp_path)
    assert problem == (
        "vllm/v1/worker/gpu_model_runner.py: GPUModelRunner._update_states lacks parameters (self, scheduler_output); "
        f"the plugin supports vLLM {compat.SUPPORTED}"
    )


@pytest.fixture
def next_vllm(tmp_path: Path) -> Path:
    """A vLLM whose speculators take more arguments, and one under another name, as upstream plans them."""
    copy_installed(tmp_path)
    folder = tmp_path / "v1/worker/gpu/spec_decode"
    for path in folder / "speculator.py", folder / "target_dependent_ar/speculator.py":
        source = path.read_text().replace("dp_sync_state:", "dp_sync:")
        path.write_text(
            source.replace("num_speculative_tokens: int | None = None,", "*, num_speculative_tokens=None, new=0,")
        )
    return tmp_path


def test_the_next_version_runs(next_vllm: Path) -> None:
    """Kills: a vLLM that is refused for an argument that our speculators pass on or ignore; one that is taken though an
    argument that they read is gone.
    """
    assert list(compat.probe(next_vllm)) == []
    path = next_vllm / "v1/worker/gpu/spec_decode/speculator.py"
    path.write_text(path.read_text().replace("num_rejected: torch.Tensor,", "rejections: torch.Tensor,"))
    assert any(
        "BaseSpeculator.propose lacks parameters (self, input_batch" in problem for problem in compat.probe(next_vllm)
    )


def test_the_next_version_moves_a_name(next_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: pages of log where vLLM has moved what we use; V1 that is switched off by what V2 alone uses."""
    for name in ("class DraftTokensHandler", "class RejectionSampler", "class AdaptiveVerificationManager"):
        for path in (next_vllm / "v1/worker/gpu/spec_decode").glob("*.py"):
            path.write_text(path.read_text().replace(name, name + "Moved"))
    monkeypatch.setattr(compat, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[next_vllm]))
    monkeypatch.setattr(compat, "probe_installed", compat.probe_installed.__wrapped__)
    compat.check_installed()
    compat.check_installed("v1")
    with pytest.raises(compat.NotSupportedError) as error:
        compat.check_installed("v2")
    sentence = str(error.value)
    assert sentence.startswith("vllm/v1/worker/gpu/spec_decode/") and sentence.count("missing") == 1


def test_second_owner_of_lengths(caplog: pytest.LogCaptureFixture) -> None:
    """A drafter that would end drafts itself by default is told not to. Kills: two that choose lengths; more than one
    sentence, or one where there is nothing to say.
    """
    config = parse_config({"method": "cascade", "stages": ["prompt_lookup", "mtp"]})
    for threshold in (0.0, 0.6):
        default = partial(SimpleNamespace, draft_confidence_threshold=threshold, prompt_lookup_max=None)
        result = speculative_config_of(default, config.stages[1], config, {"num_speculative_tokens": 3})
        assert result.draft_confidence_threshold == 0.0
    assert caplog.messages == [
        "cascade: vLLM's draft_confidence_threshold is switched off for mtp, because the cascade does lookups and sets "
        "draft lengths."
    ]


@pytest.mark.parametrize(
    "drafter", [type("NgramMTPSpeculator", (), {})(), SimpleNamespace(num_valid_drafts_for_trim=None)]
)
def test_second_owner_of_drafts(drafter: Any) -> None:
    """Kills: a cascade whose stage looks the same tokens up again, or trims drafts that the cascade's budget trims."""
    with pytest.raises(ConfigError, match=f"vLLM's {type(drafter).__name__} cannot be a stage, because it does"):
        refuse_second_owner(drafter)


def test_records_are_complete() -> None:
    """Every record of a replacement states its reason, the upstream discussion, and when it can be removed."""
    for record in compat.replaced():
        assert record.kind in {"wrap", "patch", "swap", "instance", "override"}
        assert record.why and record.remove_when and record.upstream.startswith("https://github.com/vllm-project/vllm/")


def test_missing_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    assert compat.probe_installed.__wrapped__() == ("vLLM is not installed",)
