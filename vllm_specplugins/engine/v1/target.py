"""Model Runner V1: the target as a model proposer sees it, and its layers on the paged KV cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_specplugins.engine.target.adapters import Adapters
from vllm_specplugins.engine.target.layers import FirstLayers
from vllm_specplugins.engine.target.metadata import updates_in_place
from vllm_specplugins.engine.verify import draft_seeds
from vllm_specplugins.target import Sampling, Target


class TargetV1:
    """Makes draft.Target for the steps of one runner."""

    def __init__(self, runner: Any, first_layers: FirstLayers):
        self._runner = runner
        self.first_layers = first_layers
        self._rejection = runner.speculative_config.plugin_config.common.rejection

    def of(
        self,
        rows: list[int],
        num_tokens: Any,
        seeds: Sequence[int],
        hidden_states: torch.Tensor,
        common: Any,
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
        newest = starts + lengths - 2 - computed
        return Target(
            forward=_PagedForward(self._runner, self.first_layers, rows, lengths),
            last_token_ids=torch.from_numpy(input_batch.token_ids_cpu[rows, num_tokens - 1]).to(device),
            num_tokens=lengths.to(device),
            last_hidden_states=hidden_states[newest.to(device)],
            sampling=Sampling(
                temperature.to(device), draft_seeds(torch.tensor(seeds), lengths, self._rejection).to(device)
            ),
        )


class _PagedForward:
    """draft.PagedForward for some rows of a step."""

    def __init__(self, runner: Any, first_layers: FirstLayers, rows: list[int], lengths: torch.Tensor):
        self._runner = runner
        self._first_layers = first_layers
        self.logits, self.argmax = first_layers.logits, first_layers.argmax
        # Upper bounds of the lengths while drafting, on the host.
        self._longest = (lengths.int() + runner.num_spec_tokens - 1).clamp_(max=runner.max_model_len)
        num_rows, tables = runner.input_batch.num_reqs, runner.input_batch.block_table
        self._groups = [
            (tables[index].get_device_tensor(num_rows)[rows], tables[index].block_size, attn_groups)
            for index, attn_groups in enumerate(runner.attn_groups)
            if attn_groups
        ]
        self._queries: dict[int, _Query] = {}  # by their length
        self._adapters = None
        if runner.lora_config is not None:
            requests = set(runner.input_batch.lora_id_to_lora_request.values())
            self._adapters = Adapters(runner._set_active_loras, runner.input_batch.request_lora_mapping[rows], requests)

    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._adapters is not None:
            self._adapters.spread(1 if token_ids.ndim == 1 else token_ids.shape[1])
        return self._first_layers.embeddings(token_ids)

    def hidden_states(
        self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        with self._attention(positions) as flat:
            hidden_states = self._first_layers(end_layer, token_ids.view(-1), flat, normed)
        return hidden_states.view(*token_ids.shape, -1)

    def hidden_states_of(
        self, first_layer: int, end_layer: int, states: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        if first_layer == end_layer:
            flat_states = states.flatten(0, -2)
            return self._first_layers.of_states(first_layer, end_layer, flat_states, positions, normed).view(
                states.shape
            )
        with self._attention(positions) as flat:
            found = self._first_layers.of_states(first_layer, end_layer, states.flatten(0, -2), flat, normed)
        return found.view(states.shape)

    @contextmanager
    def _attention(self, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        """For the layers that run within: attention at these positions, which it gives as [num_reqs * T]."""
        length = 1 if positions.ndim == 1 else positions.shape[1]
        query = self._queries.get(length)
        if query is None:
            groups = [_KVGroup(table, size, attn_groups, length) for table, size, attn_groups in self._groups]
            query = self._queries[length] = _Query(groups, length, self._longest, self._runner)
        query.move_to(positions.view(-1))
        if self._adapters is not None:
            self._adapters.spread(length)
        with set_forward_context(
            query.metadata, self._runner.vllm_config, num_tokens=positions.numel(), slot_mapping=query.slots
        ):
            yield query.positions


class _Query:
    """Attention inputs of T new tokens a request; its tensors are made once a step and changed in place."""

    def __init__(self, groups: list["_KVGroup"], length: int, longest: torch.Tensor, runner: Any):
        num_reqs, device = len(longest), runner.device
        self._groups, self._length = groups, length
        self._in_place = length == 1 and all(group.supports_update for group in groups)
        self._seq_lens = torch.empty(num_reqs, dtype=torch.int32, device=device)
        self.positions = torch.empty(num_reqs * length, dtype=torch.int64, device=device)
        self.slots = {name: group.slots for group in groups for name in group.layer_names}
        self.metadata: dict[str, Any] = {}
        starts = torch.arange(0, num_reqs * length + 1, length, dtype=torch.int32)
        self._common = {
            "query_start_loc": starts.to(device),
            "query_start_loc_cpu": starts,
            "seq_lens": self._seq_lens,
            "seq_lens_cpu_upper_bound": longest,
            "num_reqs": num_reqs,
            "num_actual_tokens": num_reqs * length,
            "max_query_len": length,
            "max_seq_len": runner.max_model_len if self._in_place else int(longest.max()),
            "positions": self.positions,
        }

    def move_to(self, positions: torch.Tensor) -> None:
        """Brings slots and metadata to these positions, [num_reqs * T] int64."""
        self.positions.copy_(positions)
        self._seq_lens.copy_(self.positions[self._length - 1 :: self._length]).add_(1)
        for group in self._groups:
            group.move_to(self.positions)
            if self._in_place and self.metadata:
                group.update(self.metadata)
        if not (self._in_place and self.metadata):
            for group in self._groups:
                self.metadata.update(group.build(**self._common))


class _KVGroup:
    """The layers of one KV cache group: their block table, and the slots of T tokens a request."""

    def __init__(self, block_table: torch.Tensor, block_size: int, attn_groups: Any, length: int):
        num_reqs, device = len(block_table), block_table.device
        self._block_table, self._block_size, self._attn_groups = block_table, block_size, attn_groups
        self._index = torch.empty(num_reqs, length, dtype=torch.int64, device=device)
        self._block = torch.empty(num_reqs, length, dtype=block_table.dtype, device=device)
        self.slots = torch.empty(num_reqs * length, dtype=torch.int64, device=device)
        self.layer_names = [name for group in attn_groups for name in group.layer_names]

    def move_to(self, positions: torch.Tensor) -> None:
        """Computes the slots of these positions, [num_reqs * T] int64, in place."""
        torch.div(positions.view_as(self._index), self._block_size, rounding_mode="floor", out=self._index)
        torch.gather(self._block_table, 1, self._index, out=self._block)
        torch.remainder(positions, self._block_size, out=self.slots)
        self.slots.add_(self._block.view(-1), alpha=self._block_size)

    @property
    def supports_update(self) -> bool:
        """Whether `update` can bring the metadata of `build` up to date."""
        return all(updates_in_place(group) for group in self._attn_groups)

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
