"""The version contract: every name of vLLM that we replace, override or read, in lists that can be checked.

The lists stand in seams.py (functions, and all that we replace) and members.py (of objects), in versions/, v1/ and v2/;
a test holds them against all that our sources use. The check reads vLLM's source and imports nothing of
it, so it serves an installed vLLM as well as an unpacked wheel of another version.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from vllm_specplugins.engine.v1.members import V1_MEMBERS
from vllm_specplugins.engine.v1.seams import V1
from vllm_specplugins.engine.v2.members import V2_MEMBERS
from vllm_specplugins.engine.v2.seams import V2
from vllm_specplugins.engine.versions.members import COMMON_MEMBERS
from vllm_specplugins.engine.versions.seam import Seam
from vllm_specplugins.engine.versions.seams import COMMON

SUPPORTED = ">=0.32,<0.34"
SEAMS: tuple[Seam, ...] = (*COMMON, *COMMON_MEMBERS, *V1, *V1_MEMBERS, *V2, *V2_MEMBERS)


@cache
def probe_installed() -> tuple[str, ...]:
    """What the installed vLLM lacks of SEAMS, one sentence each; empty if we can run on it."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ("vLLM is not installed",)
    return tuple(probe(Path(spec.submodule_search_locations[0])))


def probe(package: Path) -> Iterator[str]:
    """Checks SEAMS against the source of vLLM in the folder `package`; yields a sentence for each that fails."""
    modules: dict[str, ast.Module | None] = {}
    for seam in SEAMS:
        if seam.file not in modules:
            path = package / seam.file
            modules[seam.file] = ast.parse(path.read_text()) if path.is_file() else None
        module = modules[seam.file]
        where = f"vllm/{seam.file}: {seam.name}"
        if module is None or (found := _find(module, seam.name)) is None:
            yield f"{where} is missing; supported is vLLM {SUPPORTED}"
        elif seam.parameters is not None:
            parameters = _parameters(found)
            if parameters != seam.parameters:
                wanted = ", ".join(seam.parameters)
                yield f"{where} does not take ({wanted}); supported is vLLM {SUPPORTED}"


def _find(module: ast.Module, name: str) -> ast.AST | None:
    """The node that binds `name` in a module, or a method or attribute in one of its classes."""
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


def _parameters(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = node.args
    return tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
