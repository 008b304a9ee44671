"""Methods that another package registers: a real distribution in a folder on the path."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_specplugins.config import ConfigError, CustomConfig, SpecConfig
from vllm_specplugins.custom import registrations
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.methods import METHODS, build_proposer
from vllm_specplugins.parsing import parse_config, registered_methods
from vllm_specplugins.request_options import Limits, understood

THIRD_PARTY = Path(__file__).parent / "third_party"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(THIRD_PARTY))


def built(config: SpecConfig) -> Any:
    return build_proposer(config, ProposerContext(100, 64, 4, 4, tokenize=lambda text: []))


def test_by_name() -> None:
    """Kills: a broken neighbour that takes the good ones down, or is imported before it is asked for."""
    assert set(registered_methods()) == {"repeat", "repeat_plain", "breaks", "exits", "old", "on_device"}
    config = parse_config({"method": "repeat", "times": 3, "num_speculative_tokens": 4})
    assert config.method == "repeat" and isinstance(config.method_config, CustomConfig)
    assert built(config)._times == 3
    assert built(parse_config({"method": "repeat_plain", "options": {"times": 1}}))._times == 1
    assert "specplugins_example.exits" not in sys.modules


def test_as_a_stage() -> None:
    stages = [{"method": "prompt_lookup"}, {"method": "repeat", "times": 4}]
    config = parse_config({"method": "cascade", "gate": "off", "stages": stages})
    assert [stage.method for stage in config.method_config.stages] == ["prompt_lookup", "repeat"]
    assert [stage.title for stage in built(config).stages] == ["0 prompt_lookup", "1 repeat"]
    limits = Limits(config, 100, 64)
    understood({"stages": ["repeat"], "its_own": 1}, limits)
    with pytest.raises(ConfigError, match="is not an option"):
        understood({"its_own": 1}, Limits(parse_config({"method": "prompt_lookup"}), 100, 64))


REFUSED = {
    "a field": ({"method": "repeat", "times": 9}, "repeat: times must be an integer from 1 to 8, not 9."),
    "no field": ({"method": "repeat", "time": 9}, "repeat: 'time' is not a field; the fields are times, num_spec"),
    "a rule of its own": ({"method": "repeat", "times": 5}, "repeat: times must not be 5."),
    "the proposer": ({"method": "repeat_plain", "proposer": "a:B"}, "repeat_plain: 'proposer' is not a field: "),
    "a module that is not there": (
        {"method": "breaks"},
        "breaks: proposer 'specplugins_example.nowhere:Nothing' cannot",
    ),
    "a module that exits": ({"method": "exits"}, "exits: proposer 'specplugins_example.exits:Nothing' cannot be imp"),
    "another protocol": ({"method": "old"}, "old: protocol_version of specplugins_example:Old must be 1, the "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """One sentence that begins with the method's name."""
    raw, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    sentence = str(caught.value)
    assert sentence.startswith(words) and sentence.endswith((".", "?"))


def test_names_that_are_taken() -> None:
    """Ours, vLLM's, and one that two packages want. Kills: a package that replaces a method."""
    reserved = (*METHODS, "eagle")
    refusals = {found.name: found.refusal for found in registrations(reserved) if found.refusal}
    assert refusals == {
        name: f"the method {name!r} of the package 'specplugins-example' is refused: the plugin or vLLM already has a "
        "method with this name."
        for name in ("eagle", "prompt_lookup")
    }
    assert built(parse_config({"method": "prompt_lookup"})).__class__.__module__.startswith("vllm_specplugins")


def test_two_packages_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "another-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm_specplugins.proposers]\nrepeat = another:Thing\n1x = another:Thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    refusals = {(found.package, found.name): found.refusal or "" for found in registrations()}
    for package in ("another", "specplugins-example"):
        assert "another entry point registers the same name" in refusals[package, "repeat"]
    assert "begin with a letter" in refusals["another", "1x"]
    assert "repeat" not in registered_methods() and "repeat_plain" in registered_methods()


def test_a_package_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Kills: a METADATA, or a list of entry points, that is no UTF-8 and takes all other methods down."""
    for name, file in (("one", "METADATA"), ("two", "entry_points.txt")):
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[vllm_specplugins.proposers]\n{name} = {name}:Thing\n")
        (info / file).write_bytes((info / file).read_bytes() + b"# \xff\xfe")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert set(registered_methods()) == {"repeat", "repeat_plain", "breaks", "exits", "old", "on_device"}
    assert all(f"{name}-1.dist-info is ignored" in caplog.text for name in ("one", "two"))


def test_command_line_names_them() -> None:
    """Registered methods are in --help, and in the error for an unknown name."""
    environment = {"PYTHONPATH": str(THIRD_PARTY), "PATH": "/usr/bin", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_specplugins", "--help"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert f"{', '.join(METHODS)}, breaks, exits, old, on_device, repeat, repeat_plain." in done.stdout
