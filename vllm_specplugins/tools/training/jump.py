"""A jump in training: its drafts are unrolled, each on what the one before left, as they are when it serves.

The target's keys and values of the tokens before a draft are the target's own, those of the draft are the jump's:
K passes over a row, the k-th of which sees of the text what stands k tokens or more before it (as in EAGLE-3, Li et al.
2025, "training-time test"). T: tokens of a row, H: hidden size, K: draft tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.files import every_nth
from vllm_specplugins.tools.training.core import Settings
from vllm_specplugins.tools.training.parts import Guess, States, TrainedHead

RIDGE = 1e-3  # of the mean square of a state
FITTED_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpSettings(Settings):
    """Settings of a jump, see JumpHeadConfig."""

    early_layers: int
    late_layer: int
    inner_size: int

    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        """See Settings."""
        last = base.num_layers - 1
        return {
            "early_layers": (0, last),
            "late_layer": (self.early_layers, base.num_layers),
            "inner_size": (1, 1_000_000),
        }

    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> "TrainedJump":
        """The linear part fits some rows' states best (ridge regression); the other adds nothing yet."""
        some = [rows[index] for index in every_nth(len(rows), FITTED_ROWS)]
        hidden = base.hidden_size
        config = JumpHeadConfig(
            early_layers=self.early_layers,
            late_layer=self.late_layer,
            num_layers=base.num_layers,
            hidden_size=hidden,
            inner_size=self.inner_size,
            rms_norm_eps=base.norm_eps,
        )
        gram, cross = torch.zeros(2 * hidden, 2 * hidden), torch.zeros(2 * hidden, hidden)
        for states in base.hidden_states(some):
            early, late, last = (states[index].float().cpu() for index in (self.early_layers, self.late_layer, -1))
            if self.late_layer == base.num_layers:  # the final norm is still to come
                late = late / base.norm_weight.cpu()
            both = torch.cat((F.rms_norm(early, (hidden,), eps=base.norm_eps)[1:], last[:-1]), dim=-1)
            gram += both.T @ both
            cross += both.T @ (late - early)[1:]
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        generator = torch.Generator().manual_seed(0)
        weights = {
            "norm.weight": torch.ones(hidden),
            "mix.weight": torch.linalg.solve(gram, cross).T.contiguous(),
            "up.weight": torch.randn(self.inner_size, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5,
            "down.weight": torch.zeros(hidden, self.inner_size),
        }
        device = base.model.device
        return TrainedJump(JumpHead(config, {name: tensor.to(device) for name, tensor in weights.items()}))


class TrainedJump(TrainedHead):
    """See the module."""

    def guesses(self, base: BaseModel, states: States, num_draft: int) -> Iterator[Guess]:
        """See Part. Drafts begin after each token of the row but the first, before which there is no state."""
        config, num_tokens = self.head.config, len(states[0])
        early, last = states[config.early_layers].float(), states[-1].float()
        text = base.passes(config.late_layer, num_tokens)
        text.run(states[config.late_layer])
        for step in range(1, min(num_draft, num_tokens - 1) + 1):
            last = F.pad(last[:-1], (0, 0, 1, 0))  # of the token before
            last = text.run(self.head.states(early, last), step)
            yield Guess(base.logits(last[step:]), step)

    def serving(self, folder: Path) -> dict[str, Any]:
        """See Part."""
        return {"method": "jump", "head": str(folder.resolve())}
