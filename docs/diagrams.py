"""The diagrams: a step of speculation, the choice of a method, the support matrix, and a grammar's tokens."""

import json

from drawing import BAD, DOCS, GOOD, GREY, INK, OTHER, OURS, arrow, box, canvas, read, token_row
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch
from tokenizers import Tokenizer

EVIDENCE = {
    "gpu": ("#2e7d32", "ran on an H100 (0.1.0)"),
    "cpu": ("#81c784", "tested on a CPU"),
    "simulated": ("#cddc39", "tested in an interpreter or simulator"),
    "refused": ("#ef9a9a", "refused at the start"),
    "untried": ("#e4e7eb", "untried"),
}
REQUEST, NEWEST, EARLIER = 5, 139, 109  # the step of picture `step`: a request of the trace, and two of its places


def recorded_step() -> tuple[list[str], list[str], list[str]]:
    """A step of the engine that `check` replays: the match, the draft, and the tokens that the target emitted."""
    trace = json.loads((DOCS.parent / "vllm_specplugins" / "tools" / "trace.json").read_text())
    tokenizer = Tokenizer.from_file(str(DOCS.parent / "examples" / "demo" / "model" / "tokenizer.json"))
    tokens = trace["histories"][REQUEST]
    match, draft = tokens[NEWEST - 5 : NEWEST], tokens[EARLIER : EARLIER + 5]
    assert match == tokens[EARLIER - 5 : EARLIER]
    emitted = tokens[NEWEST : NEWEST + 4]
    return tuple([tokenizer.decode([token]) for token in part] for part in (match, draft, emitted))  # type: ignore


def step() -> Figure:
    """One step: a match in the context, its draft, and the verdict; below, the schedules of both runners."""
    figure, axes = canvas(9.6, 4.3)
    match, draft, emitted = recorded_step()
    edge, light = 0.2, "#5e92c8"
    num_accepted = len(emitted) - 1
    axes.text(edge, 0.3, "1  The newest tokens occurred before. The proposer copies what followed.", fontweight="bold")
    x = token_row(axes, edge, 0.5, [*match, *draft], [OURS] * len(match) + [light] * len(draft))
    x = token_row(axes, x, 0.5, ["..."], [GREY])
    token_row(axes, x, 0.5, match, [OURS] * len(match))
    note = {"fontsize": 8.5, "color": GREY, "va": "top"}
    axes.text(edge, 0.95, "dark blue: the match, twice; light blue: what followed, the draft", **note)
    axes.text(edge, 1.5, "2  The target verifies the draft in one pass, and adds one token.", fontweight="bold")
    verdict = [GOOD] * num_accepted + [BAD] + ["#b8c0c8"] * (len(draft) - num_accepted - 1)
    x = token_row(axes, edge, 1.7, draft, verdict)
    arrow(axes, (x + 0.1, 1.87), (x + 0.6, 1.87))
    token_row(axes, x + 0.7, 1.7, emitted, [GOOD] * num_accepted + [OTHER])
    axes.text(
        edge,
        2.16,
        "green: accepted; red: rejected, and the rest is dropped; violet: the target's token. "
        f"{len(emitted)} tokens in one step.",
        **note,
    )
    axes.text(edge, 2.72, "3  When the proposer runs", fontweight="bold")
    rows = {
        "V1: synchronous": [
            ("draft", 0.0, 0.45, OURS),
            ("target", 0.5, 1.6, INK),
            ("draft", 2.15, 0.45, OURS),
            ("target", 2.65, 1.6, INK),
            ("draft", 4.3, 0.45, OURS),
            ("target", 4.8, 1.6, INK),
        ],
        "V2: device": [
            ("target + draft", 0.0, 1.8, INK),
            ("target + draft", 1.85, 1.8, INK),
            ("target + draft", 3.7, 1.8, INK),
            ("target + draft", 5.55, 1.8, INK),
        ],
        "V2: host": [("schedule", 0.2, 1.0, GREY), ("schedule", 2.05, 1.0, GREY), ("schedule", 3.9, 1.0, GREY)],
    }
    for index, (name, parts) in enumerate(rows.items()):
        y = 2.95 + 0.42 * index
        axes.text(edge, y + 0.16, name, va="center")
        for words, start, width, colour in parts:
            box(axes, 1.6 + start, y, width, 0.32, words, colour, fontsize=8)
    return figure


