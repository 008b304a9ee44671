"""The command line refuses with one sentence, never a traceback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_specplugins import __main__
from vllm_specplugins.__main__ import main, parser
from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.report import write_json

TRAIN = ["train-exit-head", "MODEL", "--dataset-path", "DATA", "--exit-layer", "1", "--out", "OUT", "--steps", "1"]
CALIBRATE = ["calibrate", "MODEL", "--dataset-path", "DATA"]
REFUSED = {
    "no command": ([], "required: COMMAND"),
    "unknown command": (["tune"], "invalid choice: 'tune'"),
    "no data": (["calibrate", "MODEL"], "required: --dataset-path"),
    "layer 0": ([*TRAIN, "--exit-layer", "0"], "--exit-layer: must be an integer from 1 to 10000, not '0'"),
    "no number": ([*TRAIN, "--steps", "five"], "--steps: must be an integer from 1 to 10000000, not 'five'"),
    "last layer": ([*TRAIN, "--exit-layer", "3"], "--exit-layer must be an integer from 1 to 2 for this model, not 3"),
    "rate": ([*TRAIN, "--learning-rate", "nan"], "--learning-rate: must be a number between 0 and 1, not 'nan'"),
    "device": ([*TRAIN, "--device", "tpu"], "--device: invalid choice: 'tpu'"),
    "no file": (
        [*TRAIN, "--dataset-path", "nowhere.txt"],
        "--dataset-path must be readable files, not nowhere.txt (No such file",
    ),
    "little text": (
        [*TRAIN, "--dataset-path", "SHORT"],
        "--dataset-path must have at least 2 rows of up to 512 tokens, not 1",
    ),
    "no model": (["calibrate", "./nowhere", "--dataset-path", "DATA"], "a folder with a config.json, not './nowhere'"),
    "broken model": (
        ["calibrate", "BROKEN", "--dataset-path", "DATA"],
        "MODEL must be a checkpoint that transformers can load",
    ),
    "nested model": (
        ["calibrate", "NESTED", "--dataset-path", "DATA"],
        "MODEL must be a checkpoint that transformers can load",
    ),
    "model without a tokenizer": (
        ["calibrate", "TOKENLESS", "--dataset-path", "DATA"],
        "MODEL must be a checkpoint that transformers can load",
    ),
    "broken tokenizer": (
        ["replay", "--dataset-path", "DATA", "--tokenizer", "BROKEN"],
        "error: MODEL must be a checkpoint that ",
    ),
    "report is a folder": (
        ["verify-lossless", "--output-json", "/tmp"],
        "--output-json must be a file in an existing folder, not ",
    ),
    "out is a file": ([*TRAIN, "--out", "SHORT"], "--out must be a writable folder, not "),
    "out has other files": ([*TRAIN, "--out", "MODEL"], "--out must be a new or empty folder, not "),
    "layers": ([*CALIBRATE, "--exit-layers", "1;2"], "--exit-layers: must be an integer from 1 to 10000, not '1;2'"),
    "layers too high": (
        [*CALIBRATE, "--exit-layers", "1,3"],
        "--exit-layers must be integers from 1 to 2 for this model, not [1, 3]",
    ),
    "few tokens": ([*CALIBRATE, "--output-len", "9"], "--output-len must be at least 16 with --max-draft 8, not 9"),
    "a part that is not there": (
        [*CALIBRATE, "--also", '{"method": "jump", "head": "nowhere"}'],
        "jump: head must be a folder with the config.json of a head, not one without it (No such file or directory)",
    ),
    "a log and a task": (["bench", "--trace", "DATA", "--workloads", "edit"], "remove --workloads and --dataset-path"),
    "a rate without a log": (["bench", "--rate", "0.5"], "--rate and --drafter need --trace"),
    "a log of text": (["bench", "--model", "MODEL", "--trace", "DATA"], "as token ids to be forced, not as text"),
    "no method": (["verify-lossless", "--method", "eagle"], "--method must be prompt_lookup, suffix_lookup,"),
    "half of JSON": (["verify-lossless", "--method", '{"method":'], "--method must be names or JSON, not "),
    "no name": (["verify-lossless", "--method", '{"stages": []}'], "--method must name a method, "),
    "samples": (["verify-lossless", "--samples", "99"], "--samples: must be an integer from 100 to 10000000, not '99'"),
    "no folder": (
        ["verify-lossless", "--output-json", "/nowhere/r"],
        "--output-json must be a file in an existing folder, not ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tiny_model: Path, text_files: list[Path], tmp_path: Path, refused: Any) -> None:
    """Kills: a check that is left out, more than one line, another exit status."""
    (tmp_path / "short.txt").write_text("alpha beta gamma delta " * 5)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    names = {"MODEL": tiny_model, "DATA": text_files[0], "OUT": tmp_path / "out", "SHORT": tmp_path / "short.txt"}
    names["BROKEN"] = tmp_path / "broken"
    names["NESTED"] = shutil.copytree(names["BROKEN"], tmp_path / "nested")
    (names["NESTED"] / "config.json").write_text('{"a":' * 50_000)
    names["TOKENLESS"] = shutil.copytree(tiny_model, tmp_path / "tokenless")
    (names["TOKENLESS"] / "tokenizer.json").write_bytes(bytes(range(256)))
    arguments, words = REFUSED[name]
    assert words in refused(*(names.get(argument, argument) for argument in arguments))


@pytest.mark.parametrize("name", ["vllm", "rich"])
def test_missing_package(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Kills: an ImportError for somebody without the package; a name to install that is on no index."""
    real = __main__.find_spec
    monkeypatch.setattr(__main__, "find_spec", lambda module: None if module == name else real(module))
    assert main(CALIBRATE) == 2
    expected = f"error: calibrate needs {name}, which is not installed (pip install {name}).\n"
    assert capsys.readouterr().err == f"vllm-specplugins calibrate: {expected}"


