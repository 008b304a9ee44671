"""Defines the kinds of parts that can be trained: an exit head, a jump, and look-ahead embeddings. Tokens before a
draft have the target's keys and values, and tokens of the draft have the part's. Of K passes over a row, the k-th sees
the text up to k tokens before a token (as in EAGLE-3, Li et al. 2025, "training-time test")."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
from vllm_specplugins.proposers.heads.look_ahead import LookAhead, LookAheadConfig
from vllm_specplugins.proposers.learning.distillation import Guess, Guesser, States, exit_guesser, jump_guesser
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.files import every_nth
from vllm_specplugins.tools.training.core import Settings

RIDGE = 1e-3  # of the mean square of a state
FITTED_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitHeadSettings(Settings):
    """A norm and a head that read some layers as the model's norm and head read all layers (ExitHeadConfig)."""

    exit_layer: int
    layers: tuple[int, ...] | None = None  # indices of the layers; None: the first ones

    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        return {"exit_layer": (1, base.num_layers - 1)}

    def check(self, base: BaseModel) -> None:
        super(ExitHeadSettings, self).check(base)
        if self.layers and self.layers[-1] >= base.num_layers:
            last = base.num_layers - 1
            raise ConfigError(f"--layers must be from 0 to {last} for this model, not {self.layers[-1]}.")

    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> ExitHead:
        return initial_head(base, self.exit_layer, self.layers)

    def guesser(self, base: BaseModel, part: ExitHead) -> Guesser:
        return exit_guesser(base, part) if self.layers is None else skipping_guesser(base, self.layers, part)

    def serving(self, folder: Path) -> dict[str, Any]:
        layers = {"layers": list(self.layers)} if self.layers else {"exit_layer": self.exit_layer}
        return {"method": "early_exit", **layers, "exit_head": str(folder.resolve())}


