"""Runs a proposer through the recorded engine, behind the fault barrier, and tells what was wrong."""

import argparse
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from rich.progress import Progress

from vllm_specplugins.config import ConfigError, SpecConfig
from vllm_specplugins.counters import Counters
from vllm_specplugins.custom import import_object
from vllm_specplugins.draft import PROTOCOL_VERSION, Draft, DraftBatch, Feedback, Proposer, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.circuit_breaker import MAX_FAULTS
from vllm_specplugins.isolation.guard import CHARGED
from vllm_specplugins.methods import build_proposer, parse_config, registered_methods
from vllm_specplugins.tools.check.trace import Replay, Trace, load
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.replay.player import name_of


@dataclass(slots=True)
class Findings:
    """What a check found.

    Args:
        violations: of the protocol, a sentence each.
        counters: of what was drafted and accepted.
        cost_us: [num_steps] of `propose`, by request.
    """

    violations: list[str]
    counters: Counters
    cost_us: list[float]


@dataclass(slots=True)
class Timed:
    """A proposer whose `propose` is timed, where it runs."""

    proposer: Proposer
    cost_us: list[float]

    def propose(self, batch: DraftBatch) -> Draft:
        start = time.perf_counter()
        draft = self.proposer.propose(batch)
        self.cost_us.append((time.perf_counter() - start) * 1e6 / batch.num_reqs)
        return draft

    def observe(self, feedback: Feedback) -> None:
        self.proposer.observe(feedback)

    def forget(self, request_ids: Sequence[str]) -> None:
        self.proposer.forget(request_ids)


def run(args: argparse.Namespace) -> int:
    """The command `check`: 0 where nothing is violated, or else 1."""
    raw = configured(args.proposer, args.options, args.time_budget_ms)
    config = parse_config(raw)
    trace, words = load(), ""
    with progress() as bars:
        task = bars.add_task("steps of the recording", total=len(trace.steps))
        findings = check(config, trace, lambda: bars.advance(task))
        if args.engine:
            words, more = _in_engine(raw, args.engine, bars)
            findings.violations += more
    _print(args.proposer, findings, words)
    return 1 if findings.violations else 0


def _in_engine(raw: Mapping[str, Any], runner: str, bars: Progress) -> tuple[str, list[str]]:
    missing = [name for name in ("vllm", "torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"check: --engine needs {missing[0]}, which is not installed.")
    from vllm_specplugins.tools.check.engine import in_engine

    task = bars.add_task("engines", total=2)
    return in_engine(raw, runner, lambda: bars.advance(task))


def configured(proposer: str, options: Mapping[str, Any], time_budget_ms: int) -> dict[str, Any]:
    """The `speculative_config` of "package.module:Class", or of a registered method.

    Raises:
        ConfigError: there is no such thing.
    """
    common = {"time_budget_ms": time_budget_ms}
    if ":" in proposer:
        return {"method": "custom", "proposer": proposer, "options": dict(options), **common}
    registered = registered_methods()
    if proposer not in registered:
        names = ", ".join(registered) or "none"
        raise ConfigError(
            f"check: PROPOSER must be package.module:Class or a registered method ({names}), not {proposer!r}."
        )
    found = import_object(registered[proposer].proposer, proposer)
    own = dict(options) if hasattr(found, "Config") else {"options": dict(options)}
    return {"method": proposer, **common, **own}


def check(config: SpecConfig, trace: Trace, advance: Callable[[], None] = lambda: None) -> Findings:
    """Runs the trace with the configured proposer; `advance` is called before each step.

    Raises:
        ConfigError: it cannot be made.
    """
    proposer = _built(config, trace)
    timed = Timed(proposer, [])
    barrier = FaultBarrier(timed, trace.vocab_size, trace.max_num_draft, config.common.time_budget_ms)
    with _warnings() as words:
        Replay(trace, barrier.propose, barrier.forget).run(advance)
    counters = barrier.counters
    findings = Findings(list(_faults(counters.faults, words)), counters, timed.cost_us)
    if counters.times_switched_off:  # what is switched off is not told to forget, either
        findings.violations.append(
            f"It was switched off after {MAX_FAULTS} faults: an engine would have gone on without its drafts."
        )
    else:
        findings.violations += _leftovers(proposer, trace)
    return findings


def _built(config: SpecConfig, trace: Trace) -> Proposer:
    context = ProposerContext(
        vocab_size=trace.vocab_size,
        max_model_len=trace.max_model_len,
        max_num_reqs=len(trace.histories),
        max_num_draft=trace.max_num_draft,
        tokenize=lambda text: [1 + code % (trace.vocab_size - 1) for code in text.encode()],
        time_budget_ms=config.common.time_budget_ms,
    )
    return build_proposer(config, context)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the barrier has to say."""
    words: list[str] = []
    logger = logging.getLogger("vllm.specplugins")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    kept, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield words
    finally:
        logger.removeHandler(handler)
        logger.propagate = kept


def _faults(faults: Mapping[str, int], words: Sequence[str]) -> Iterator[str]:
    """A sentence for each kind; the barrier says the cause of the first of its kind."""
    for kind, count in faults.items():
        said = next((line for line in words if line.startswith(f"The proposer {kind} (")), None)
        cause = f": {said.split('(', 1)[1].split('); its drafts')[0].removeprefix('Nonsense: ')}" if said else ""
        did = "failed at a request's own options" if kind == CHARGED else kind
        yield f"It {did} in {count} step{'s' * (count > 1)}{cause}."


def _leftovers(proposer: Proposer, trace: Trace) -> Iterator[str]:
    """Requests that were forgotten and are still in a dictionary, a set or a list of the proposer's."""
    gone = {name_of(number) for number in range(len(trace.histories))}
    for name, value in getattr(proposer, "__dict__", {}).items():
        if isinstance(value, dict | set | list | tuple) and (kept := _texts(value) & gone):
            yield f"Its {name} still holds {len(kept)} of {len(gone)} requests that it was told to forget."


def _texts(values: Iterable[Any]) -> set[str]:
    return {value for value in values if isinstance(value, str)}


def _print(name: str, findings: Findings, words: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=f"{name}, protocol {PROTOCOL_VERSION}", show_header=False)
    for label, value in _rows(findings):
        table.add_row(label, value)
    if findings.counters.request_steps:
        console.print(table)
    if words:
        console.print(words)
    for sentence in findings.violations:
        console.print(f"violated: {sentence}", markup=False)
    if not findings.violations:
        console.print("Nothing is violated.")


def _rows(findings: Findings) -> list[tuple[str, str]]:
    found, cost = findings.counters, findings.cost_us or [0.0]
    accepted = _percent(found.accepted_tokens, found.drafted_tokens)
    return [
        ("steps of single requests", f"{found.request_steps}"),
        ("with a draft", _percent(found.drafts, found.request_steps)),
        ("draft tokens accepted", f"{accepted} of {found.drafted_tokens}"),
        ("tokens a step", f"{1 + found.accepted_tokens / max(1, found.request_steps):.2f}"),
        (
            "us a request and step",
            f"{np.median(cost):.1f} (median), {np.percentile(cost, 90):.1f} (90 % of steps are below)",
        ),
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "none"
