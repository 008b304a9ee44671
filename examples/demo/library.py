"""Text that is on every machine: the Python standard library, and edit tasks made from it, which ask for a copy of some
code with one identifier renamed, or none. The demo model is trained on the files that are not held out, and its prompts
are made of those that are."""

import ast
import hashlib
import keyword
import random
import re
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Third-party code, generated tables, and files that are broken on purpose.
EXCLUDED = ("site-packages/", "lib2to3/tests/data/", "pydoc_data/", "encodings/", "test/encoded_modules/")

WORDS = """
active amount anchor bottom branch bucket buffer candle carrier center channel chunk cluster column corner
counter cursor delta depth device digest draft edge engine extra factor field filter final folder frame
front garden gather handle header height hidden holder image index inner input item kernel label layer
ledger left length level limit local margin marker matrix member middle mirror motor needle number offset
option order outer output owner packet panel parcel phase piece pillar pocket point portal prefix queue
random range rank ratio reader record region remote report result right river root sample scale second
segment shadow shape signal silver simple slot source spare spiral stable stage start state station step
stream string suffix table target ticket total track travel upper value vector visit wanted weight width
window winter writer
""".split()  # noqa: SIM905


def is_held_out(source: str) -> bool:
    """Whether the file at `source` (a path relative to the library) is held out of training."""
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % 40 == 0


def library_files() -> Iterator[tuple[str, str]]:
    """(relative path, text) of the interpreter's standard library, in the order of the paths."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        source = path.relative_to(root).as_posix()
        if source.startswith(EXCLUDED):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield source, text


def snippets(text: str, min_lines: int = 10, max_lines: int = 60) -> Iterator[str]:
    """The functions and classes of a source file that have min_lines to max_lines lines, dedented."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            code = lines[node.lineno - 1 : node.end_lineno]
            if min_lines <= len(code) <= max_lines:
                yield textwrap.dedent("\n".join(code)) + "\n"


def edit_prompt(code: str, rng: random.Random) -> str:
    """A prompt that ends with `# After:`. Four in five rename an identifier that occurs twice; others repeat `code`.

    >>> edit_prompt("x = 1\\n", random.Random(0))
    '# Repeat the code.\\n# Before:\\nx = 1\\n# After:\\n'
    """
    counts = Counter(re.findall(r"\b[A-Za-z_]\w{2,}\b", code))
    names = [name for name, count in counts.items() if count >= 2 and not keyword.iskeyword(name)]
    new = "_".join(rng.sample(WORDS, rng.choice((1, 2))))
    if names and new not in counts and rng.random() < 0.8:
        task = f"Rename `{rng.choice(names)}` to `{new}`."
    else:
        task = "Repeat the code."
    return f"# {task}\n# Before:\n{code}# After:\n"