def initial_head(base: BaseModel, exit_layer: int, layers: tuple[int, ...] | None = None) -> ExitHead:
    weight = base.head_weight.to(torch.float32, copy=True)
    config = ExitHeadConfig(
        exit_layer=exit_layer,
        layers=layers,
        hidden_size=base.hidden_size,
        vocab_size=len(weight),
        rms_norm_eps=base.norm_eps,
    )
    return ExitHead(config, {"norm.weight": base.norm_weight.clone(), "head.weight": weight})


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpSettings(Settings):
    """A part that predicts the state before a late layer (JumpHeadConfig)."""

    early_layers: int
    late_layer: int
    inner_size: int
    resume: str | None = None  # folder of a head at which training starts; None: a new head

    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        layers = {"early_layers": (0, base.num_layers - 1), "late_layer": (self.early_layers, base.num_layers)}
        return {**layers, "inner_size": (1, 1_000_000)}

    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> JumpHead:
        """Fits the linear half to the states of some rows (ridge regression). The other half starts with the output
        0."""
        hidden, late_layer = base.hidden_size, self.late_layer
        sizes = {"early_layers": self.early_layers, "late_layer": late_layer, "inner_size": self.inner_size}
        if self.resume is not None:
            JumpHead.check(self.resume, **sizes, num_layers=base.num_layers, hidden_size=hidden)
            return JumpHead.load(self.resume, base.model.device)
        gram, cross = torch.zeros(2 * hidden, 2 * hidden), torch.zeros(2 * hidden, hidden)
        for states in base.hidden_states([rows[index] for index in every_nth(len(rows), FITTED_ROWS)]):
            early, late, last = (states[index].float().cpu() for index in (self.early_layers, late_layer, -1))
            if late_layer == base.num_layers:  # the final norm is not applied yet
                late = late / base.norm_weight.cpu()
            both = torch.cat((F.rms_norm(early, (hidden,), eps=base.norm_eps)[1:], last[:-1]), dim=-1)
            gram += both.T @ both
            cross += both.T @ (late - early)[1:]
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        up = torch.randn(self.inner_size, 2 * hidden, generator=torch.Generator().manual_seed(0))
        weights = {
            "norm.weight": torch.ones(hidden),
            "mix.weight": torch.linalg.solve(gram, cross).T.contiguous(),
            "up.weight": up / (2 * hidden) ** 0.5,
            "down.weight": torch.zeros(hidden, self.inner_size),
        }
        config = JumpHeadConfig(num_layers=base.num_layers, hidden_size=hidden, rms_norm_eps=base.norm_eps, **sizes)
        return JumpHead(config, {name: tensor.to(base.model.device) for name, tensor in weights.items()})

    def guesser(self, base: BaseModel, part: JumpHead) -> Guesser:
        return jump_guesser(base, part)

    def serving(self, folder: Path) -> dict[str, Any]:
        return {"method": "jump", "head": str(folder.resolve())}


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAheadSettings(Settings):
    """Embeddings that represent draft tokens which are not known yet."""

    exit_layer: int  # number of layers that process them
    exit_head: str | None  # folder of a trained head for this layer; None: the norm and the head of the model

    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        return {"exit_layer": (1, base.num_layers), "num_draft": (2, 64)}

    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> LookAhead:
        """All embeddings begin as the mean embedding of the tokens in some rows."""
        some = [rows[index] for index in every_nth(len(rows), FITTED_ROWS)]
        mean = torch.cat([states[0].float() for states in base.hidden_states(some)]).mean(0)
        num_embeddings = self.num_draft - 1
        config = LookAheadConfig(
            exit_layer=self.exit_layer, hidden_size=base.hidden_size, num_embeddings=num_embeddings
        )
        return LookAhead(config, {"embeddings.weight": mean.repeat(num_embeddings, 1)})

    def guesser(self, base: BaseModel, part: LookAhead) -> Guesser:
        if self.exit_head is None:
            return look_ahead_guesser(base, part)
        vocab_size, hidden_size = base.head_weight.shape
        ExitHead.check(self.exit_head, exit_layer=self.exit_layer, hidden_size=hidden_size, vocab_size=vocab_size)
        return look_ahead_guesser(base, part, ExitHead.load(self.exit_head, base.model.device))

    def serving(self, folder: Path) -> dict[str, Any]:
        head = {} if self.exit_head is None else {"exit_head": str(Path(self.exit_head).resolve())}
        ahead = {"look_ahead": str(folder.resolve()), "num_speculative_tokens": self.num_draft}
        return {"method": "early_exit", "exit_layer": self.exit_layer, **head, **ahead}


def skipping_guesser(base: BaseModel, layers: Sequence[int], head: ExitHead | None = None) -> Guesser:
    """Layers with these indices draft; tokens before a draft have the keys and values of all layers."""

    def guesses(states: States, num_draft: int) -> Iterator[Guess]:
        run = base.passes_beside(layers, base.text_cache(states[0]), normed=head is None)
        for start in range(min(num_draft, len(states[0]))):
            yield Guess((head or base).logits(run(states[0], start + 1))[start:], start)

    return guesses


def look_ahead_guesser(base: BaseModel, part: LookAhead, head: ExitHead | None = None) -> Guesser:
    """The first draft token comes from the exit; pass k runs the k-th embedding after each token."""

    def guesses(states: States, num_draft: int) -> Iterator[Guess]:
        num_tokens = len(states[0])
        run = base.passes(0, num_tokens, part.config.exit_layer, normed=head is None)
        ahead = [vector.expand(num_tokens, -1) for vector in part.embeddings.weight[: num_draft - 1]]
        for step, inputs in enumerate([states[0], *ahead][:num_tokens]):
            yield Guess((head or base).logits(run(inputs, step)[step:]), step)

    return guesses


# By command.
KINDS: dict[str, type[Settings]] = {
    "train-exit-head": ExitHeadSettings,
    "train-jump": JumpSettings,
    "train-look-ahead": LookAheadSettings,
}
