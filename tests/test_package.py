"""The package as users get it: its archives, an installation, an upgrade from 0.1.0, the container and the removal.

The environment is empty but for links to the packages that vLLM needs; SPECPLUGINS_TESTS=all also installs those.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.specifiers import SpecifierSet

import vllm_specplugins
from vllm_specplugins.engine.vllm_api import compat

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "demo" / "model"
PIP = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
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
    """A wheel that was built from the sdist, which lies beside it."""
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


def alone(python: Path) -> dict[str, str]:
    """Environment variables of a process that sees no package beside those of `python`."""
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
    assert [step for step, _ in steps] == ["ARG", "FROM", "RUN"]
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
