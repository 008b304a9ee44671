"""What a replay found: a table for the terminal, JSON, and points of speed by K for a picture."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.replay.candidates import ALWAYS, Candidate
from vllm_specplugins.tools.replay.figures import Row, best_rows, verdict
from vllm_specplugins.tools.replay.plot import plot
from vllm_specplugins.tools.report import say, show_table, stdout, table_of, versions, write_json

COLUMNS = ("K", "tok/step", "drafted", "accepted", "draft, us", "ms/token", "predicted")
LEGEND = (
    "K: the fastest of those tried. tok/step: mean tokens of a request's step, its first token left out (acceptance "
    "length). drafted: share of steps with a draft. accepted: share of draft tokens that were right. draft: time of "
    "drafting for a request and step, where the device waits for it. ms/token: time of the engine for a token of any "
    "request. predicted: the speed-up over no speculation, and its range (95 %) over requests like these. gated: a "
    "gate drafts only what pays; fixed: K tokens in each step."
)
FEW_REQUESTS = 200  # the range of fewer says little


def tell(args: argparse.Namespace, rows: list[Row], found: Sequence[Candidate], conditions: Mapping[str, Any]) -> None:
    """Prints the best K of each method, and what follows; writes all rows, if the user wants a file."""
    advice, best = verdict(rows, found)
    console, table, notes = stdout(), table_of("", COLUMNS), _notes(rows, best, conditions)
    for title in dict.fromkeys(row.title for row in rows):
        table.add_section()
        table.add_row(f"[bold]{title}[/bold]")
        for row in best_rows([row for row in rows if row.title == title]):
            table.add_row(f"  {row.method}{'' if row.policy == ALWAYS else ', ' + row.policy}", *_figures(row))
    show_table(console, table)
    for words in (LEGEND, *notes, f"\n{advice}"):
        say(console, words)
    facts = {
        **conditions,
        "versions": versions(),
        "rows": [asdict(row) for row in rows],
        "candidates": [asdict(candidate) for candidate in found],
        "notes": notes,
        "advice": advice,
    }
    if args.json:
        write_json(facts, args.json)
    if args.plot:
        plot(args.plot, f"{conditions['requests']} recorded requests, predicted", rows)


def _figures(row: Row) -> list[str]:
    if row.method == NONE:
        return ["", "1.00", "", "", "", f"{row.ms_per_token:.2f}", "1.00x"]
    accepted = "" if row.accepted is None else f"{row.accepted:.0%}"
    shares = f"{row.tokens_per_step:.2f}", f"{row.coverage:.0%}", accepted
    return [str(row.num_draft), *shares, f"{row.draft_us:.1f}", f"{row.ms_per_token:.2f}", row.speed]


def _notes(rows: Sequence[Row], best: Candidate | None, done: Mapping[str, Any]) -> list[str]:
    """What the figures were made with, and what not to believe."""
    host = f"; {done['host']}" if done["host"] else ""
    words = [
        f"{done['requests']} requests with {done['output_tokens']} tokens of output after {done['prompt_tokens']} of "
        f"prompts. A step's cost: {done['costs']}{host}."
    ]
    if done["requests"] < FEW_REQUESTS:
        words.append(f"{done['requests']} requests say little of others: play {FEW_REQUESTS} or more.")
    if best is not None and best.num_draft == done["most"]:
        words.append("The largest K tried is the best: try larger ones, or leave --num-draft out.")
    faulty = dict.fromkeys(row.method for row in rows if row.num_faults)
    return words + [f"{method} failed now and then, which cost it drafts; `check` says at what." for method in faulty]
