"""Runs a proposer through the recorded engine, behind the fault barrier, and tells what was wrong."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm_specplugins.config import ConfigError, SpecConfig
from vllm_specplugins.counters import Counters
from vllm_specplugins.custom import import_object
from vllm_specplugins.draft import PROTOCOL_VERSION, Proposer, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.faults import CHARGED, MAX_FAULTS
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config, registered_methods
from vllm_specplugins.tools.check.trace import Trace, load, play
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.replay.player import name_of
from vllm_specplugins.tools.report import say, show_table, stdout, table_of


def run(args: argparse.Namespace) -> int:
    """The command `check`: 0 where nothing is violated, or else 1."""
    config, trace = parse_config(configured(args.proposer, args.options, args.time_budget_ms)), load()
    with progress() as bars:
        task = bars.add_task("steps of the recording", total=len(trace.steps))
        violations, counters = check(config, trace, lambda: bars.advance(task))
    console = stdout()
    if counters.request_steps:
        table = table_of(f"protocol {PROTOCOL_VERSION}", [args.proposer])
        for label, figure in _figures(counters):
            table.add_row(label, figure)
        show_table(console, table)
    for sentence in violations:
        say(console, f"violated: {sentence}")
    if not violations:
        say(console, "Nothing is violated.")
    return 1 if violations else 0


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


def check(config: SpecConfig, trace: Trace, advance: Callable[[], None] = lambda: None) -> tuple[list[str], Counters]:
    """Runs the trace with the configured proposer; what it violates, a sentence each, and what it drafted.

    Args:
        advance: called before each step.

    Raises:
        ConfigError: it cannot be made.
    """
    context = ProposerContext(
        vocab_size=trace.vocab_size,
        max_model_len=trace.max_model_len,
        max_num_reqs=len(trace.histories),
        max_num_draft=trace.max_num_draft,
        tokenize=lambda text: [1 + code % (trace.vocab_size - 1) for code in text.encode()],
        time_budget_ms=config.common.time_budget_ms,
    )
    proposer = build_proposer(config, context)
    barrier = FaultBarrier(proposer, trace.vocab_size, trace.max_num_draft, config.common.time_budget_ms)
    play(trace, barrier.propose, barrier.forget, advance)
    return list(_violations(proposer, barrier.counters, trace)), barrier.counters


def _violations(proposer: Proposer, counters: Counters, trace: Trace) -> Iterator[str]:
    """Faults by kind, whose first causes the barrier has logged, and requests that it still holds."""
    for kind, count in counters.faults.items():
        did = "failed at a request's own options" if kind == CHARGED else kind
        yield f"It {did} in {count} step{'s' * (count > 1)}."
    if counters.times_switched_off:  # what is switched off is not told to forget, either
        yield f"It was switched off after {MAX_FAULTS} faults: an engine would have gone on without its drafts."
        return
    gone = {name_of(number) for number in range(len(trace.histories))}
    for name, value in getattr(proposer, "__dict__", {}).items():
        if isinstance(value, dict | set | list | tuple):
            kept = gone.intersection(entry for entry in value if isinstance(entry, str))
            if kept:
                yield f"Its {name} still holds {len(kept)} of {len(gone)} requests that it was told to forget."


def _figures(found: Counters) -> Iterator[tuple[str, str]]:
    steps = found.request_steps
    yield "steps of single requests", f"{steps}"
    yield "with a draft", f"{found.drafts / steps:.0%}"
    yield "draft tokens accepted", f"{found.accepted_tokens} of {found.drafted_tokens}"
    yield "tokens a step", f"{1 + found.accepted_tokens / steps:.2f}"
    yield "us a request and step", f"{found.propose_ms * 1000 / steps:.1f}"
