"""Model Runner V1: builds the target for a model proposer, with layers on the paged KV cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_specplugins.engine.target.layers import Adapters, FirstLayers, PagedLayers
from vllm_specplugins.engine.verify import DRAFT_NOISE
from vllm_specplugins.target import Sampling, Target


def target_of(
    runner: Any,
    first_layers: FirstLayers,
    rows: list[int],
    num_tokens: np.ndarray,  # [num_reqs]
    seeds: Sequence[int],
    hidden_states: torch.Tensor,  # [num_tokens_of_the_step, hidden_size]
    common: Any,  # the step's CommonAttentionMetadata
) -> Target:
    input_batch, device = runner.input_batch, hidden_states.device
    lengths = torch.from_numpy(num_tokens.astype(np.int64))
    # A request's hidden states begin at its query's beginning, and end with those of rejected drafts.
    starts = common.query_start_loc_cpu[:-1][rows].long()
    computed = torch.from_numpy(input_batch.num_computed_tokens_cpu[rows]).long()
    temperature = torch.from_numpy(input_batch.temperature_cpu[rows].astype(np.float32))
    newest = starts + lengths - 2 - computed
    return Target(
        forward=_PagedForward(runner, first_layers, rows, lengths),
        last_token_ids=torch.from_numpy(input_batch.token_ids_cpu[rows, num_tokens - 1]).to(device),
        num_tokens=lengths.to(device),
        last_hidden_states=hidden_states[newest.to(device)],
        sampling=Sampling(temperature.to(device), (torch.tensor(seeds) + DRAFT_NOISE).to(device)),
    )


class _PagedForward(PagedLayers):
    def __init__(self, runner: Any, first_layers: FirstLayers, rows: list[int], lengths: torch.Tensor):
        input_batch, adapters = runner.input_batch, None
        if runner.lora_config is not None:
            requests = set(input_batch.lora_id_to_lora_request.values())
            adapters = Adapters(runner._set_active_loras, input_batch.request_lora_mapping[rows], requests)
        super().__init__(first_layers, adapters)
        self._config = runner.vllm_config
        # Upper bounds of the lengths while drafting, on the host.
        self._longest = (lengths.int() + runner.num_spec_tokens - 1).clamp_(max=runner.max_model_len)
        tables = input_batch.block_table
        self._groups = [
            (tables[index].get_device_tensor(input_batch.num_reqs)[rows], tables[index].block_size, attn_groups)
            for index, attn_groups in enumerate(runner.attn_groups)
            if attn_groups
        ]

    @contextmanager
    def attention(self, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        places = positions.view(len(self._longest), -1)
        num_reqs, length = places.shape
        starts = torch.arange(0, num_reqs * length + 1, length, dtype=torch.int32)
        common: dict[str, Any] = {
            "query_start_loc": starts.to(positions.device),
            "query_start_loc_cpu": starts,
            "seq_lens": places[:, -1].int() + 1,
            "seq_lens_cpu_upper_bound": self._longest,
            "num_reqs": num_reqs,
            "num_actual_tokens": num_reqs * length,
            "max_query_len": length,
            "max_seq_len": int(self._longest.max()),
            "positions": positions.reshape(-1),
        }
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for table, block_size, attn_groups in self._groups:
            blocks = table.gather(1, places // block_size).long()
            slot_mapping = (blocks * block_size + places % block_size).flatten()
            of_group = CommonAttentionMetadata(**common, block_table_tensor=table, slot_mapping=slot_mapping)
            for group in attn_groups:
                built = group.build_metadata_for_drafting(of_group, draft_index=0)
                metadata |= dict.fromkeys(group.layer_names, built)
                slots |= dict.fromkeys(group.layer_names, slot_mapping)
        with set_forward_context(metadata, self._config, num_tokens=positions.numel(), slot_mapping=slots):
            yield common["positions"]
