"""The version contract against real sources: the installed vLLM, the wheel of 0.33.0, and mutants of both."""

import shutil
from pathlib import Path

import newest_vllm
import pytest
from conftest import RUNNER

from vllm_specplugins.engine.vllm_api import compat

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
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
    assert compat.probe_installed() == ()


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


def test_changed_signature(tmp_path: Path) -> None:
    """A parameter added to the method that we replace is seen, and said in one sentence."""
    for file in compat.names():
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed() / file, target)
    path = tmp_path / "v1/worker/gpu_model_runner.py"
    source = path.read_text().replace(
        "def _update_states(self, scheduler_output", "def _update_states(self, new, scheduler_output"
    )
    path.write_text(source)
    [problem] = compat.probe(tmp_path)
    assert problem == (
        "vllm/v1/worker/gpu_model_runner.py: GPUModelRunner._update_states does not take (self, scheduler_output); "
        f"supported is vLLM {compat.SUPPORTED}"
    )


def test_records_are_complete() -> None:
    """Every record of what is replaced says why it is there, where upstream discusses it, and when it can go."""
    for record in compat.replaced():
        assert record.kind in {"wrap", "patch", "swap", "instance", "override"}
        assert record.why and record.remove_when and record.upstream.startswith("https://github.com/vllm-project/vllm/")


def test_missing_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    assert compat.probe_installed.__wrapped__() == ("vLLM is not installed",)
