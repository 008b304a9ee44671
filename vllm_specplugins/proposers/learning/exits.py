"""What an exit read while it drafted, until the target has verified it. R: rows of a batch, K: tokens, H: hidden size.

A state is handed out for the same row, place and tokens alone: it is what these layers leave in verification, too.
"""

from typing import Any

import torch


class ExitStates:
    """Of the last drafts; written in place, so a graph may do it."""

    def __init__(self, num_rows: int, max_num_draft: int, hidden_size: int, device: Any, dtype: torch.dtype):
        self.states = torch.zeros(num_rows, max_num_draft, hidden_size, device=device, dtype=dtype)
        self.token_ids = torch.full((num_rows, max_num_draft), -1, device=device)
        self.firsts = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def put(self, step: int, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        """One token of each row, [R], where it stands, and its states [R, H]."""
        num_rows = len(token_ids)
        if step == 0:
            self.forget()
            self.firsts[:num_rows] = positions
        self.states[:num_rows, step], self.token_ids[:num_rows, step] = states, token_ids

    def forget(self) -> None:
        """Nothing was drafted."""
        self.token_ids.fill_(-1)

    def after(
        self,
        rows: torch.Tensor,  # [R] int64 of a request in the last batch; -1: it was not there
        token_ids: torch.Tensor,  # [R, K] that the target read
        firsts: torch.Tensor,  # [R] where the first one stands
        places: torch.Tensor,  # [R, T] int64, which of these
    ) -> torch.Tensor:
        """[R, T, H] states after so many layers; NaN where the exit did not read the same, or nothing."""
        num_rows, length = token_ids.shape
        is_known = (self.token_ids[rows] == token_ids) & ((rows >= 0) & (self.firsts[rows] == firsts))[:, None]
        found = torch.where(is_known.cumprod(1)[:, :, None] > 0, self.states[rows], torch.nan)
        places = torch.where((places >= 0) & (places < length), places, length)
        padded = torch.nn.functional.pad(found, (0, 0, 0, 1), value=torch.nan)
        return padded[torch.arange(num_rows, device=rows.device)[:, None], places]
