"""Changes of a source file as people ask for them, and what the file is afterwards."""

import keyword
import random
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "demo"))

from library import WORDS


def edited(text: str, rng: random.Random) -> tuple[str, str]:
    """(what is asked for, the file with that done): one to three changes of different kinds.

    >>> edited("x = 1\\n", random.Random(0))[1]
    'x = 1\\n'
    """
    asked = []
    for change in rng.sample(CHANGES, rng.randint(1, 3)):
        words, after = change(text, rng)
        if after != text:
            asked.append(words)
            text = after
    return " ".join(asked) or "Repeat the file.", text


def _rename(text: str, rng: random.Random) -> tuple[str, str]:
    counts = Counter(re.findall(r"\b[A-Za-z_]\w{3,}\b", text))
    names = [name for name, count in counts.items() if count >= 2 and not keyword.iskeyword(name)]
    new = "_".join(rng.sample(WORDS, 2))
    if not names:
        return "", text
    old = rng.choice(names)
    return f"Rename `{old}` to `{new}`.", re.sub(rf"\b{old}\b", new, text)


def _log(text: str, rng: random.Random) -> tuple[str, str]:
    def line(found: re.Match[str]) -> str:
        indent, name = found[1] + "    ", found[2]
        return f'{found[0]}{indent}logger.debug("{name} is called")\n'

    return "Log each call of a function.", re.sub(r"^([ ]*)def (\w+)\([^()\n]*\):\n", line, text, flags=re.MULTILINE)


def _drop_comments(text: str, rng: random.Random) -> tuple[str, str]:
    return "Take out the comments.", re.sub(r"^[ ]*#(?!!).*\n", "", text, flags=re.MULTILINE)


def _move(text: str, rng: random.Random) -> tuple[str, str]:
    """A function or class at the top level goes to the end."""
    parts = re.split(r"^(?=(?:def|class) )", text, flags=re.MULTILINE)
    if len(parts) < 3:
        return "", text
    index = rng.randrange(1, len(parts) - 1)
    name = re.split(r"[\s(:]", parts[index])[1]
    rest = [part if part.endswith("\n") else part + "\n" for part in [*parts[:index], *parts[index + 1 :]]]
    return f"Move `{name}` to the end.", "".join([*rest, parts[index]])


def _quote(text: str, rng: random.Random) -> tuple[str, str]:
    return "Use double quotes.", re.sub(r"(?<![\w'\"])'([^'\"\\\n]*)'(?!')", r'"\1"', text)


CHANGES = (_rename, _log, _drop_comments, _move, _quote)
