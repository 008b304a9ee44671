"""Text for the demo model: the standard library, split by file, and edit tasks made from it.

Files whose path hashes to 0 modulo 40 are held out: no training row is made of them, and every prompt in
`heldout.jsonl` is. An edit task asks for a copy of some code with one identifier renamed (or none), in a
fixed plain format, so that most of the answer can be looked up in the prompt. Running this file writes
`heldout.jsonl` again. Nothing here knows about models, and only `main` needs the tokenizer.
"""

import ast
import hashlib
import json
import keyword
import random
import re
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
HELDOUT_FILE = HERE / "heldout.jsonl"
KINDS = ("continue", "edit")

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
    """Whether the file at `source` (a path relative to the library) is kept out of training."""
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % 40 == 0


def library_files() -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of the interpreter's standard library, in the order of the paths."""
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
    """Yields the functions and classes of a source file that have min_lines to max_lines lines, dedented."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            code = lines[node.lineno - 1 : node.end_lineno]
            if min_lines <= len(code) <= max_lines:
                yield textwrap.dedent("\n".join(code)) + "\n"


def rename(code: str, old: str, new: str) -> str:
    """`code` with every whole word `old` replaced by `new`."""
    return re.sub(rf"\b{re.escape(old)}\b", new, code)


def edit_task(code: str, rng: random.Random) -> tuple[str, str]:
    """Returns (prompt, answer): the prompt ends with the line `# After:`, the answer with `# End.`.

    Four tasks in five rename an identifier that occurs at least twice in `code`; the others repeat the code.

    >>> prompt, answer = edit_task("x = 1\\n", random.Random(0))
    >>> answer
    'x = 1\\n# End.\\n'
    """
    counts = Counter(re.findall(r"\b[A-Za-z_]\w{2,}\b", code))
    names = [name for name, count in counts.items() if count >= 2 and not keyword.iskeyword(name)]
    new = "_".join(rng.sample(WORDS, rng.choice((1, 2))))
    if names and new not in counts and rng.random() < 0.8:
        task = f"Rename `{rng.choice(names)}` to `{new}`."
    else:
        task = "Repeat the code."
    prompt = f"# {task}\n# Before:\n{code}# After:\n"
    return prompt, edit_answer(prompt)


def edit_answer(prompt: str) -> str:
    """The correct continuation of an edit prompt, `# End.` included."""
    task, code = re.fullmatch(r"# (.*)\n# Before:\n(.*)# After:\n", prompt, re.DOTALL).groups()
    names = re.fullmatch(r"Rename `(\w+)` to `(\w+)`\.", task)
    return (rename(code, *names.groups()) if names else code) + "# End.\n"


def load_prompts(kind: str, count: int) -> list[str]:
    """The first `count` held-out prompts of a kind: "continue" or "edit".

    >>> len(load_prompts("edit", 2))
    2
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}")
    rows = (json.loads(line) for line in HELDOUT_FILE.read_text(encoding="utf-8").splitlines())
    texts = [row["text"] for row in rows if row["kind"] == kind]
    if not 1 <= count <= len(texts):
        raise ValueError(f"count is {count}; allowed for kind {kind!r}: 1 to {len(texts)}")
    return texts[:count]


def continue_prompts(
    tokenizer: "Tokenizer", files: list[tuple[str, str]], rng: random.Random
) -> Iterator[dict[str, str]]:
    """Endless beginnings, 100 to 600 tokens long, of files and of their longer functions and classes."""
    while True:
        source, text = rng.choice(files)
        text = rng.choice([text, *snippets(text, 20, 200)])
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        length = rng.randint(100, 600)
        if length < len(token_ids):
            yield {"source": source, "text": tokenizer.decode(token_ids[:length]).rstrip()}


def edit_prompts(tokenizer: "Tokenizer", files: list[tuple[str, str]], rng: random.Random) -> Iterator[dict[str, str]]:
    """Endless edit tasks of 150 to 500 tokens."""
    codes = [(source, found) for source, text in files if (found := list(snippets(text)))]
    while True:
        source, found = rng.choice(codes)
        prompt, _ = edit_task(rng.choice(found), rng)
        if 150 <= len(tokenizer.encode(prompt).ids) <= 500:
            yield {"source": source, "text": prompt}


def first_distinct(rows: Iterator[dict[str, str]], count: int) -> list[dict[str, str]]:
    """The first `count` rows of which no two begin alike; the header of an edit task does not count."""
    distinct: dict[str, dict[str, str]] = {}
    while len(distinct) < count:
        row = next(rows)
        distinct.setdefault(row["text"].split("# Before:\n")[-1][:80], row)
    return list(distinct.values())


def main() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(HERE / "model" / "tokenizer.json"))
    files = [(source, text) for source, text in library_files() if is_held_out(source)]
    rng = random.Random(0)
    prompts = {
        "continue": first_distinct(continue_prompts(tokenizer, files, rng), 60),
        "edit": first_distinct(edit_prompts(tokenizer, files, rng), 30),
    }
    with HELDOUT_FILE.open("w", encoding="utf-8") as out:
        for kind, rows in prompts.items():
            for index, row in enumerate(rows):
                out.write(json.dumps({"id": f"{kind}-{index:02d}", "kind": kind} | row) + "\n")


if __name__ == "__main__":
    main()
