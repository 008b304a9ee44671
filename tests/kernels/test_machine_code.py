"""Machine code that Numba has compiled: an image brings it, and no folder can be written there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib.util, sys
from numba.core import caching

def module(name):
    spec = importlib.util.spec_from_file_location(name, sys.argv[1])
    spec.loader.exec_module(made := importlib.util.module_from_spec(spec))
    return made

def refuse(*_, **__):
    raise PermissionError("read-only")

first = module("loops")
caching.tempfile.TemporaryFile = caching.IndexDataCacheFile.save = refuse
again = module("loops")
places = caching.CompileResultCacheImpl._locator_classes
caching.IndexDataCacheFile.load = lambda *_: None
unknown = module("loops")
hits = [sum(made.twice.stats.cache_hits.values()) for made in (first, again, unknown)]
print(hits, unknown.twice(4), len(places) > 1)
"""
LOOPS = """
from vllm_specplugins.kernels.compiled import compiled

@compiled("int64(int64)")
def twice(number):
    return 2 * number
"""

CHANGES = """
import sys
from importlib import import_module, invalidate_caches
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
found = []
for factor, added in ((2, 2), (3, 2), (3, 3), (3, 3)):
    text = f"from vllm_specplugins.kernels.compiled import inlined\\nFACTOR = {factor}\\n"
    text += f"@inlined\\ndef more(number):\\n    return number + {added}\\n"
    Path(sys.argv[1], "others.py").write_text(text)
    invalidate_caches()
    for name in ("others", "scaled"):
        sys.modules.pop(name, None)
    scaled = import_module("scaled").scaled
    found.append((scaled(4), sum(scaled.stats.cache_hits.values())))
print(found)
"""
SCALED = """
from others import FACTOR, more
from vllm_specplugins.kernels.compiled import compiled

@compiled("int64(int64)")
def scaled(number):
    return FACTOR * more(number)
"""


def test_read_only(tmp_path: Path) -> None:
    """Kills: a start that compiles again what lies beside a module that cannot be written; one that fails where there
    is no code for the processor; Numba's places for other packages that are gone afterwards."""
    (tmp_path / "loops.py").write_text(LOOPS)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "loops.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "[0, 1, 0] 8 True", done.stdout + done.stderr


def test_parts_of_other_modules(tmp_path: Path) -> None:
    """Kills: machine code with an old constant, or an old function, of another module, as after `git pull` in a clone
    that is installed; code that is compiled again although nothing changed."""
    (tmp_path / "scaled.py").write_text(SCALED)
    done = subprocess.run([sys.executable, "-c", CHANGES, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip() == "[(12, 0), (18, 0), (21, 0), (21, 1)]", done.stdout + done.stderr


def test_the_image_compiles_all() -> None:
    """Kills: a module with compiled loops that the Dockerfile does not import, so that each start compiles them."""
    imported = set(re.findall(r"vllm_specplugins\.[\w.]+", (ROOT / "Dockerfile").read_text()))
    sources = [*(ROOT / "vllm_specplugins").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources if "@compiled(" in path.read_text()
    ]
    served = {name for name in names if ".tools." not in name}
    assert {re.sub(r"^kernels\.", "vllm_specplugins.kernels.", name) for name in served} == imported
