"""`check` replays a recorded engine against a proposer, behind the fault barrier, and reports its violations. The
recording (by tests/tools/record_trace.py of commit 5d3e21a) holds arrivals, preemptions and ends of requests; the
drafts decide how far each request advances in a step (replay/simulate.py)."""

import argparse
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm_specplugins.config import ConfigError, SpecConfig
from vllm_specplugins.counters import Counters
from vllm_specplugins.custom import import_object
from vllm_specplugins.device import DeviceTexts, checked_draft
from vllm_specplugins.draft import PROTOCOL_VERSION, Draft, DraftBatch, Feedback, Int32Array, Proposer, ProposerContext
from vllm_specplugins.engine.harness.text import services
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.faults import DID, MAX_FAULTS, TRACEBACK, fault_of, logger
from vllm_specplugins.isolation.histories import Histories
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config, registered_methods
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.replay.data import name_of
from vllm_specplugins.tools.replay.simulate import Player
from vllm_specplugins.tools.report import say, show_table

NEWCOMER = "the-request-after-all-others"
SHIPPED = Path(__file__).with_name("trace.json")


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording. A step is [requests that sampled a token, requests that the proposer forgets before], by number."""

    histories: list[Int32Array]  # prompt and output of each request
    prompt_lengths: list[int]  # of each request
    steps: list[list[list[int]]]
    options: list[Mapping[str, Any]]  # of each request
    vocab_size: int
    max_model_len: int
    max_num_draft: int


class Watched:
    """A proposer whose histories are compared after each call. An engine has its own copy, so a write costs only
    drafts, since the proposer then reads wrong tokens."""

    def __init__(self, proposer: Proposer):
        self._proposer, self.num_writes = proposer, 0
        self.observe, self.forget = proposer.observe, proposer.forget
        self.reads_ends = callable(finish := getattr(proposer, "finish", None))
        self.finish = finish

    def propose(self, batch: DraftBatch) -> Draft:
        copies = Histories().batch(batch, range(batch.num_reqs)).token_ids
        try:
            return self._proposer.propose(replace(batch, token_ids=copies))
        finally:
            self.num_writes += not all(map(np.array_equal, copies, batch.token_ids))


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the proposer violates no rule, otherwise 1."""
    config, trace = parse_config(configured(args.proposer, args.options, args.time_budget_ms)), load()
    text = {}
    if args.tokenizer:
        from vllm_specplugins.tools.base_model import load_tokenizer

        text = services(load_tokenizer(args.tokenizer), trace.vocab_size)
    with tracebacks() as seen, progress() as bars:
        task = bars.add_task("steps of the recording", total=len(trace.steps))
        violations, counters = check(config, trace, lambda: bars.advance(task), text)
    if counters.request_steps:
        show_table([args.proposer], {"": _figures(counters)}, f"protocol {PROTOCOL_VERSION}")
    for sentence in violations:
        say(f"violated: {sentence}")
    for text_of in dict.fromkeys(seen):
        say(text_of)
    if not violations:
        say("No rule is violated.")
    return 1 if violations else 0


def configured(proposer: str, options: Mapping[str, Any], time_budget_ms: int) -> dict[str, Any]:
    """Returns the `speculative_config` of "package.module:Class", or of a registered method. Raises ConfigError for an
    unknown method."""
    common = {"time_budget_ms": time_budget_ms}
    if ":" in proposer:
        return {"method": "custom", "proposer": proposer, "options": dict(options), **common}
    registered = registered_methods()
    if proposer not in registered:
        names = ", ".join(registered) or "none"
        raise ConfigError(
            f"check: PROPOSER must be package.module:Class or a registered method ({names}), not {proposer!r}."
        )
    has_config = hasattr(import_object(registered[proposer].proposer, proposer), "Config")
    return {"method": proposer, **common, **(options if has_config else {"options": dict(options)})}


@contextmanager
def tracebacks() -> Iterator[list[str]]:
    """Collects the tracebacks of faults, which the barrier logs for debugging."""
    seen: list[str] = []
    handler, level = logging.Handler(logging.DEBUG), logger.level

    def emit(record: logging.LogRecord) -> None:
        if record.msg == TRACEBACK:
            seen.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield seen
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _no_tokenizer(text: str) -> list[int]:
    raise ValueError("check has no tokenizer; name one with --tokenizer")


