"""Measures the product's code: its size, its words, its twins, and how many files outside of its room reach a feature.

python tests/test_house.py            all figures
python tests/test_house.py FEATURE    the files that reach it
"""

import ast
import re
import sys
import tokenize
from functools import cache
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
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Feature(NamedTuple):
    """Where a feature lives, what other files reach it by, how many files do today, and how many should."""

    room: tuple[str, ...]  # how the paths of its files begin
    names: str  # attributes, parameters and functions that exist for it alone
    most_files: int
    goal: int


FEATURES = {
    "trees": Feature(
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
        "longest_chain verify_drafts tree",
        10,
        10,
    ),
    "learning": Feature(
        (
            "vllm_specplugins/config/learn",
            "vllm_specplugins/engine/learning",
            "vllm_specplugins/engine/v1/learning",
            "vllm_specplugins/engine/v2/learning",
            "vllm_specplugins/proposers/learning/",
            "vllm_specplugins/tools/training",
        ),
        "learn is_trained readings training when_loaded",
        8,
        8,
    ),
    "grammar": Feature(
        ("vllm_specplugins/engine/grammar/", "vllm_specplugins/proposers/grammar"),
        "forced forces_tokens put_forced ForcedDraft",
        7,
        8,
    ),
    "remote": Feature(("vllm_specplugins/proposers/remote/",), "redis_url", 3, 6),
    "look-ahead": Feature(("vllm_specplugins/proposers/heads/look_ahead",), "look_ahead one_pass enters_states", 8, 8),
    "built-in drafters": Feature(
        (
            "vllm_specplugins/cascade/built_in",
            "vllm_specplugins/config/built_in",
            "vllm_specplugins/engine/built_in",
            "vllm_specplugins/engine/v1/built_in",
            "vllm_specplugins/engine/v2/speculators/built_in",
        ),
        "built_in built_in_tokens guard_of is_offered offer offered_of offers offer_length propose_theirs spared_ms "
        "saved_ms",
        10,
        10,
    ),
}
OF_DRAFTS = "token_ids num_draft confidence stage logits parents match_length match_lengths accept_probs largest_probs"
# Names that our code gives to the max tokens of a draft. Not listed, since they mean something else: num_draft, a
# draft's length; num_steps, passes of a model; depth, a place in a tree or a draft; longest_chain, the longest length
# but a whole tree; length_limit, the end of a text; num_speculative_steps and num_spec_tokens, which vLLM's objects
# have.
NAMES_OF_K = "max_num_draft num_speculative_tokens max_tokens max_draft max_length max_more"
BRAIN = ("vllm_specplugins/gate/", "vllm_specplugins/engine/adaptive/budget", "kernels/acceptance/", "kernels/budget/")


@cache
def sources() -> dict[str, ast.Module]:
    """The syntax of each file of the product."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in PRODUCT}


def names_in(tree: ast.Module) -> set[str]:
    """Names of attributes, variables, parameters and imports."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                names.add(name)
            case ast.keyword(arg=str(name)):
                names.add(name)
    return names


def imports_in(tree: ast.Module) -> set[str]:
    """Paths of modules without their suffix."""
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {module.replace(".", "/").replace("vllm_specplugins/kernels", "kernels") for module in modules}


def names_given(tree: ast.Module) -> set[str]:
    """Names of variables, attributes and parameters where the code gives them; others' are only read."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
    return names


def names_of_k() -> set[str]:
    """Names of the max tokens of a draft."""
    return set(NAMES_OF_K.split()) & set[str]().union(*map(names_given, sources().values()))


def files_that_reach(feature: Feature) -> list[str]:
    """The product's files outside of a feature's room that import from it or use one of its names."""
    names = set(feature.names.split())
    room = tuple(part.rstrip("/") for part in feature.room)
    return [
        path
        for path, tree in sources().items()
        if not path.startswith(feature.room)
        and (names & names_in(tree) or any(module.startswith(room) for module in imports_in(tree)))
    ]


def forms_of_a_draft() -> list[str]:
    """Classes with two fields of a draft, or more."""
    forms = list[str]()
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                fields = {
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign)
                    if isinstance(each.target, ast.Name)
                }
                if len(fields & set(OF_DRAFTS.split())) > 1:
                    forms.append(f"{path}: {node.name}")
    return forms


def controllers() -> list[str]:
    """Classes that choose the lengths of drafts."""
    choose = {"choose", "split_draft"}
    rooms = {path: tree for path, tree in sources().items() if path.startswith(BRAIN)}
    classes = (node for tree in rooms.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return [
        node.name
        for node in classes
        if any(isinstance(each, ast.FunctionDef) and each.name in choose for each in node.body)
    ]


def constants_of_the_brain() -> int:
    """Numbers but 0 and 1 in the modules and kernels that choose lengths."""
    nodes = (node for path, tree in sources().items() if path.startswith(BRAIN) for node in ast.walk(tree))
    numbers = (node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) in (int, float))
    return sum(number not in (0, 1) for number in numbers)


def attributes_on_messages() -> list[str]:
    """Attributes that we set on vLLM's SchedulerOutput and ModelRunnerOutput."""
    nodes = [node for tree in sources().values() for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"]
    return [text for text in map(ast.unparse, calls) if re.search(r"setattr\(\w*(output|carrier|scheduled)\b", text)]


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
            print("\n".join(files_that_reach(FEATURES[feature])))
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
    print(f"forms of a draft: {len(forms_of_a_draft())}, controllers: {len(controllers())}")
    print(f"names of K: {len(names_of_k())}")
    print(
        f"constants of the brain: {constants_of_the_brain()}, attributes on messages: {len(attributes_on_messages())}"
    )
    for name, feature in FEATURES.items():
        print(f"{name}: {len(files_that_reach(feature))} files outside of its room, the goal is {feature.goal}")


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
    """Fails if more files outside of a feature's room import from it or use its names; the goals are in the table."""
    assert len(files_that_reach(FEATURES[name])) <= FEATURES[name].most_files


def test_forms_of_a_draft() -> None:
    """Fails if there is one form more than a proposer's Draft, DraftArrays, Tree, and Drafts of kernels."""
    assert len(forms_of_a_draft()) <= 4


def test_controllers() -> None:
    """Fails if another class chooses the lengths of drafts. The goal is 1."""
    assert len(controllers()) <= 3


def test_constants_of_the_brain() -> None:
    """Fails if the choice of lengths needs one number more. The goal is 20."""
    assert constants_of_the_brain() <= 85


def test_attributes_on_messages() -> None:
    """Fails if scheduler and workers talk by a third attribute, or by an object whose fields have any type. The goal is
    2."""
    assert len(attributes_on_messages()) <= 2
    messages = sources()["vllm_specplugins/engine/messages.py"]
    types = {ast.unparse(node.annotation) for node in ast.walk(messages) if isinstance(node, ast.AnnAssign)}
    assert types and not {name for name in types if re.search(r"\b(Any|dict|Mapping|object)\b", name)}


def test_names_of_k() -> None:
    """Fails if the max tokens of a draft get one more name. The goal is 2: the user's, and ours."""
    assert len(names_of_k()) <= 2


if __name__ == "__main__":
    main(*sys.argv[1:])
