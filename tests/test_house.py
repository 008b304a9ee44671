"""Measures the product's code: its size, its words, and how many files outside of its room name a feature.

python tests/test_house.py            all figures
python tests/test_house.py FEATURE    the files that name it
"""

import ast
import re
import sys
import tokenize
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = sorted([*(ROOT / "vllm_specplugins").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
TOOLS = (
    "vllm_specplugins/tools/",
    "vllm_specplugins/engine/harness/",
    "vllm_specplugins/__main__.py",
    "vllm_specplugins/arguments.py",
    "vllm_specplugins/commands.py",
)
VAGUE = re.compile(r"(?<!at )\bmost\b|\b(own|found|kept|told|said|whose|nobody)\b", re.IGNORECASE)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Feature(NamedTuple):
    """How files name a feature, where it lives, and how many other files may name it."""

    words: str  # of an expression; parts of identifiers count, `learned` is not `learn`
    room: tuple[str, ...]  # how the paths of its files begin
    most_files: int


FEATURES = {
    "trees": Feature(
        r"(?<!suffix )\btrees?\b(?! depth)",
        (
            "kernels/rounds/",
            "kernels/trees/",
            "vllm_specplugins/config/lookahead",
            "vllm_specplugins/config/trees",
            "vllm_specplugins/engine/trees",
            "vllm_specplugins/engine/v2/trees/",
            "vllm_specplugins/proposers/lookahead",
            "vllm_specplugins/proposers/tree",
        ),
        7,
    ),
    "learning": Feature(
        r"\b(learn|learner|learning(?![ -]rate)|distillation|promotion)\b",
        (
            "vllm_specplugins/config/learn",
            "vllm_specplugins/engine/learning",
            "vllm_specplugins/engine/v1/learning",
            "vllm_specplugins/engine/v2/learning",
            "vllm_specplugins/proposers/learning/",
            "vllm_specplugins/tools/training",
        ),
        6,
    ),
    "grammar": Feature(
        r"\bgrammars?\b(?! (output|bitmask))",
        ("vllm_specplugins/engine/grammar/", "vllm_specplugins/proposers/grammar"),
        6,
    ),
    "remote": Feature(r"\bremote\b", ("vllm_specplugins/proposers/remote/",), 6),
    "look-ahead": Feature(r"\blook[ -]ahead\b", ("vllm_specplugins/proposers/heads/look_ahead",), 6),
    "built-in drafters": Feature(
        r"\bbuilt[ -]in\b",
        (
            "vllm_specplugins/cascade/built_in",
            "vllm_specplugins/config/built_in",
            "vllm_specplugins/engine/built_in",
            "vllm_specplugins/engine/v1/built_in",
            "vllm_specplugins/engine/v2/speculators/built_in",
        ),
        7,
    ),
}


def spoken(text: str) -> str:
    """A text whose identifiers are words: `LookAhead` and `look_ahead` become `look ahead`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).replace("_", " ").lower()


def files_that_name(feature: Feature) -> list[str]:
    """The product's files outside of a feature's room that name it."""
    names = [str(path.relative_to(ROOT)) for path in PRODUCT]
    expression = re.compile(feature.words)
    return [
        name
        for name in names
        if not name.startswith(feature.room) and expression.search(spoken((ROOT / name).read_text()))
    ]


def num_lines(paths: list[Path]) -> int:
    """Lines of these files."""
    return sum(path.read_text().count("\n") for path in paths)


def num_tokens() -> int:
    """Tokens of Python in the product, without comments and layout."""
    count = 0
    for path in PRODUCT:
        with path.open("rb") as file:
            count += sum(token.type not in LAYOUT for token in tokenize.tokenize(file.readline)) - 1  # the encoding
    return count


def num_vague_words() -> int:
    """Pronouns and the like in the place of the field's nouns."""
    return sum(len(VAGUE.findall(path.read_text())) for path in PRODUCT)


def lengths_of_functions() -> list[int]:
    """Lines of the product's functions, sorted."""
    trees = (ast.parse(path.read_text()) for path in PRODUCT)
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions)


def main(*features: str) -> None:
    """Prints the figures."""
    if features:
        for feature in features:
            print("\n".join(files_that_name(FEATURES[feature])))
        return
    tools = [path for path in PRODUCT if str(path.relative_to(ROOT)).startswith(TOOLS)]
    lengths = lengths_of_functions()
    print(f"product: {len(PRODUCT)} files, {num_lines(PRODUCT)} lines, {num_tokens()} tokens")
    print(f"of these, tools: {num_lines(tools)} lines")
    tests = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    print(f"tests and benchmarks: {num_lines(tests)} lines")
    prose = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    print(f"prose, with generated pages: {sum(path.stat().st_size for path in prose) / 1000:.1f} kB")
    print(f"vague words: {num_vague_words()}")
    print(f"functions: {median(lengths):.0f} lines in the median, {lengths[-1]} at most")
    print(f"files: {max(path.read_text().count(chr(10)) for path in PRODUCT)} lines at most")
    for name, feature in FEATURES.items():
        print(f"{name}: {len(files_that_name(feature))} files outside of its room ({feature.most_files} allowed)")


def test_sizes() -> None:
    """Fails if a file or a function grows beyond one screen's worth of attention."""
    assert max(path.read_text().count("\n") for path in PRODUCT) <= 300
    assert lengths_of_functions()[-1] <= 60


def test_no_traceback_in_logs() -> None:
    """Fails if code logs a traceback other than at the debug level (isolation/faults.py), or to an engine's log file
    (engine/harness/process.py); `cause_text` gives the sentence."""
    wanted = {"vllm_specplugins/isolation/faults.py", "vllm_specplugins/engine/harness/process.py"}
    tracebacks = re.compile(r"logger\.exception\(|exc_info|\btraceback\.\w+\(")
    assert {path.relative_to(ROOT).as_posix() for path in PRODUCT if tracebacks.search(path.read_text())} == wanted


def test_words() -> None:
    """Fails if pronouns come back in the place of the field's nouns."""
    assert num_vague_words() <= 80


@pytest.mark.parametrize("name", FEATURES)
def test_rooms(name: str) -> None:
    """Fails if more files outside of a feature's room name it."""
    assert len(files_that_name(FEATURES[name])) <= FEATURES[name].most_files


if __name__ == "__main__":
    main(*sys.argv[1:])