def test_another_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Kills: a traceback where vLLM has moved a name."""

    def moved(name: str) -> Any:
        raise ImportError("cannot import name 'LLM' from 'vllm'")

    monkeypatch.setattr(__main__, "import_module", moved)
    assert main(CALIBRATE) == 2
    assert capsys.readouterr().err.endswith("calibrate stopped (cannot import name 'LLM' from 'vllm').\n")


def test_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If a report cannot be printed, one sentence states the reason. Fails if the command ends in a traceback."""

    def run(args: object) -> int:
        with open("/dev/full", "w") as full:
            full.write("figures")
        return 0

    monkeypatch.setattr(__main__, "import_module", lambda name: SimpleNamespace(run=run))
    assert main(CALIBRATE) == 2
    assert capsys.readouterr().err == (
        "vllm-specplugins calibrate: error: calibrate stopped (No space left on device).\n"
    )


def test_a_report_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a full disk costs the last report, or if a device is replaced."""
    path = tmp_path / "report.json"
    write_json(path, {"number": 1})
    with pytest.raises(ConfigError, match="--output-json must be a writable file"):
        write_json(Path("/dev/full"), {})
    with monkeypatch.context() as patches:
        patches.setattr(Path, "write_bytes", lambda path, data: os.write(os.open("/dev/full", os.O_WRONLY), data))
        with pytest.raises(ConfigError, match="No space left on device"):
            write_json(path, {"number": 2})
    assert json.loads(path.read_text()) == {"number": 1} and len(list(tmp_path.iterdir())) == 1
    write_json(path, {"number": 3})
    assert json.loads(path.read_text()) == {"number": 3}


# A command that starts a process, as `bench` starts engines, and waits for it. The process prints when it begins.
WAITS = """
import os, signal, sys, time
from types import SimpleNamespace
from vllm_specplugins import __main__
from vllm_specplugins.engine.harness.process import EngineProcess
from vllm_specplugins.tools.files import scratch

if __name__ == "__mp_main__":
    print("begins", os.getpid(), flush=True)
    time.sleep(1)

def wait(pipe):
    pipe.send(1)
    time.sleep(60)

def run(args):
    with scratch() as folder, EngineProcess(folder / "log", "", wait) as process:
        process.receive()
        print("waits", process._process.pid, flush=True)
        process.receive()

__main__.import_module = lambda name: SimpleNamespace(run=run)
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests
    sys.exit(__main__.program())
"""


@pytest.mark.parametrize(("word", "num_times"), [("begins", 1), ("waits", 3)])
def test_interrupted(word: str, num_times: int, tmp_path: Path) -> None:
    """Ctrl-C reaches a whole group of processes, as from a terminal. Fails if it ends in a traceback, of the command or
    of a process that this started, or if that process or its folder is left over, however often somebody presses it."""
    (tmp_path / "waits.py").write_text(WAITS)
    running = subprocess.Popen(
        [sys.executable, str(tmp_path / "waits.py"), "doctor"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert running.stdout is not None
    pid = next(int(line.split()[1]) for line in running.stdout if word in line)
    os.kill(pid, signal.SIGINT)  # of which the process hears nothing
    time.sleep(0.1)
    for _ in range(num_times):
        os.killpg(running.pid, signal.SIGINT)
        time.sleep(0.05)
    _, error = running.communicate(timeout=20)
    assert running.returncode in (130, -signal.SIGINT) and error in ("", "Interrupted.\n")
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # multiprocessing's own process ends a moment later
            os.killpg(running.pid, 0)
            time.sleep(0.03)
    assert [path.name for path in tmp_path.iterdir() if "waits" not in path.name] == []


def test_help_is_light() -> None:
    """Kills: a command line that takes seconds to say how it is used."""
    heavy = ("torch", "transformers", "vllm", "rich")
    code = f"""
import sys
from vllm_specplugins.__main__ import main, parser
try:
    main(["calibrate", "--help"])
finally:
    print(sorted(set({heavy}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_names_of_vllm() -> None:
    """Kills: a flag that has another name than vLLM's own commands give it; one that fills another field."""
    given = "--max-concurrency 2,4 --dataset-path a.jsonl --output-json b.json --num-prompts 6 --output-len 7"
    args = parser().parse_args(["bench", *given.split()])
    assert (args.max_concurrency, args.num_prompts, args.output_len) == ([2, 4], 6, 7)
    assert ([path.name for path in args.dataset_path], args.output_json.name) == (["a.jsonl"], "b.json")
    assert parser().parse_args(["doctor", "--json"]).json is True
