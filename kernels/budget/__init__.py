"""Which drafts of a batch are verified, where a step has room for a number of draft tokens: the likeliest.

Front door: `share_budget` picks the implementation. It waits for nothing. As vLLM's adaptive verification does: a token
is worth its probability of survival, the product of its draft's probabilities up to it, which only falls along a draft;
so what is admitted is a prefix of each. Among equals the earlier row wins, so that all ranks of a group admit the same.
R: rows of the batch, S: slots of requests, K: most tokens of a draft.
"""

from importlib import import_module
from typing import Any, NamedTuple

from ..implementations import implementation_of


class Layout(NamedTuple):
    """Where the rows of a step's tokens begin; written.

    Args:
        cu_num_logits: [S + 1] int32, of the tokens whose logits are looked at: those admitted, and `num_bonus` a row.
        query_start_loc: [S + 1] int32, of all tokens that run; after the batch, their number.
    """

    cu_num_logits: Any
    query_start_loc: Any


def share_budget(
    layout: Layout,
    # [S, K] float32 in [0, 1]: probability of each token if those before it are accepted
    accept_probs: Any,
    # [R] the slot of each row
    slots: Any,
    # [2, R] int32: tokens of its draft, and its other tokens
    num_tokens: Any,
    budget: int,
    num_bonus: int,
    implementation: str | None = None,
) -> None:
    """Writes the layout of a step that verifies `budget` of its draft tokens.

    Args:
        budget: at most as many as there are.
        implementation: "reference" or "fused"; None: fused on a GPU, else the reference.

    Raises:
        ValueError: no such implementation.

    >>> import torch
    >>> layout = Layout(*torch.zeros(2, 4, dtype=torch.int32))
    >>> probs, counts = torch.tensor([[0.9, 0.5], [0.8, 0.7], [0.0, 0.0]]), torch.tensor([[2, 2], [1, 1]])
    >>> share_budget(layout, probs, torch.tensor([0, 1]), counts.int(), 3, 1)
    >>> layout.query_start_loc.tolist()  # 0.9, 0.8 and 0.8 * 0.7
    [0, 2, 5, 5]
    """
    module = import_module(f".{implementation_of(accept_probs, implementation)}", __name__)
    module.share_budget(layout, accept_probs, slots, num_tokens, budget, num_bonus)
