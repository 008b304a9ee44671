"""Look-ahead embeddings in training: each draft's stand after its newest token, and see the text before it alone.

The k-th pass over a row is that of the k-th embedding, after every token of the row at once. T: tokens of a row, H:
hidden size, M: embeddings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_specplugins.proposers.heads.exit_head import ExitHead, check_exit_head
from vllm_specplugins.proposers.heads.look_ahead import LookAheadConfig, save_look_ahead
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.files import every_nth
from vllm_specplugins.tools.training.core import Settings
from vllm_specplugins.tools.training.parts import Guess, States

AVERAGED_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAheadSettings(Settings):
    """Settings of look-ahead embeddings.

    Args:
        exit_layer: how many layers they run through.
        exit_head: folder of a trained head for this layer; None is the model's own norm and head.
    """

    exit_layer: int
    exit_head: str | None

    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        """See Settings."""
        return {"exit_layer": (1, base.num_layers), "num_draft": (2, 64)}

    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> "TrainedLookAhead":
        """See Settings. All embeddings begin as the mean of the tokens' in some rows."""
        head = folder = None
        if self.exit_head is not None:
            folder = str(Path(self.exit_head).resolve())
            vocab_size, hidden_size = base.head_weight.shape
            check_exit_head(self.exit_head, exit_layer=self.exit_layer, hidden_size=hidden_size, vocab_size=vocab_size)
            head = ExitHead.load(self.exit_head, base.model.device)
        some = [rows[index] for index in every_nth(len(rows), AVERAGED_ROWS)]
        tokens = torch.cat([states[0].float() for states in base.hidden_states(some)])
        config = LookAheadConfig(
            exit_layer=self.exit_layer, hidden_size=base.hidden_size, num_embeddings=self.num_draft - 1
        )
        return TrainedLookAhead(config, tokens.mean(0).repeat(self.num_draft - 1, 1), head, folder)


class TrainedLookAhead:
    """See the module."""

    def __init__(
        self,
        config: LookAheadConfig,
        embeddings: torch.Tensor,  # [M, H]
        head: ExitHead | None = None,
        head_folder: str | None = None,
    ):
        self.config, self.weights = config, {"embeddings.weight": embeddings}
        self._head, self._head_folder = head, head_folder

    def guesses(self, base: BaseModel, states: States, num_draft: int) -> Iterator[Guess]:
        """See Part. The first draft token is the exit's own."""
        num_tokens, num_layers = len(states[0]), self.config.exit_layer
        layers = base.passes(0, num_tokens, num_layers, normed=self._head is None)
        exit_states = layers.run(states[0])
        yield Guess(self._logits(base, exit_states), 0)
        for step, embedding in enumerate(self.weights["embeddings.weight"][: num_draft - 1], start=1):
            if step >= num_tokens:
                return
            exit_states = layers.run(embedding.expand(num_tokens, -1), step)
            yield Guess(self._logits(base, exit_states[step:]), step)

    def _logits(self, base: BaseModel, states: torch.Tensor) -> torch.Tensor:
        return base.logits(states) if self._head is None else self._head.logits(states)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """See Part."""
        save_look_ahead(folder, self.config, self.weights["embeddings.weight"].detach().to(dtype))

    def serving(self, folder: Path) -> dict[str, Any]:
        """See Part."""
        head = {} if self._head_folder is None else {"exit_head": self._head_folder}
        own = {"look_ahead": str(folder.resolve()), "num_speculative_tokens": self.config.num_embeddings + 1}
        return {"method": "early_exit", "exit_layer": self.config.exit_layer, **head, **own}
