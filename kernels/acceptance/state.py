"""What is known of acceptance: how it begins, and how a request is forgotten."""

from typing import Any

import torch

from . import FIRST_GUESSES, NUM_GRADES, PRIOR_WEIGHT, State


def new_state(num_stages: int, num_slots: int, max_num_draft: int, device: Any) -> State:
    """Of requests of which nothing is known."""
    tried, accepted = torch.zeros(2, num_slots, num_stages, NUM_GRADES, dtype=torch.float64, device=device)
    shared_tried = torch.full((num_stages, NUM_GRADES), PRIOR_WEIGHT, dtype=torch.float64, device=device)
    sent = torch.zeros(num_slots, max_num_draft, dtype=torch.float64, device=device)
    guesses = torch.tensor(FIRST_GUESSES, dtype=torch.float64).to(device)
    num_sent = torch.zeros(num_slots, dtype=torch.int32, device=device)
    return State(tried, accepted, shared_tried, shared_tried * guesses, num_sent, sent.int(), sent)


def clear(state: State, slots: torch.Tensor) -> None:
    """Forgets the requests of these slots, [any] int64."""
    for array in (state.tried, state.accepted, state.num_sent):
        array.index_fill_(0, slots, 0)
