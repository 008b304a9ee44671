"""Sessions of an assistant with tools over real files; what it does with them is scripted."""

import difflib
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from edits import edited

SYSTEM = """\
You work on a code base with these tools, one call in each answer, as JSON.
list_files {"path": folder}: names and sizes.
read_file {"path": file, "start": line, "lines": number}: its lines with numbers.
apply_patch {"patch": unified diff}: changes files.
run_tests {"path": folder}: runs the tests below it.
finish {"summary": text}: ends the session.
"""
PLANS = (
    "I look at what is there first.",
    "Let me list the files of this folder.",
    "First I need to see how this package is laid out.",
)
READS = ("Next I read {path}.", "The code in question should be in {path}.", "Let me open {path}.")
PATCHES = ("This is the change that was asked for.", "Now I apply the change to {path}.", "I change {path} as follows.")
TESTS = ("I run the tests to see whether that holds.", "Now the tests.", "Let me check that nothing broke.")
Turn = tuple[str, str]  # all before it, and the answer


def sessions(files: Sequence[tuple[str, str]], rng: random.Random) -> Iterator[list[Turn]]:
    """The turns of one session after the other; folders come back, as in days of work on one code base."""
    folders: dict[str, dict[str, str]] = defaultdict(dict)
    for source, text in files:
        folders[str(PurePosixPath(source).parent)][source] = text
    large = sorted(folder for folder, found in folders.items() if 4 <= len(found) <= 60)
    known = rng.sample(large, min(6, len(large)))
    while True:
        folder = rng.choice(known)
        yield list(_session(folder, folders[folder], rng))


def _session(folder: str, files: dict[str, str], rng: random.Random) -> Iterator[Turn]:
    """Lists the folder, reads and patches one to three files, runs the tests, lists again, and ends."""
    paths = rng.sample(sorted(files), min(len(files), rng.randint(1, 3)))
    changes = {path: edited(files[path], rng) for path in paths}
    task = " ".join(f"In {path}: {asked}" for path, (asked, _) in changes.items())
    log = [f"{SYSTEM}\nUser: {task}\n"]

    def turn(words: str, tool: str, arguments: dict[str, object], result: str) -> Turn:
        answer = f"{words}\n{json.dumps({'tool': tool, 'arguments': arguments})}\n"
        before = "".join([*log, "Assistant: "])
        log.extend(["Assistant: ", answer, f"Tool: {result}\n"])
        return before, answer

    yield turn(rng.choice(PLANS), "list_files", {"path": folder}, _listing(files))
    for path, (_, after) in changes.items():
        lines = files[path].splitlines()
        shown = lines[:120]
        numbered = "\n".join(f"{number:4d} {line}" for number, line in enumerate(shown, 1))
        yield turn(rng.choice(READS).format(path=path), "read_file", {"path": path, "start": 1, "lines": 120}, numbered)
        patch = "\n".join(difflib.unified_diff(lines, after.splitlines(), f"a/{path}", f"b/{path}", n=3, lineterm=""))
        yield turn(rng.choice(PATCHES).format(path=path), "apply_patch", {"patch": patch[:4000]}, f"{path}: patched")
        yield turn(rng.choice(TESTS), "run_tests", {"path": folder}, _test_log(folder, files, rng))
    yield turn(rng.choice(PLANS), "list_files", {"path": folder}, _listing(files))
    yield turn("All is done.", "finish", {"summary": f"{task} The tests of {folder} pass."}, "over")


def _listing(files: dict[str, str]) -> str:
    return "\n".join(f"{len(text):7d} {path}" for path, text in sorted(files.items()))


def _test_log(folder: str, files: dict[str, str], rng: random.Random) -> str:
    names = [PurePosixPath(path).stem for path in sorted(files)]
    lines = [f"{folder}/test_{name}.py ... ok ({rng.randint(1, 900)} ms)" for name in names]
    return "\n".join([*lines, f"{len(names)} passed"])
