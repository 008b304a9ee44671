"""Look-ahead tokens: trained embeddings represent draft tokens that are not known yet, so one pass drafts all of them
(Monea et al. 2023, "PaSS: Parallel Speculative Sampling"). The command `train-look-ahead` writes their folder. M:
embeddings, H: hidden size."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import Embedding

from vllm_specplugins.proposers.heads.trained import Count, TrainedPart
from vllm_specplugins.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAheadConfig:
    """M embeddings that run through `exit_layer` layers; the k-th represents the k-th draft token when the next one is
    drafted."""

    exit_layer: Count
    hidden_size: Count
    num_embeddings: Count


class LookAhead(TrainedPart):
    Config = LookAheadConfig
    file, field, noun = "look_ahead.safetensors", "early_exit: look_ahead", "set of embeddings"

    def make_layers(self) -> None:
        self.embeddings = Embedding(self.config.num_embeddings, self.config.hidden_size)

    def states(self, target: Target, exit_layer: int, num_steps: int, max_position: int, normed: bool) -> torch.Tensor:
        """Returns the states [num_reqs, num_steps, H] of each request's newest token and of num_steps - 1 embeddings
        after it."""
        newest = target.forward.embeddings(target.last_token_ids)[:, None]
        ahead = self.embeddings.weight[: num_steps - 1].expand(len(newest), -1, -1)
        positions = (target.num_tokens - 1)[:, None] + torch.arange(num_steps, device=newest.device)
        positions.clamp_(max=max_position)
        return target.forward.hidden_states_of(
            0, exit_layer, torch.cat((newest, ahead), dim=1), positions, normed=normed
        )


def check_look_ahead(folder: str | Path, *, exit_layer: int, hidden_size: int, num_draft: int) -> None:
    """Raises ConfigError unless a folder has embeddings for drafts of this length at this layer."""
    config = LookAhead.check(folder, exit_layer=exit_layer, hidden_size=hidden_size)
    if config.num_embeddings < num_draft - 1:
        wanted = f"a {LookAhead.noun} of at least {num_draft - 1}, one less than num_speculative_tokens"
        LookAhead.refuse(folder, wanted, f"of {config.num_embeddings}")
