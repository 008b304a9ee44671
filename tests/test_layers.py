"""The arrows of DESIGN.md, read from the source: who may import whom."""

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_specplugins"

# Each part of the package, and the parts of ours that it may import. `engine` may import all of them.
MAY_IMPORT = {
    "config": set(),
    "target": set(),
    "kernels": set(),
    "draft": {"target"},
    "counters": {"draft"},
    "structures": {"draft", "kernels"},
    "stage": {"counters", "draft"},
    "isolation": {"config", "counters", "draft", "request_options", "stage", "structures"},
    "proposers": {"config", "draft", "kernels", "stage", "structures", "target"},
    "gate": {"counters", "draft", "kernels", "structures"},
    "cascade": {
        "config",
        "counters",
        "draft",
        "gate",
        "isolation",
        "kernels",
        "methods",
        "proposers",
        "request_options",
        "stage",
        "structures",
        "target",
    },
    "request_options": {"config"},
    "custom": {"config", "draft", "isolation"},
    "methods": {"config", "custom", "draft"},
    "device": {"draft"},
    "plan": {"config", "methods"},
    "parsing": {"config", "custom", "methods"},
    "arguments": {"config"},
    "commands": {"arguments"},
    "__main__": {"__version__", "arguments", "commands", "config", "methods", "parsing"},
    "__init__": {"config", "engine"},
}
_BELOW = {*MAY_IMPORT} - {"arguments", "commands", "__main__", "__init__"}
MAY_IMPORT |= {"engine": _BELOW, "tools": _BELOW - {"cascade"} | {"engine"}}
# Likewise the rooms of the engine.
IN_ENGINE_MAY_IMPORT = {
    "codec": set(),
    "hooks": set(),
    "messages": set(),
    "built_in": set(),
    "trees": {"verify"},
    "switch": {"hooks", "messages"},
    "room": {"messages"},
    "masks": {"hooks"},
    "grammar": {"codec", "frontend", "messages", "room", "scheduler"},
    "profile": {"hooks"},
    "self_check": set(),
    "scheduler": {"frontend", "messages", "metrics", "room", "switch"},
    "session": {"messages"},
    "vllm_api": set(),
    "metrics": {"hooks", "messages", "session"},
    "adaptive": {"frontend", "hooks", "verify"},
    "verify": set(),
    "target": {"hooks"},
    "frontend": {
        "built_in",
        "hooks",
        "masks",
        "metrics",
        "self_check",
        "switch",
        "target",
        "trees",
        "verify",
        "vllm_api",
    },
    "learning": set(),
    "v1": {"built_in", "frontend", "grammar", "hooks", "learning", "messages", "session", "target", "verify"},
    "v2": {
        "adaptive",
        "built_in",
        "frontend",
        "grammar",
        "hooks",
        "learning",
        "masks",
        "messages",
        "self_check",
        "session",
        "target",
        "trees",
        "verify",
    },
    "worker": {
        "codec",
        "frontend",
        "hooks",
        "messages",
        "metrics",
        "profile",
        "session",
        "switch",
        "v1",
        "v2",
        "vllm_api",
    },
    "harness": {"codec", "frontend", "hooks", "messages", "vllm_api"},
    "__init__": set(),
}
IN_V2_MAY_IMPORT = {
    "requests": set(),
    "feedback": {"requests"},
    "learning": {"feedback", "requests"},
    "memory": set(),
    "verification": set(),
    "speculators": {"feedback", "memory", "requests", "verification"},
    "trees": {"requests", "speculators"},
    "runner": {"feedback", "learning", "memory", "requests", "speculators", "verification"},
    "__init__": set(),
}
HEAVY = {"vllm", "torch", "triton", "transformers"}


def imports(path: Path) -> set[str]:
    """Dotted names of everything that a source file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or "kernels" in path.parts, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(path: Path, of: Path = PACKAGE) -> str:
    if path.is_relative_to(ROOT / "kernels"):
        return "kernels"
    relative = path.relative_to(of)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


SOURCES = [*PACKAGE.rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path: Path) -> None:
    """Kills: vLLM imported outside of engine/; a proposer that imports the engine; kernels that import ours."""
    part = part_of(path)
    names = imports(path)
    if part != "engine":
        assert not {name for name in names if name.split(".")[0] == "vllm"}
        ours = {name.split(".")[1] for name in names if name.startswith("vllm_specplugins.")}
        assert ours <= MAY_IMPORT[part] | {part}
    if part == "tools":  # vLLM is timed from outside
        engines = {name for name in names if name.startswith("vllm_specplugins.engine")}
        assert all(name.startswith("vllm_specplugins.engine.harness") for name in engines)
    if not path.stem.endswith("fused") and part != "engine":
        assert "triton" not in {name.split(".")[0] for name in names}
    if path.name == "__init__.py":
        assert not {name.split(".")[0] for name in names} & HEAVY


@pytest.mark.parametrize(
    ("folder", "may_import"),
    [("vllm_specplugins", MAY_IMPORT), ("engine", IN_ENGINE_MAY_IMPORT), ("engine/v2", IN_V2_MAY_IMPORT)],
)
def test_no_circles(folder: str, may_import: dict[str, set[str]]) -> None:
    """Kills: an arrow in a table that leads back; a room of the engine that imports upwards, also in a function."""
    place = PACKAGE if folder == "vllm_specplugins" else PACKAGE / folder
    prefix = ".".join(place.relative_to(ROOT).parts) + "."
    arrows: dict[str, set[str]] = {part: set() for part in may_import}
    for path in place.rglob("*.py"):
        part = part_of(path, place)
        named = {name.removeprefix(prefix).split(".")[0] for name in imports(path) if name.startswith(prefix)}
        arrows[part] |= {name for name in named if name in may_import or (place / name).exists()} - {part}
    assert all(arrows[part] <= may_import[part] for part in arrows), arrows
    assert tuple(TopologicalSorter(may_import).static_order())


def test_import_is_light() -> None:
    """Importing the package, and all of it but the engine, loads neither vLLM nor torch nor Triton."""
    modules = [
        "vllm_specplugins",
        "vllm_specplugins.methods",
        "vllm_specplugins.isolation.barrier",
        "vllm_specplugins.proposers.prompt_lookup",
        "vllm_specplugins.kernels",
        "vllm_specplugins.engine",
        "vllm_specplugins.engine.harness.serving",
        "vllm_specplugins.tools",
        "vllm_specplugins.__main__",
    ]
    code = f"import sys, {', '.join(modules)}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_every_engine_imports_compiles_nothing() -> None:
    """The plugin is imported wherever vLLM runs. Kills: numba in a process that asks for no method of ours, where vLLM
    on a CPU dies of its objects."""
    code = "import sys, vllm_specplugins.engine.frontend.plugin; print(sorted({'numba', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_no_top_level_kernels() -> None:
    """Hugging Face's `kernels` must stay importable: ours lives inside our package."""
    code = "import importlib.util as u; print(u.find_spec('vllm_specplugins.kernels') is not None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "True"


def test_packages_are_whole() -> None:
    """Fails if a folder with modules is left out of what `pip install` brings: a clone would not miss it."""
    folders = {module.parent.relative_to(ROOT) for part in (PACKAGE, ROOT / "kernels") for module in part.rglob("*.py")}
    own = [".".join(("vllm_specplugins", *f.parts) if f.parts[0] == "kernels" else f.parts) for f in folders]
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(own)
