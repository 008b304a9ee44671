"""Drafts the rest of the line: when the newest tokens began a line before, the tokens that followed there."""

from dataclasses import dataclass

import numpy as np

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext


@dataclass(frozen=True)
class Config:
    """The method's fields in `--speculative-config`. A ValueError becomes an error message that names the method.

    Args:
        min_match: number of tokens that must match before a draft, 1 to 16.
    """

    min_match: int = 2

    def __post_init__(self) -> None:
        if type(self.min_match) is not int or not 1 <= self.min_match <= 16:
            raise ValueError(f"min_match must be an integer from 1 to 16, not {self.min_match!r}.")


class LineRepeat:
    """Finds the latest earlier place of the last `min_match` tokens, and drafts from there to the end of the line."""

    Config = Config
    protocol_version = 1

    def __init__(self, config: Config, context: ProposerContext):
        self._num_match, self._max_num_draft = config.min_match, context.max_num_draft
        try:
            self._line_ends = set(context.tokenize("\n"))
        except ValueError:  # no tokenizer: a draft has K tokens
            self._line_ends = set()

    def propose(self, batch: DraftBatch) -> Draft:
        token_ids = np.zeros((batch.num_reqs, self._max_num_draft), np.int32)
        num_draft = np.zeros(batch.num_reqs, np.int32)
        for row, tokens in enumerate(batch.token_ids):
            rest = self._rest_of_line(tokens, int(batch.max_num_draft[row]))
            token_ids[row, : len(rest)], num_draft[row] = rest, len(rest)
        return Draft(token_ids, num_draft)

    def _rest_of_line(self, tokens: np.ndarray, limit: int) -> np.ndarray:
        """Returns at most `limit` tokens; none if the newest tokens have no earlier place."""
        size = self._num_match
        if limit == 0 or len(tokens) <= size:
            return tokens[:0]
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        places = np.flatnonzero((windows == tokens[-size:]).all(axis=1))
        if not len(places):
            return tokens[:0]
        start = int(places[-1]) + size
        rest = tokens[start : start + limit]
        ends = [at for at, token in enumerate(rest.tolist()) if token in self._line_ends]
        return rest[: ends[0] + 1] if ends else rest

    def observe(self, feedback: Feedback) -> None:
        """Learns nothing from outcomes."""

    def forget(self, request_ids: list[str]) -> None:
        """Has no state of requests."""
