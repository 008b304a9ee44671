"""Distributes a step's budget of draft tokens: a step verifies the tokens that are likeliest to be accepted. As in
vLLM's adaptive verification, a token's score is the product of the acceptance probabilities of its draft up to that
token. The score never rises along a draft, so a prefix of each draft is admitted. Of equal scores the earlier row wins,
so all ranks of a group admit the same tokens. No operation waits for the device. R: rows of the batch, S: slots of
requests, K: max draft tokens."""

from typing import Any, NamedTuple

from ..implementations import module_of

_TILES = 32, 256  # rows of a batch; larger ones are held whole


class Layout(NamedTuple):
    """Two output arrays, [S + 1] int32 each, with the index at which each row's tokens begin. `cu_num_logits` counts
    the tokens with logits: the admitted ones and `num_bonus` per row. `query_start_loc` counts all tokens that run;
    entries after the batch hold the total."""

    cu_num_logits: Any
    query_start_loc: Any


def share_budget(
    layout: Layout,
    # [S, K] float32 in [0, 1], of each token if those before it are accepted
    accept_probs: Any,
    # [R] the slot of each row
    slots: Any,
    # [2, R] int32: draft tokens, and other tokens
    num_tokens: Any,
    budget: int,
    num_bonus: int,
    implementation: str | None = None,
) -> None:
    """Writes the layout of a step that verifies `budget` of its draft tokens, or all if there are fewer.
    `implementation`: "reference" or "fused", else a ValueError; None: fused on a GPU, else the reference.

    >>> import torch
    >>> layout = Layout(*torch.zeros(2, 4, dtype=torch.int32))
    >>> probs, counts = torch.tensor([[0.9, 0.5], [0.8, 0.7], [0.0, 0.0]]), torch.tensor([[2, 2], [1, 1]])
    >>> share_budget(layout, probs, torch.tensor([0, 1]), counts.int(), 3, 1)
    >>> layout.query_start_loc.tolist()  # 0.9, 0.8 and 0.8 * 0.7
    [0, 2, 5, 5]
    """
    module = module_of(__name__, accept_probs, implementation)
    module.share_budget(layout, accept_probs, slots, num_tokens, budget, num_bonus)


def tiles(num_slots: int) -> list[int]:
    """Returns the numbers of rows for which the kernel is compiled.

    >>> tiles(1), tiles(100)
    ([2], [32, 128])
    """
    return [*(rows for rows in _TILES if rows < num_slots), 1 << max(1, (num_slots - 1).bit_length())]
