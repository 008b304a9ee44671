"""Recorded traffic: prompts and their outputs, arrival times, options and tenants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.draft import Int32Array
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.request_options import MAX_CONTEXT, PLAIN, REFERENCE, Limits, understood
from vllm_specplugins.tools.data import Sample, Tokenizer, accepted_lengths, answered, token_ids

LARGE_VOCABULARY = 1 << 18  # as large as that of any model of today
CHECKED = (*PLAIN, REFERENCE)  # others belong to a method
Accepted = Mapping[str, Int32Array]
DEEPEST = 64  # levels of options: proposers get a copy of them
LIMITS = Limits(parse_config({"method": "prompt_lookup"}), vocab_size=1 << 31, max_model_len=MAX_CONTEXT)


@dataclass(slots=True)
class Traffic:
    """Requests by number, in the order of their arrival. `accepted` holds by drafter and number of output tokens so far
    how many tokens of its draft would be accepted."""

    histories: list[Int32Array] = field(default_factory=list)  # prompt and output of each
    prompt_lengths: list[int] = field(default_factory=list)  # number of tokens of its prompt
    start_ms: list[float] = field(default_factory=list)  # its arrival since the beginning; 0 where the log holds none
    options: list[Mapping[str, Any]] = field(default_factory=list)  # its `SamplingParams.extra_args["specplugins"]`
    accepted: list[Accepted] = field(default_factory=list)

    def add(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        start_ms: float = 0.0,
        accepted: Accepted | None = None,
        **options: Any,
    ) -> None:
        """Adds a request; its output holds a token or more."""
        self.histories.append(np.array([*prompt, *output], np.int32))
        self.prompt_lengths.append(len(prompt))
        self.start_ms.append(start_ms)
        self.options.append(options)
        self.accepted.append(accepted or {})

    def first(self, count: int) -> "Traffic":
        return Traffic(*(getattr(self, entry.name)[:count] for entry in fields(self)))

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.histories)) - sum(self.prompt_lengths)

    @property
    def max_model_len(self) -> int:
        return max(map(len, self.histories), default=0) + 1

    @property
    def vocab_size(self) -> int:
        """A vocabulary for these tokens and those of proposers; no text holds its last token."""
        return max(LARGE_VOCABULARY, *(2 + int(history.max()) for history in self.histories))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The requests of a log that are played. `ids` picks "even" or "odd" ones by their "id", or by their places in the
    log where they have none, or "all"."""

    limit: int  # the first ones, at most as many
    ids: str = "all"
    max_output: int | None = None  # tokens of the longest output; None: any number
    drafter: str | None = None  # each must hold its accepted lengths; None: those of none

    def allows(self, number: int, sample: Sample) -> bool:
        name = str(sample.row.get("id", number))
        is_odd = int(name if name.isdecimal() else number) % 2 == 1
        is_long = self.max_output is not None and len(sample.output or ()) > self.max_output
        return self.ids in ("all", "odd" if is_odd else "even") and not is_long


def read_traffic(
    files: Sequence[Path], tokenizer: Tokenizer, chosen: Chosen, advance: Callable[[], None] = lambda: None
) -> Traffic:
    """The chosen requests of the files (tools/data.py; errors: `answered`). A text without a request is played as if
    its second half answered the first."""
    traffic, place, start_ms = Traffic(), "", 0.0
    every = (sample for number, sample in enumerate(answered(files, tokenizer)) if chosen.allows(number, sample))
    for sample in islice(every, chosen.limit):
        try:
            if sample.place != place:
                place, start_ms = sample.place, _start_ms(sample.row, start_ms)
            prompt, output = sample.prompt, sample.output or []
            if not prompt and "text" in sample.row:
                prompt, output = output[: len(output) // 2], output[len(output) // 2 :]
            lengths = accepted_lengths(sample.row, chosen.drafter).items()
            accepted = {name: np.array(counts, np.int32) for name, counts in lengths}
            traffic.add(prompt, output, start_ms, accepted, **_options(sample.row, tokenizer))
        except ConfigError as error:
            raise ConfigError(f"--data: {sample.place} {error}") from None
        advance()
    if traffic.num_output_tokens <= len(traffic.histories):
        raise ConfigError("--data must hold a request with an output of two tokens or more.")
    return traffic


def _start_ms(row: Mapping[str, Any], earliest: float) -> float:
    seconds = row.get("time", 0.0)
    if "time" in row and not (isinstance(seconds, int | float) and earliest / 1000 <= seconds < 1e9):
        raise ConfigError(f"must hold a time in seconds, not before the last line's, not {brief(seconds)}.")
    return 1000.0 * float(seconds)


def _is_deep(value: Any, depth: int = DEEPEST) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _is_deep(item, depth - 1) for item in items)


def _options(row: Mapping[str, Any], tokenizer: Tokenizer) -> Mapping[str, Any]:
    options, tenant = row.get("options", {}), row.get("tenant", "")
    if not isinstance(options, dict) or _is_deep(options):
        raise ConfigError(f"must hold a JSON object of at most {DEEPEST} levels as options, not {brief(options)}.")
    if not isinstance(tenant, str):
        raise ConfigError(f"must hold text as tenant, not {brief(tenant)}.")
    if "reference" in options:
        options = {**options, "reference": token_ids(options["reference"], "reference", tokenizer)}
    understood({key: value for key, value in options.items() if key in CHECKED}, LIMITS)
    return {**options, "tenant": tenant.encode(errors="replace")} if tenant else options


def name_of(number: int) -> str:
    return f"request-{number}"


def number_of(name: str) -> int:
    return int(name.rpartition("-")[2])
