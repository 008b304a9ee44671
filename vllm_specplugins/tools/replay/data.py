"""Reads recorded traffic: prompts, their outputs, and tenants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.draft import Int32Array
from vllm_specplugins.tools.data import Sample, Tokenizer, accepted_lengths, answered

LARGE_VOCABULARY = 1 << 18  # at least the size of today's vocabularies
Accepted = Mapping[str, Int32Array]


@dataclass(slots=True)
class Traffic:
    """Requests by number, in the order of arrival. `accepted` holds, by drafter and number of output tokens so far, the
    number of its draft tokens that would be accepted."""

    histories: list[Int32Array] = field(default_factory=list)  # prompt and output of each
    prompt_lengths: list[int] = field(default_factory=list)  # number of tokens of its prompt
    options: list[Mapping[str, Any]] = field(default_factory=list)  # its `SamplingParams.extra_args["specplugins"]`
    accepted: list[Accepted] = field(default_factory=list)

    def add(
        self, prompt: Sequence[int], output: Sequence[int], accepted: Accepted | None = None, **options: Any
    ) -> None:
        """Adds a request with an output of at least one token."""
        self.histories.append(np.array([*prompt, *output], np.int32))
        self.prompt_lengths.append(len(prompt))
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
        """Returns a vocabulary size for these tokens and the tokens of proposers; no text contains the last token."""
        return max(LARGE_VOCABULARY, *(2 + int(history.max()) for history in self.histories))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The selected requests of a log. `ids` selects requests with "even" or "odd" ids (or line numbers, without ids),
    or "all"."""

    limit: int  # maximum number of requests, from the first on
    ids: str = "all"
    max_output: int | None = None  # tokens of the longest output; None: any number
    drafter: str | None = None  # a drafter whose accepted lengths each request must have; None: no drafter

    def allows(self, number: int, sample: Sample) -> bool:
        name = str(sample.row.get("id", number))
        is_odd = int(name[-1] if name.isdecimal() else number) % 2 == 1  # it may have more digits than an int allows
        is_long = self.max_output is not None and len(sample.output or ()) > self.max_output
        return self.ids in ("all", "odd" if is_odd else "even") and not is_long


def read_traffic(
    files: Sequence[Path], tokenizer: Tokenizer, chosen: Chosen, advance: Callable[[], None] = lambda: None
) -> Traffic:
    """Returns the selected requests of the files (tools/data.py; errors as in `answered`). The second half of a text
    without a request counts as the answer to its first half."""
    traffic = Traffic()
    every = (sample for number, sample in enumerate(answered(files, tokenizer)) if chosen.allows(number, sample))
    for sample in islice(every, chosen.limit):
        try:
            prompt, output = sample.prompt, sample.output or []
            if not prompt and "text" in sample.row:
                prompt, output = output[: len(output) // 2], output[len(output) // 2 :]
            lengths = accepted_lengths(sample.row, chosen.drafter).items()
            accepted = {name: np.array(counts, np.int32) for name, counts in lengths}
            if not isinstance(tenant := sample.row.get("tenant", ""), str):
                raise ConfigError(f"must have text as tenant, not {brief(tenant)}.")
            traffic.add(prompt, output, accepted, **({"tenant": tenant.encode(errors="replace")} if tenant else {}))
        except ConfigError as error:
            raise ConfigError(f"--dataset-path: {sample.place} {error}") from None
        advance()
    if traffic.num_output_tokens <= len(traffic.histories):
        raise ConfigError("--dataset-path must have a request with an output of at least two tokens.")
    return traffic


def name_of(number: int) -> str:
    return f"request-{number}"


def number_of(name: str) -> int:
    return int(name.rpartition("-")[2])
