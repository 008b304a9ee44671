"""What trains a part, before an engine or while it serves: the part learns to predict what the model does.

Distillation against the full model's own distribution (Hinton et al. 2015); the model stays as it is. Knows neither
where the states come from nor what becomes of the part. T: tokens of a row, H: hidden size, V: vocabulary.
"""

import math
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
    """The frozen model that a part is trained for."""

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] float32 of states [T, H] after the final norm."""

    def passes(self, first: int, num_tokens: int) -> Run:
        """The layers from `first` on and the final norm, over a row of so many tokens, again and again."""


@dataclass(frozen=True, slots=True)
class Guess:
    """One draft token of every draft of a row; the tokens of one draft have the same index in all guesses.

    Args:
        logits: [N, V] float32.
        start: the first one is of the token that the model emits after this one of the row.
    """

    logits: torch.Tensor
    start: int

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """[N, ...] of [T, ...] of a row, such as the model's logits, those that these are a guess of."""
        return full[self.start : self.start + len(self.logits)]


# The guesses, one for each of K draft tokens, in a row of which n layers left states[n], [T, H]; the last is normed.
Guesser = Callable[[States, int], Iterator[Guess]]


def distil(model: Model, texts: Iterable[States], guesser: Guesser, num_draft: int, num_tokens: int) -> float:
    """Adds the gradient of the mean loss of some rows, of so many tokens, to the part's; returns it, in nats a draft
    token."""
    total, num_drafted = 0.0, num_tokens * num_draft
    for states in texts:  # a row at a time: logits [T, V], of which a part may make num_draft, are the largest thing
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
    """Drafts begin after each token of the row but the first, before which there is no state."""

    def guesses(states: States, num_draft: int) -> Iterator[Guess]:
        config, num_tokens = head.config, len(states[0])
        early, last = states[config.early_layers].float(), states[-1].float()
        run = model.passes(config.late_layer, num_tokens)
        run(states[config.late_layer])
        for step in range(1, min(num_draft, num_tokens - 1) + 1):
            last = F.pad(last[:-1], (0, 0, 1, 0))  # of the token before
            last = run(head.states(early, last), step)
            yield Guess(model.logits(last[step:]), step)

    return guesses


def exit_guesser(model: Model, head: ExitHead) -> Guesser:
    """Its draft tokens are all drafted in the same way."""

    def guesses(states: States, num_draft: int) -> Iterator[Guess]:
        logits = head.logits(states[head.config.exit_layer].float())
        for start in range(min(num_draft, len(logits))):
            yield Guess(logits[start:], start)

    return guesses


def medusa_guesser(model: Model, heads: MedusaHeads) -> Guesser:
    """Drafts begin after the token that follows each of the row."""

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
    """Expected tokens and steps of an engine that begins with the first draft, and then after what it has emitted.

    Args:
        accept_probs: [K, N] that each draft token is accepted, if those before it are.

    >>> walk(torch.tensor([[1.0, 0.0, 1.0, 0.0]]))  # two tokens, two tokens
    (4.0, 2.0)
    """
    kept = accept_probs.double().cumprod(0)
    accepted = torch.cat((torch.ones_like(kept[:1]), kept))
    ends = (accepted - torch.cat((kept, torch.zeros_like(kept[:1])))).T.tolist()  # [N, K + 1] accepted tokens
    begun = [1.0] + [0.0] * (len(ends) + len(kept))  # probability that a step begins there
    for place, own in enumerate(ends):
        for count, prob in enumerate(own):
            begun[place + 1 + count] += begun[place] * prob
    emitted = accepted.sum(0).tolist()
    return sum(map(float.__mul__, begun, emitted)), sum(begun[: len(ends)])


def effective_norm_weight(norm: Any, like: torch.Tensor, eps: float) -> torch.Tensor | None:
    """[H] float32, what an RMSNorm multiplies by, seen from outside; None for another kind of norm.

    Args:
        like: of the device and the dtype that it reads.
    """
    if getattr(norm, "weight", None) is None or norm.weight.ndim != 1:
        return None
    size = len(norm.weight)
    weight: torch.Tensor = norm(like.new_ones(1, size))[0].float() * math.sqrt(1 + eps)
    probe = torch.linspace(-1, 2, size, dtype=like.dtype, device=like.device)[None]
    expected = F.rms_norm(probe.float(), weight.shape, weight, eps)
    return weight if torch.allclose(norm(probe).float(), expected, rtol=0.05, atol=0.05) else None
