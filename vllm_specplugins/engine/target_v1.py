"""Model Runner V1: the target as a model proposer sees it, and its layers on the paged KV cache."""

import copy
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from vllm_specplugins.draft import Sampling, Target
from vllm_specplugins.engine.layers import FirstLayers


class TargetV1:
    """Makes draft.Target for the steps of one runner."""

    def __init__(self, runner: Any, first_layers: FirstLayers):
        self._runner = runner
        self._first_layers = first_layers

    def of(self, rows: list[int], num_tokens: Any, hidden_states: torch.Tensor, common: Any) -> Target:
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
            forward=_PagedForward(self._runner, self._first_layers, common, rows),
            last_token_ids=torch.from_numpy(input_batch.token_ids_cpu[rows, num_tokens - 1]).to(device),
            num_tokens=lengths.to(device),
            last_hidden_states=hidden_states[(starts + lengths - 2 - computed).to(device)],
            sampling=Sampling(temperature=temperature.to(device)),
        )


class _PagedForward:
    """draft.PagedForward for some rows of a step; attention metadata is made anew for every token."""

    def __init__(self, runner: Any, first_layers: FirstLayers, common: Any, rows: list[int]):
        self._runner = runner
        self._first_layers = first_layers
        self._block_size = runner.cache_config.block_size
        num_reqs = len(rows)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32)
        self._block_table = common.block_table_tensor[rows]
        self._common = copy.copy(common)
        self._common.num_reqs = self._common.num_actual_tokens = num_reqs
        self._common.max_query_len = 1
        self._common.block_table_tensor = self._block_table
        self._common.query_start_loc_cpu = starts
        self._common.query_start_loc = starts.to(common.query_start_loc.device)
        self._common.is_prefilling = None

    def hidden_states(self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        runner, common = self._runner, self._common
        blocks = self._block_table.gather(1, (positions // self._block_size)[:, None])[:, 0].long()
        common.slot_mapping = blocks * self._block_size + positions % self._block_size
        common.positions = positions
        common.seq_lens = (positions + 1).int()
        common.seq_lens_cpu_upper_bound = common.seq_lens.cpu()
        common.max_seq_len = int(common.seq_lens_cpu_upper_bound.max())
        metadata: dict[str, Any] = {}
        for group in (group for groups in runner.attn_groups for group in groups):
            built = group.get_metadata_builder().build_for_drafting(common_attn_metadata=common, draft_index=0)
            metadata.update(dict.fromkeys(group.layer_names, built))
        slots = dict.fromkeys(metadata, common.slot_mapping)
        with set_forward_context(metadata, runner.vllm_config, num_tokens=len(token_ids), slot_mapping=slots):
            return self._first_layers(end_layer, token_ids, positions)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._runner.get_model().compute_logits(hidden_states)
        return logits
