"""What a soak found, as a table."""

from collections import Counter
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Phase:
    """One server of a soak.

    Args:
        name: of its method.
        counts: of requests, by what became of them.
        totals: of the server's own counters, over all of its lives.
        starts: how often it was started, the first time included.
        calm_accepted: draft tokens accepted at the end, when nobody misbehaved.
        mib: resident at the end.
        slope: MiB a minute over the second half of its last life; None where it was too short to tell.
        judged_minutes: how long that was.
        tracebacks: in its log.
        faults: of the planted proposer, by name.
        problems: what must not be.
    """

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    seconds: float = 0.0
    calm_accepted: int = 0
    mib: float = 0.0
    slope: float | None = None
    judged_minutes: float = 0.0
    tracebacks: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def show(phases: list[Phase], problems: list[str], title: str) -> None:
    """Prints figures and problems."""
    console = Console(width=120)
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for phase in phases:
        table.add_column(phase.name, justify="right", no_wrap=True)
    for row in _rows(phases[0]):
        table.add_row(row, *(_rows(phase)[row] for phase in phases))
    console.print(table)
    faults = sum((phase.faults for phase in phases), Counter[str]())
    planted = ", ".join(f"{name} {number}" for name, number in sorted(faults.items()))
    console.print(f"faults planted: {planted or 'none'}", highlight=False)
    for problem in problems[:40]:
        console.print(f"PROBLEM {problem}", highlight=False, markup=False)
    console.print(f"{len(problems)} problems" if problems else "no problems", highlight=False)


def _rows(phase: Phase) -> dict[str, str]:
    counts, totals = phase.counts, phase.totals
    numbers = {
        "seconds": round(phase.seconds),
        "starts": phase.starts,
        "requests answered": counts["answered"],
        "held against the reference": counts["compared"],
        "wrong": counts["wrong"],
        "aborted": counts["aborted"],
        "hostile ones refused": counts["refused"],
        "sent again after a kill": counts["sent again"],
        "bursts": counts["bursts"],
        "faults planted": phase.faults.total(),
        "preemptions": totals["num_preemptions"],
        "tokens": totals["generation_tokens"],
        "draft tokens accepted": totals["spec_decode_num_accepted_tokens"],
        "of these in the calm at the end": phase.calm_accepted,
        "tracebacks logged": phase.tracebacks,
    }
    rows = {name: f"{number:,}" for name, number in numbers.items()}
    slope = "too short" if phase.slope is None else f"{phase.slope:+.2f}"
    return rows | {"MiB at the end": f"{phase.mib:,.0f}", "MiB a minute": slope}