QUESTIONS = (
    ("Do many requests bring a JSON schema\nor another grammar?", "add the stage grammar\nto the method below"),
    ("Is there a drafter for your model\n(EAGLE, MTP, DFlash)?", "cascade:\na lookup, then the drafter"),
    ("Do requests resemble\nearlier requests?", "suffix_lookup"),
    ("Does the output repeat\nits context?", "prompt_lookup"),
    ("Can you train a small part\n(minutes)?", "cascade:\nprompt_lookup, then jump"),
)


def choose() -> Figure:
    """The choice of a method by five questions."""
    figure, axes = canvas(6.9, 4.9)
    for index, (question, answer) in enumerate(QUESTIONS):
        y = 0.2 + 0.93 * index
        box(axes, 0.15, y, 2.95, 0.62, question, INK)
        box(axes, 4.2, y, 2.55, 0.62, answer, OURS, family="monospace", fontsize=8.5)
        words = "yes, and go on" if index == 0 else "yes"
        arrow(axes, (3.15, y + 0.31), (4.15, y + 0.31), words)
        if index + 1 < len(QUESTIONS):
            arrow(axes, (1.6, y + 0.65), (1.6, y + 0.91), "no" if index else "yes or no")
    arrow(axes, (1.6, 4.57), (1.6, 4.79))
    axes.text(
        1.75, 4.79, "no: no speculation, or prompt_lookup, which stops drafts that do not pay", fontsize=8, va="center"
    )
    return figure


def support(narrow: bool) -> Figure:
    """The support matrix, coloured by evidence."""
    data = read("support.json")
    columns, rows = data["columns"], data["rows"]
    figure, axes = canvas(5.2 if narrow else 9.6, (2.4 if narrow else 0.9) + 0.34 * len(rows))
    left, width, top = (2.1, 0.255, 1.1) if narrow else (2.9, 0.545, 0.62)
    for index, name in enumerate(columns):
        axes.text(
            left + (index + 0.5) * width,
            top - 0.08,
            name if narrow else name.replace(" ", "\n"),
            ha="center",
            va="bottom",
            fontsize=8.5,
            linespacing=0.95,
            rotation=90 * narrow,
        )
    for line, (name, cells) in enumerate(rows.items()):
        y = top + 0.34 * line
        axes.text(left - 0.12, y + 0.16, name, ha="right", va="center", fontsize=8.5)
        for index, cell in enumerate(cells):
            axes.add_patch(
                FancyBboxPatch(
                    (left + index * width + 0.02, y + 0.02),
                    width - 0.04,
                    0.3,
                    linewidth=0,
                    boxstyle="round,pad=0,rounding_size=0.04",
                    color=EVIDENCE[cell][0],
                )
            )
    handles = [Patch(color=colour, label=words) for colour, words in EVIDENCE.values()]
    columns = 1 if narrow else 5
    axes.legend(
        handles=handles,
        loc="lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
        columnspacing=1.0,
        handlelength=1.0,
    )
    return figure


def grammar(right: float) -> Figure:
    """Who wrote the tokens of two JSON answers to one schema: the model or the grammar."""
    data = read("figures/grammar_answer.json")
    narrow = right < 6
    figure, axes = canvas(right + 0.2, 5.0 if narrow else 2.75)
    y = 0.3
    for answer in data["answers"]:
        num_tokens = sum(map(len, answer["steps"]))
        words = f"{answer['name']}: {num_tokens} tokens in {len(answer['steps'])} steps"
        axes.text(0.2, y, words, fontweight="bold")
        x, y = 0.2, y + 0.16
        for tokens in answer["steps"]:
            for index, token in enumerate(tokens):
                shown = token.replace("\n", "\\n").replace(" ", "\u00b7") or "\u2205"
                width = 0.1 + 0.078 * len(shown)
                if x + width > right:
                    x, y = 0.2, y + 0.34
                box(
                    axes,
                    x,
                    y,
                    width,
                    0.27,
                    shown,
                    INK if index + 1 == len(tokens) else GOOD,
                    fontsize=8,
                    family="monospace",
                )
                x += width + 0.03
        y += 0.75
    handles = [
        Patch(color=GOOD, label="forced by the grammar: drafted, verified, accepted"),
        Patch(color=INK, label="sampled by the model: one per step"),
    ]
    axes.legend(handles=handles, loc="lower left", ncols=1 if narrow else 2, frameon=False, fontsize=8.5)
    return figure
