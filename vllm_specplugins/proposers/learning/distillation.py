"""Distils a frozen model into a part, which learns the model's distribution (Hinton et al. 2015), offline or during
serving. K: draft tokens, N: drafts, T: tokens of a row, H: hidden size, V: vocabulary."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.functional import cross_entropy

from vllm_specplugins.proposers.heads.exit_head import ExitHead
from vllm_specplugins.proposers.heads.jump_head import JumpHead
from vllm_specplugins.proposers.heads.medusa_heads import MedusaHeads

States = list[torch.Tensor]
Run = Callable[..., torch.Tensor]  # of states, and a step


class Model(Protocol):
    """The frozen model for which a part is trained."""

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Returns logits [T, V] float32 of states [T, H] after the final norm."""

    def passes(self, first: int, num_tokens: int) -> Run:
        """Returns a function that runs the layers from `first` on and the final norm over a row of this length,
        repeatedly."""


@dataclass(frozen=True, slots=True)
class Guess:
    """The prediction of one token of each draft in a row; the tokens of one draft have the same index in all guesses.
    The first of the `logits` [N, V] float32 predicts the token that the model emits after the place `start` in the
    row."""

    logits: torch.Tensor
    start: int

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the elements [N, ...] of a row's [T, ...] (such as the model's logits) that these logits predict."""
        return full[self.start : self.start + len(self.logits)]


# Returns up to K guesses from states[n], [T, H] after n layers; the last states are normed.
Guesser = Callable[[States, int], Iterator[Guess]]


def distil(model: Model, texts: Iterable[States], guesser: Guesser, num_draft: int, num_tokens: int) -> float:
    """Adds the gradient of the mean loss to the part's gradients, and returns the loss in nats per draft token. `texts`
    yields the states of each row; `num_tokens` counts the tokens of all rows."""
    total, num_drafted = 0.0, num_tokens * num_draft
    for states in texts:  # one row at a time: its logits, up to num_draft [T, V], take the memory
        with torch.autocast("cuda", torch.bfloat16, enabled=states[-1].device.type == "cuda"):
            full = model.logits(states[-1])
            loss = sum(
                cross_entropy(guess.logits.float(), guess.of(full).softmax(-1), reduction="sum")
                for guess in guesser(states, num_draft)
            )
        (loss / num_drafted).backward()
        total += loss.item() / num_drafted
    return total


def jump_guesser(model: Model, head: JumpHead) -> Guesser:
    """Begins a draft after each token of the row except the first, which has no previous state."""

    def guesses(states: States, num_draft: int) -> Iterator[Guess]:
        config, num_tokens = head.config, len(states[0])
        early, last = states[config.early_layers].float(), states[-1].float()
        run = model.passes(config.late_layer, num_tokens)
        run(states[config.late_layer])
        for step in range(1, min(num_draft, num_tokens - 1) + 1):
            last = F.pad(last[:-1], (0, 0, 1, 0))  # of the previous token
            last = run(head.states(early, last), step)
            yield Guess(model.logits(last[step:]), step)

    return guesses


def exit_guesser(model: Model, head: ExitHead) -> Guesser:
    def guesses(states: States, num_draft: int) -> Iterator[Guess]:
        logits = head.logits(states[head.config.exit_layer].float())
        for start in range(min(num_draft, len(logits))):
            yield Guess(logits[start:], start)

    return guesses


def medusa_guesser(model: Model, heads: MedusaHeads) -> Guesser:
    """Begins a draft after the successor of each token of the row."""

    def guesses(states: States, num_draft: int) -> Iterator[Guess]:
        for step, logits in enumerate(heads.logits(states[-1].float(), num_draft, model.logits)):
            yield Guess(logits[: -1 - step], step + 1)

    return guesses


GUESSERS: dict[type, Callable[[Any, Any], Guesser]] = {
    JumpHead: jump_guesser,
    ExitHead: exit_guesser,
    MedusaHeads: medusa_guesser,
}


def walk(accept_probs: torch.Tensor) -> tuple[float, float]:
    """Returns the expected numbers of tokens and steps of an engine in which each step begins after the tokens of the
    previous step. `accept_probs` are [K, N], for each draft token given that the earlier ones are accepted.

    >>> walk(torch.tensor([[1.0, 0.0, 1.0, 0.0]]))  # two tokens, two tokens
    (4.0, 2.0)
    """
    survival = accept_probs.double().cumprod(0)
    accepted = torch.cat((torch.ones_like(survival[:1]), survival))
    ends = (accepted - torch.cat((survival, torch.zeros_like(survival[:1])))).T.tolist()  # [N, K + 1] accepted tokens
    begun = [1.0] + [0.0] * (len(ends) + len(survival))  # probability that a step begins at this place
    for place, probs in enumerate(ends):
        for count, prob in enumerate(probs):
            begun[place + 1 + count] += begun[place] * prob
    emitted = accepted.sum(0).tolist()
    return sum(map(float.__mul__, begun, emitted)), sum(begun[: len(ends)])
