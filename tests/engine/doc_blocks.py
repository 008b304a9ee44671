"""The code blocks of README and docs: shell blocks run as printed, in a folder whose PATH begins with stand-ins.

A stand-in records its arguments. `curl` then runs, against the server of a test in place of localhost:8000; so does
`python examples/chat_model.py`, which prints the demo model's folder. All else is checked afterwards.
"""

import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from vllm_specplugins.__main__ import parser
from vllm_specplugins.methods import METHODS
from vllm_specplugins.parsing import parse_config

ROOT = Path(__file__).parents[2]
GENERATED = ("commands.md", "configuration.md")
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "```" in page.read_text() and page.name not in GENERATED and page.parent.name not in ("research", "upstream")
]
STAND_IN = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
with open(os.environ["BLOCKS_LOG"], "a") as log:
    log.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
if name == "python":
    print(os.environ["BLOCKS_MODEL"])
if name == "curl":
    words = [word.replace("localhost:8000", os.environ["BLOCKS_SERVER"]) for word in sys.argv[1:]]
    os.execv("{curl}", ["curl", "--silent", "--show-error", "--fail-with-body", "--noproxy", "*", *words])
"""
COMMANDS = [
    *("git", "pip", "docker", "helm", "kubectl", "hf", "vllm", "vllm-specplugins", "python", "bash", "curl"),
    ".venv/bin/pytest",
]


class Block(NamedTuple):
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, also those within tabs."""
    fenced = re.findall(r"^( *)```(\w+)\n(.*?)^\1```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(language, dedent(code)) for _, language, code in fenced]


class Folder:
    """A user's folder after `git clone`, and the commands that ran in it."""

    def __init__(self, folder: Path, model: Path, server: str):
        self.folder, self.log = folder, folder / "commands.jsonl"
        (folder / "vllm-specplugins").mkdir()
        for name in COMMANDS:
            path = folder / (name if "/" in name else f"stand-ins/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(STAND_IN.format(python=sys.executable, curl="/usr/bin/curl"))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        for place in (folder, folder / "vllm-specplugins"):
            (place / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
            (place / ".venv" / "bin" / "activate").touch()
        settings = {"BLOCKS_LOG": str(self.log), "BLOCKS_MODEL": str(model), "BLOCKS_SERVER": server}
        self.environment = {**os.environ, **settings, "PATH": f"{folder}/stand-ins:{os.environ['PATH']}"}

    def run(self, code: str) -> tuple[str, list[list[str]]]:
        """The output of a shell block, which must succeed, and the commands that stood in."""
        self.log.write_text("")
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", code],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-1000:]}{done.stderr[-1000:]}"
        return done.stdout, [json.loads(line) for line in self.log.read_text().splitlines()]


def check_config(text: str) -> None:
    """A value of --speculative-config; those of vLLM's methods are vLLM's."""
    config = json.loads(text)
    if config["method"] in METHODS:
        parse_config(config)


@cache
def parser_of_vllm(command: str) -> Any:
    """vLLM's parser of `vllm serve` or `vllm bench serve`."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = FlexibleArgumentParser()
    (make_arg_parser if command == "serve" else add_cli_args)(arguments)
    return arguments


def check_vllm(words: list[str]) -> None:
    if words[0] == "serve":
        check_config(json.dumps(parser_of_vllm("serve").parse_args(words[1:]).speculative_config))
    else:
        assert words[:2] == ["bench", "serve"], words
        parser_of_vllm("bench serve").parse_args(words[2:])


def check_docker(words: list[str]) -> None:
    """What follows the image's name goes to `vllm serve`, which is the image's entry point."""
    if words[0] == "run" and "--entrypoint" not in words:
        check_vllm(["serve", *words[words.index("vllm-specplugins") + 1 :]])


def check_pip(words: list[str]) -> None:
    """Extras that exist, and no package of an index but vLLM's."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert words[0] in ("install", "uninstall"), words
    for word in words[1:]:
        name, _, asked = word.partition("[")
        assert name in (".", "vllm") or word.startswith("-"), word
        assert name != "." or set(asked.rstrip("]").split(",")) - {""} <= set(extras), word


def check_script(words: list[str]) -> None:
    """A script of this repository, and for tests/run.sh the jobs that it has."""
    path = ROOT / words[0]
    assert path.exists() or path.name == "NAME.py", words
    if path.name == "run.sh":
        assert all(f"\n{job}() {{" in path.read_text() for job in words[1:]), words


def check_tests(words: list[str]) -> None:
    paths = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    assert all((ROOT / path).exists() for path in paths), words


CHECKS: dict[str, Callable[[list[str]], object]] = {
    "vllm": check_vllm,
    "vllm-specplugins": lambda words: parser().parse_args(words),
    "docker": check_docker,
    "pip": check_pip,
    "python": lambda words: check_script(words) if words[0] != "-m" else None,
    "bash": check_script,
    "pytest": check_tests,
}


def check(command: list[str]) -> None:
    """Raises if a command that stood in would be refused."""
    CHECKS.get(command[0], len)(command[1:])


def check_data(block: Block) -> None:
    """A block that is no program."""
    match block.language:
        case "json":
            check_config(block.code)
        case "toml":
            tomllib.loads(block.code)
        case "yaml":
            model: dict[str, Any] = yaml.safe_load(block.code)["servingEngineSpec"]["modelSpec"][0]
            check_vllm(["serve", model["modelURL"], *model["vllmConfig"]["extraArgs"]])
        case "python":
            compile(block.code, "block", "exec")
        case other:
            raise AssertionError(f"no test runs a block of {other}")
