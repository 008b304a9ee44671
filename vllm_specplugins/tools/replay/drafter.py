"""Replays a drafter that a log recorded: for each number of output tokens, the number of draft tokens that the target
would have accepted. A draft consists of that many tokens of the output, followed by wrong ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplugins.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError, brief
from vllm_specplugins.draft import Int32Array
from vllm_specplugins.methods import BUILT_IN
from vllm_specplugins.tools.picker import Config
from vllm_specplugins.tools.replay.data import Traffic, number_of

LOOKUP_LENGTH = 31  # K of a lookup by default


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter with accepted lengths in logs."""

    name: str
    ms: float  # time of all its passes for a step's drafts
    token_ms: float  # time of each draft token of any request
    num_draft: int  # K

    @classmethod
    def parse(cls, text: str) -> "Drafter":
        """Parses a drafter from NAME:MS[:MS_A_TOKEN]:K. Raises ConfigError for another form, or a number out of range.

        >>> Drafter.parse("eagle3:2.14:5")
        Drafter(name='eagle3', ms=2.14, token_ms=0.0, num_draft=5)
        """
        name, *times, num_draft = text.split(":") if text.count(":") in (2, 3) else ("", "", "")
        try:
            drafter = cls(name, float(times[0]), float(times[-1]) if times[1:] else 0.0, int(num_draft))
        except ValueError:
            drafter = cls("", 0.0, 0.0, 0)
        fits = 0 <= drafter.ms < np.inf and 0 <= drafter.token_ms < np.inf
        if not (name and fits and 1 <= drafter.num_draft <= MAX_NUM_SPECULATIVE_TOKENS):
            allowed = f"NAME:MS[:MS_A_TOKEN]:K, times of 0 or more and K from 1 to {MAX_NUM_SPECULATIVE_TOKENS}"
            raise ConfigError(f"--drafter must be {allowed}, not {brief(text)}.")
        return drafter

    @property
    def cascade(self) -> Config:
        method = self.name if self.name in BUILT_IN else "draft_model"
        stage = {"method": method, "model": "MODEL", "num_speculative_tokens": self.num_draft}
        stages = [{"method": "prompt_lookup"}, stage]
        return {"method": "cascade", "stages": stages, "num_speculative_tokens": LOOKUP_LENGTH}

    def step_ms(self, num_reqs: int, length: int) -> float:
        """Returns the ms of a step in which it drafts this number of tokens; if it only reads the newest tokens, the ms
        of one pass."""
        return (self.ms / self.num_draft + self.token_ms * num_reqs) * max(1, length)

    def draft(self, traffic: Traffic, request_ids: Sequence[str], texts: Sequence[Int32Array]) -> Int32Array:
        """Returns, for each text, the tokens that the target would accept, followed by wrong ones, [num_reqs, K]."""
        token_ids = np.full((len(texts), self.num_draft), traffic.vocab_size - 1, np.int32)
        for row, number, text in zip(token_ids, map(number_of, request_ids), texts, strict=True):
            lengths, place = traffic.accepted[number][self.name], len(text) - traffic.prompt_lengths[number]
            count = min(self.num_draft, int(lengths[place])) if place < len(lengths) else 0
            right = traffic.histories[number][len(text) : len(text) + count]
            row[: len(right)] = right
        return token_ids
