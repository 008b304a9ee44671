"""Text for the demo model: the standard library, split by file, and edit tasks made from it.

Files with a path that hashes to 0 modulo 40 are held out: no training row is made of them, and every prompt in
`heldout.jsonl` is. An edit task asks for a copy of some code with one identifier renamed (or none), in a
fixed plain format, so that most of the answer can be looked up in the prompt. Running this file writes
`heldout.jsonl` again. Nothing here knows about models, and only `main` needs the tokenizer.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from library import edit_prompt, is_held_out, library_files, snippets

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
HELDOUT_FILE = HERE / "heldout.jsonl"
KINDS = ("continue", "edit")


def rename(code: str, old: str, new: str) -> str:
    """`code` with every whole word `old` replaced by `new`."""
    return re.sub(rf"\b{re.escape(old)}\b", new, code)


def edit_task(code: str, rng: random.Random) -> tuple[str, str]:
    """Returns (prompt, answer): see library.edit_prompt; the answer ends with the line `# End.`.

    >>> prompt, answer = edit_task("x = 1\\n", random.Random(0))
    >>> answer
    'x = 1\\n# End.\\n'
    """
    prompt = edit_prompt(code, rng)
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
    codes = [(source, codes_of) for source, text in files if (codes_of := list(snippets(text)))]
    while True:
        source, codes_of = rng.choice(codes)
        prompt, _ = edit_task(rng.choice(codes_of), rng)
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
