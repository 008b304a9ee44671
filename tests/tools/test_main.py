"""The command line refuses with one sentence, never a traceback."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_specplugins import __main__
from vllm_specplugins.__main__ import main

TRAIN = ["train-exit-head", "MODEL", "--data", "DATA", "--exit-layer", "1", "--out", "OUT", "--steps", "1"]
CALIBRATE = ["calibrate", "MODEL", "--data", "DATA"]
REFUSED = {
    "no command": ([], "required: COMMAND"),
    "unknown command": (["tune"], "invalid choice: 'tune'"),
    "no data": (["calibrate", "MODEL"], "required: --data"),
    "layer 0": ([*TRAIN, "--exit-layer", "0"], "--exit-layer: must be an integer from 1 to 10000, not '0'"),
    "no number": ([*TRAIN, "--steps", "five"], "--steps: must be an integer from 1 to 10000000, not 'five'"),
    "last layer": ([*TRAIN, "--exit-layer", "3"], "--exit-layer must be an integer from 1 to 2 for this model, not 3"),
    "rate": ([*TRAIN, "--learning-rate", "nan"], "--learning-rate: must be a number between 0 and 1, not 'nan'"),
    "device": ([*TRAIN, "--device", "tpu"], "--device: invalid choice: 'tpu'"),
    "no file": ([*TRAIN, "--data", "nowhere.txt"], "--data must be readable files, not nowhere.txt (No such file"),
    "little text": ([*TRAIN, "--data", "SHORT"], "--data must hold at least 2 rows of up to 512 tokens, not 1"),
    "no model": (["calibrate", "./nowhere", "--data", "DATA"], "a folder with a config.json, not './nowhere'"),
    "broken model": (
        ["calibrate", "BROKEN", "--data", "DATA"],
        "MODEL must be a checkpoint that transformers can load",
    ),
    "out is a file": ([*TRAIN, "--out", "SHORT"], "--out must be a folder that can be written, not "),
    "layers": ([*CALIBRATE, "--layers", "1;2"], "--layers: must be an integer from 1 to 10000, not '1;2'"),
    "layers too high": (
        [*CALIBRATE, "--layers", "1,3"],
        "--layers must be integers from 1 to 2 for this model, not [1, 3]",
    ),
    "few tokens": ([*CALIBRATE, "--tokens", "9"], "--tokens must be at least 16 with --max-draft 8, not 9"),
    "no method": (["verify-lossless", "--method", "eagle"], "--method must be of prompt_lookup, suffix_lookup,"),
    "half of JSON": (["verify-lossless", "--method", '{"method":'], "--method must be names or JSON, not "),
    "no name": (["verify-lossless", "--method", '{"stages": []}'], "--method must name a method, "),
    "samples": (["verify-lossless", "--samples", "99"], "--samples: must be an integer from 100 to 10000000, not '99'"),
    "no folder": (["verify-lossless", "--json", "/nowhere/r"], "--json must be a file in a folder that is there, not "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(
    name: str, tiny_model: Path, text_files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kills: a check that is left out, more than one line, another exit status."""
    (tmp_path / "short.txt").write_text("alpha beta gamma delta " * 5)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    names = {"MODEL": tiny_model, "DATA": text_files[0], "OUT": tmp_path / "out", "SHORT": tmp_path / "short.txt"}
    names["BROKEN"] = tmp_path / "broken"
    arguments, words = REFUSED[name]
    try:
        status = main([str(names.get(argument, argument)) for argument in arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2 and words in error
    assert error.startswith("error: ") and error.endswith(".\n") and error.count("\n") == 1


@pytest.mark.parametrize(("name", "extra"), [("vllm", "vllm"), ("rich", "tools")])
def test_missing_package(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kills: an ImportError for somebody without the extra."""
    real = __main__.find_spec
    monkeypatch.setattr(__main__, "find_spec", lambda module: None if module == name else real(module))
    assert main(CALIBRATE) == 2
    expected = f"error: calibrate needs {name}, which is not installed (pip install 'vllm-specplugins[{extra}]').\n"
    assert capsys.readouterr().err == expected


def test_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a report cannot be printed, one sentence says why. Fails if that ends in a traceback."""

    def run(args: object) -> int:
        with open("/dev/full", "w") as full:
            full.write("figures")
        return 0

    monkeypatch.setattr(__main__, "import_module", lambda name: SimpleNamespace(run=run))
    assert main(CALIBRATE) == 2
    assert capsys.readouterr().err == "error: calibrate cannot go on (No space left on device).\n"


def test_help_is_light() -> None:
    """Kills: a command line that takes seconds to say how it is used."""
    heavy = ("torch", "transformers", "vllm", "rich")
    code = f"""
import sys
from vllm_specplugins.__main__ import main
try:
    main(["calibrate", "--help"])
finally:
    print(sorted(set({heavy}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