def check(
    config: SpecConfig,
    trace: Trace,
    advance: Callable[[], None] = lambda: None,
    text: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[str], Counters]:
    """Replays the trace against the configured proposer, whose context has these `text` services. Returns its
    violations, one sentence each, and its counters. Raises ConfigError if the proposer cannot be built."""
    context = ProposerContext(
        vocab_size=trace.vocab_size,
        max_model_len=trace.max_model_len,
        max_num_reqs=len(trace.histories),
        max_num_draft=trace.max_num_draft,
        time_budget_ms=config.common.time_budget_ms,
        **{"tokenize": _no_tokenizer, **text},
    )
    proposer = build_proposer(config, context)
    watched = Watched(proposer)
    barrier = FaultBarrier(watched, trace.vocab_size, trace.max_num_draft, config.common.time_budget_ms)
    play(trace, barrier, advance)
    violations = [*_violations(proposer, barrier.counters, trace), *_on_device(config, context)]
    if watched.num_writes:
        custom: Any = config.method_config
        violations.append(
            f"{custom.proposer} wrote to batch.token_ids in {_steps(watched.num_writes)}; these arrays are read-only."
        )
    return violations, barrier.counters


def _violations(proposer: Proposer, counters: Counters, trace: Trace) -> Iterator[str]:
    """Yields the proposer's faults by kind (the barrier has logged the first cause of each), and ended requests that it
    still stores."""
    for kind, count in counters.faults.items():
        yield f"It {DID[kind]} in {_steps(count)}."
    if counters.times_switched_off:  # then the guard does not call `forget`, either
        yield f"The circuit breaker opened after {MAX_FAULTS} faults: an engine would continue without its drafts."
        return
    gone = {name_of(number) for number in range(len(trace.histories))}
    for name, value in getattr(proposer, "__dict__", {}).items():
        entries = value if isinstance(value, dict | set | list | tuple) else ()
        if held := gone.intersection(entry for entry in entries if isinstance(entry, str)):
            yield f"Its {name} still holds {len(held)} of {len(gone)} requests that ended. Drop them in forget."


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count > 1)}"


def _on_device(config: SpecConfig, context: ProposerContext) -> Iterator[str]:
    """Yields the reason why a CUDA graph cannot record a `DeviceProposer`, and the inputs to which it writes. The
    proposer drafts once with tensors that have no values."""
    proposer: Any = build_proposer(config, context)
    if not getattr(proposer, "drafts_on_device", False):
        return
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            shape = context.max_num_reqs, context.max_model_len
            texts = DeviceTexts(torch.zeros(shape, dtype=torch.int32), torch.ones(shape[0], dtype=torch.int32))
            limits = torch.full((3,), context.max_num_draft, dtype=torch.int32)
            given = {**texts._asdict(), "slots": torch.arange(3), "limits": limits}
            versions = [tensor._version for tensor in given.values()]
            checked_draft(proposer.draft(texts, given["slots"], limits), limits, context.max_num_draft)
    except Exception as error:
        yield f"No CUDA graph can record it, so it drafts nothing on a GPU ({fault_of(error, ()).cause})."
        return
    for (name, tensor), version in zip(given.items(), versions, strict=True):
        if tensor._version != version:
            yield f"It writes to {name}, which is read-only: on a GPU, that damages the requests. Write to a copy."


def _figures(counters: Counters) -> list[tuple[str, str]]:
    steps = counters.request_steps
    return [
        ("steps of single requests", f"{steps}"),
        ("with a draft", f"{counters.drafts / steps:.0%}"),
        ("draft tokens accepted", f"{counters.accepted_tokens} of {counters.drafted_tokens}"),
        ("tokens per step", f"{1 + counters.accepted_tokens / steps:.2f}"),
        ("us per request and step", f"{counters.propose_ms * 1000 / steps:.1f}"),
    ]


def load() -> Trace:
    raw = json.loads(SHIPPED.read_text())
    return Trace(**{**raw, "histories": [np.array(tokens, np.int32) for tokens in raw["histories"]]})


def play(trace: Trace, barrier: FaultBarrier, advance: Callable[[], None]) -> None:
    """Replays all steps against a barrier, and further steps until slow requests end."""
    player = Player(trace, trace.max_num_draft, trace.max_model_len, barrier)
    last = {number: step for step, (requests, _) in enumerate(trace.steps) for number in requests}
    over: set[int] = set()

    def forget_all(numbers: Sequence[int]) -> None:
        player.forget(numbers)
        over.update(filter(player.has_ended, numbers))

    for step in itertools.count():
        requests, forgotten = trace.steps[step] if step < len(trace.steps) else ([], [])
        advance()
        forget_all([number for number in forgotten if number not in over and last[number] >= step])
        # A request that is slower than in the recording continues until its end.
        late = [number for number, end in last.items() if end < step]
        running = [number for number in dict.fromkeys([*requests, *late]) if number not in over]
        if running:
            player.step(running)
            forget_all(list(filter(player.has_ended, running)))
        elif step >= len(trace.steps):
            break
    # A barrier forwards ended requests only before its next `propose`.
    nothing = np.zeros(1, np.int32)
    barrier.propose(replace(player.batch([0]), request_ids=[NEWCOMER]), Feedback([NEWCOMER], nothing, nothing))
