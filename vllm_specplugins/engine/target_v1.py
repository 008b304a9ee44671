"""Model Runner V1: the target as a model proposer sees it, and its layers on the paged KV cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_specplugins.draft import Sampling, Target
from vllm_specplugins.engine.layers import FirstLayers


class TargetV1:
    """Makes draft.Target for the steps of one runner."""

    def __init__(self, runner: Any, first_layers: FirstLayers):
        self._runner = runner
        self._first_layers = first_layers

    def of(
        self, rows: list[int], num_tokens: Any, seeds: Sequence[int], hidden_states: torch.Tensor, common: Any
    ) -> Target:
        """The target for the requests in these rows of the runner's batch, [num_reqs] tokens long each.

        `common` is the step's CommonAttentionMetadata, `hidden_states` [num_tokens_of_the_step, hidden_size].
        """
        input_batch, device = self._runner.input_batch, hidden_states.device
        lengths = torch.from_numpy(num_tokens.astype(np.int64))
        # A request's hidden states begin where its query does; those of rejected drafts come last.
        starts = common.query_start_loc_cpu[:-1][rows].long()
        computed = torch.from_numpy(input_batch.num_computed_tokens_cpu[rows]).long()
        temperature = torch.from_numpy(input_batch.temperature_cpu[rows].astype(np.float32))
        return Target(
            forward=_PagedForward(self._runner, self._first_layers, rows, lengths),
            last_token_ids=torch.from_numpy(input_batch.token_ids_cpu[rows, num_tokens - 1]).to(device),
            num_tokens=lengths.to(device),
            last_hidden_states=hidden_states[(starts + lengths - 2 - computed).to(device)],
            sampling=Sampling(temperature.to(device), torch.tensor(seeds, dtype=torch.int64).to(device)),
        )


class _KVGroup:
    """The layers of one KV cache group: their block table, and the slots of one token a request."""

    def __init__(self, block_table: torch.Tensor, block_size: int, attn_groups: Any):
        num_reqs, device = len(block_table), block_table.device
        self._block_table, self._block_size, self._attn_groups = block_table, block_size, attn_groups
        self._index = torch.empty(num_reqs, 1, dtype=torch.int64, device=device)
        self._block = torch.empty(num_reqs, 1, dtype=block_table.dtype, device=device)
        self.slots = torch.empty(num_reqs, dtype=torch.int64, device=device)
        self.layer_names = [name for group in attn_groups for name in group.layer_names]

    def move_to(self, positions: torch.Tensor) -> None:
        """Computes the slots of these positions, [num_reqs] int64, in place."""
        torch.div(positions[:, None], self._block_size, rounding_mode="floor", out=self._index)
        torch.gather(self._block_table, 1, self._index, out=self._block)
        torch.remainder(positions, self._block_size, out=self.slots)
        self.slots.add_(self._block[:, 0], alpha=self._block_size)

    @property
    def supports_update(self) -> bool:
        """Whether `update` can bring the metadata of `build` up to date."""
        return all(group.supports_draft_decode_metadata_update for group in self._attn_groups)

    def build(self, **common: Any) -> dict[str, Any]:
        """Attention metadata of each layer, over the tensors in `common` and the slots."""
        common_metadata = CommonAttentionMetadata(
            **common, block_table_tensor=self._block_table, slot_mapping=self.slots
        )
        metadata: dict[str, Any] = {}
        for group in self._attn_groups:
            built = group.build_metadata_for_drafting(common_metadata, draft_index=0)
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata

    def update(self, metadata: dict[str, Any]) -> None:
        """Brings metadata up to date whose tensors have changed in place."""
        for group in self._attn_groups:
            group.update_draft_decode_metadata(metadata)


class _PagedForward:
    """draft.PagedForward for some rows of a step; all of its buffers are made once a step."""

    def __init__(self, runner: Any, first_layers: FirstLayers, rows: list[int], lengths: torch.Tensor):
        num_reqs, device = len(rows), runner.device
        self._runner = runner
        self._first_layers = first_layers
        self.logits, self.argmax = first_layers.logits, first_layers.argmax
        num_rows, tables = runner.input_batch.num_reqs, runner.input_batch.block_table
        self._groups = [
            _KVGroup(tables[index].get_device_tensor(num_rows)[rows], tables[index].block_size, attn_groups)
            for index, attn_groups in enumerate(runner.attn_groups)
            if attn_groups
        ]
        self._slots = {name: group.slots for group in self._groups for name in group.layer_names}
        self._in_place = all(group.supports_update for group in self._groups)
        self._metadata: dict[str, Any] = {}
        self._query_starts = torch.arange(num_reqs + 1, dtype=torch.int32)
        self._query_starts_on_device = self._query_starts.to(device)
        self._positions = torch.empty(num_reqs, dtype=torch.int64, device=device)
        self._seq_lens = torch.empty(num_reqs, dtype=torch.int32, device=device)
        self._longest = lengths.int() - 1  # an upper bound of the lengths, on the host; counts up with the calls

    def hidden_states(
        self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        self._positions.copy_(positions)
        self._seq_lens.copy_(positions).add_(1)
        self._longest.add_(1).clamp_(max=self._runner.max_model_len)
        for group in self._groups:
            group.move_to(self._positions)
        self._refresh_metadata()
        with set_forward_context(
            self._metadata, self._runner.vllm_config, num_tokens=len(token_ids), slot_mapping=self._slots
        ):
            return self._first_layers(end_layer, token_ids, self._positions, normed)

    def _refresh_metadata(self) -> None:
        if self._in_place and self._metadata:
            for group in self._groups:
                group.update(self._metadata)
            return
        common = {
            "query_start_loc": self._query_starts_on_device,
            "query_start_loc_cpu": self._query_starts,
            "seq_lens": self._seq_lens,
            "seq_lens_cpu_upper_bound": self._longest,
            "num_reqs": len(self._positions),
            "num_actual_tokens": len(self._positions),
            "max_query_len": 1,
            "max_seq_len": self._runner.max_model_len if self._in_place else int(self._longest.max()),
            "positions": self._positions,
        }
        for group in self._groups:
            self._metadata.update(group.build(**common))
