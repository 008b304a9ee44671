"""What the verification of both runners shares: the noise of drafts, edited rows behind a draft, and the likeliest
tokens of verified rows."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from vllm_specplugins.draft import ArgmaxTokens
from vllm_specplugins.isolation.exchange import likeliest_at
from vllm_specplugins.kernels.rejection.adjust import Edits, adjust

EDITED_ROWS = 512  # that a step with drafts edits at once, in a float32 copy
# What is added to a request's seed for the noise of its drafts, so that verification draws with none of it.
DRAFT_NOISE = 0x3C6EF372FE94F82B


def edit_drafted(
    idx_mapping: torch.Tensor,  # [num_reqs]
    edits: Edits,
    logits: torch.Tensor,  # [N, vocab_size]
    drafts: torch.Tensor,  # [N, T]
    positions: torch.Tensor,  # [N]
    counts: torch.Tensor | None = None,  # [N]
) -> torch.Tensor:
    """`draft.Target.edit`, float32, for requests of these states: what verification does to the row after T drafts, or
    after `counts` of them, which a device has to be waited for."""
    num_rows, num_drafts = drafts.shape
    steps = torch.arange(num_drafts + 1, device=logits.device)
    numbers = drafts.new_full((num_rows,), num_drafts) if counts is None else counts
    fed = torch.cat((drafts[:, :1], drafts), dim=1) if num_drafts else drafts.new_zeros(num_rows, 1)
    places = (positions - numbers)[:, None] + steps
    is_fed = ... if counts is None else steps <= counts[:, None]
    starts = torch.cat((numbers.new_zeros(1), (numbers + 1).cumsum(0))).int()
    states = idx_mapping.long().repeat_interleave(num_rows // max(1, len(idx_mapping)))
    layout = starts, fed[is_fed].flatten().int(), places[is_fed].flatten(), states  # as verification's: no other kernel
    edited: torch.Tensor = adjust(logits, *layout, edits, num_drafts, only_last=True)
    return edited


class ArgmaxLog:
    """The likeliest token of each row that a step verifies, until that step drafts. N: rows.

    Args:
        is_read: whether a proposer asks for it; else nothing is kept.
    """

    def __init__(self, is_read: bool) -> None:
        self.is_read = is_read
        self._parts: list[torch.Tensor] = []

    def begin(self) -> None:
        """Another step."""
        self._parts.clear()

    def add(self, fed: torch.Tensor, logits: torch.Tensor) -> None:
        """The step's next rows: the tokens [N] that were fed at them, and the edited logits [N, vocab_size]."""
        if self.is_read:
            self._parts.append(torch.stack((fed.int(), logits.argmax(-1).int())))

    def take(self, counts: npt.NDArray[np.int64], places: Mapping[int, int]) -> ArgmaxTokens | None:
        """What was seen, with one copy from the device; None if nothing was.

        Args:
            counts: [num_reqs], rows of each request.
            places: of those that sampled a token, where they are in the batch that is drafted for.
        """
        parts, self._parts = self._parts, []
        if not parts or sum(part.shape[1] for part in parts) != counts.sum():  # vLLM sampled for nobody
            return None
        fed, next_ids = torch.cat(parts, dim=1).cpu().numpy()
        requests = np.arange(len(counts), dtype=np.int32).repeat(counts)
        return likeliest_at(ArgmaxTokens(requests, fed, next_ids), places, len(counts))
