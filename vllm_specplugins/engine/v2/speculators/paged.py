"""Model Runner V2: the target's layers on its paged KV cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor


class PagedForward:
    """draft.PagedForward for the first rows of the speculator's buffers.

    Metadata and slots that are given are those of a graph that is being recorded; otherwise they are made here. What
    does not attend needs no KV cache: the memory for it is still being measured.
    """

    def __init__(
        self,
        speculator: Any,  # Speculator
        num_reqs: int,
        num_tokens: int,
        metadata: dict[str, Any] | None = None,
        slots: dict[str, torch.Tensor] | None = None,
        seq_lens_cpu: torch.Tensor | None = None,
        attends: bool = True,
    ):
        self._speculator, self._num_reqs, self._num_tokens = speculator, num_reqs, num_tokens
        self._metadata, self._slots, self._seq_lens_cpu = metadata, slots, seq_lens_cpu
        self._attends = attends
        self._exists = speculator.idx_mapping[:num_reqs] >= 0  # not so in a graph's padding rows
        layers = speculator.first_layers
        self.logits, self.argmax = layers.logits, layers.argmax

    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._speculator.adapters is not None:
            self._speculator.adapters.spread(1 if token_ids.ndim == 1 else token_ids.shape[1])
        return self._speculator.first_layers.embeddings(token_ids)

    def hidden_states(
        self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        def run(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            buffers = self._speculator.input_buffers
            own = buffers.input_ids[: token_ids.numel()]
            own.copy_(token_ids.reshape(-1))
            with self._attention(positions) as flat:
                found: torch.Tensor = self._speculator.first_layers(end_layer, own, flat, normed)
            return found.view(*token_ids.shape, -1)

        return self._by_pieces(run, token_ids, positions)

    def hidden_states_of(
        self, first_layer: int, end_layer: int, states: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        layers = self._speculator.first_layers
        if first_layer == end_layer:
            flat_states = states.reshape(-1, states.shape[-1])
            alone: torch.Tensor = layers.of_states(first_layer, end_layer, flat_states, positions, normed)
            return alone.view(states.shape)

        def run(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            flat_states = states.reshape(-1, states.shape[-1])
            with self._attention(positions) as flat:
                found = layers.of_states(first_layer, end_layer, flat_states, flat, normed)
            return found.view(states.shape)

        return self._by_pieces(run, states, positions)

    def _by_pieces(
        self,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        fed: torch.Tensor,  # [num_reqs, ...] or [num_reqs, T, ...]
        positions: torch.Tensor,  # [num_reqs] or [num_reqs, T]
    ) -> torch.Tensor:
        """`run`, which takes as many tokens at once as the buffers hold."""
        most = self._speculator.max_num_tokens // self._num_reqs
        if positions.ndim == 1 or positions.shape[1] <= most:
            return run(fed, positions)
        # What comes first is in the KV cache when the rest asks for it.
        pieces = zip(fed.split(most, dim=1), positions.split(most, dim=1), strict=True)
        return torch.cat([run(*piece) for piece in pieces], dim=1)

    @contextmanager
    def _attention(self, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        """For the layers that run within: attention at these positions, which it gives as [num_reqs * T]."""
        speculator, num_reqs = self._speculator, self._num_reqs
        buffers = speculator.input_buffers
        length = 1 if positions.ndim == 1 else positions.shape[1]
        rows = slice(num_reqs * length)
        starts = buffers.query_start_loc[: num_reqs + 1]
        torch.mul(speculator.query_starts[: num_reqs + 1], length, out=starts)
        torch.clamp(positions.reshape(-1), min=0, out=buffers.positions[rows])
        last = positions if positions.ndim == 1 else positions[:, -1]
        torch.add(last, 1, out=buffers.seq_lens[:num_reqs]).mul_(self._exists)
        if speculator.adapters is not None:
            speculator.adapters.spread(length)
        num_tokens = max(self._num_tokens, num_reqs * length)
        with set_forward_context(
            self._metadata_for(length) if self._attends else None,
            speculator.vllm_config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=self._slots_for(starts, buffers.positions[rows], num_tokens) if self._attends else None,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
        ):
            yield buffers.positions[rows]

    def _slots_for(self, starts: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> dict[str, torch.Tensor]:
        speculator = self._speculator
        slots = speculator.block_tables.compute_slot_mappings(
            speculator.idx_mapping[: self._num_reqs], starts, positions, num_tokens
        )
        return self._slots or build_slot_mappings_by_layer(slots, speculator.kv_cache_config)

    def _metadata_for(self, length: int) -> dict[str, Any] | None:
        """Attention metadata over the speculator's buffers; that of single tokens is made once, if it can be."""
        speculator = self._speculator
        if length == 1 and self._metadata is not None:
            speculator._update_draft_decode_metadata(self._metadata, self._num_reqs)
            return self._metadata
        assert self._seq_lens_cpu is not None
        speculator.plan_for(self._seq_lens_cpu[: self._num_reqs])
        metadata: dict[str, Any] | None = speculator._build_uniform_attn_metadata(
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE,
                num_tokens=self._num_reqs * length,
                num_reqs=self._num_reqs,
                uniform_token_count=length,
            ),
            num_reqs=self._num_reqs,
            num_query_per_req=length,
            seq_lens_cpu_upper_bound=self._seq_lens_cpu,
            step=speculator.num_speculative_steps,  # an upper bound for the whole draft
        )
        if length == 1 and speculator.supports_decode_metadata_update:
            self._metadata = metadata
        return metadata
