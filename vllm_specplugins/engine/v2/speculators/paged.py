"""Model Runner V2: runs the target's layers on its paged KV cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_specplugins.engine.target.layers import PagedLayers


class PagedForward(PagedLayers):
    """target.PagedForward for the first rows of the speculator's buffers. Given metadata and slots belong to a graph
    that is being recorded; otherwise they are created here. Without `attends` there is no KV cache yet, since vLLM
    still measures the memory for it."""

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
        super().__init__(speculator.first_layers, speculator.adapters)
        self._speculator, self._num_reqs, self._num_tokens = speculator, num_reqs, num_tokens
        self._metadata, self._slots, self._seq_lens_cpu = metadata, slots, seq_lens_cpu
        self._attends = attends
        self._exists = speculator.idx_mapping[:num_reqs] >= 0  # false in a graph's padding rows

    def _at(self, run: Callable[..., torch.Tensor], fed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Runs at most as many tokens at once as fit the buffers; later pieces read the KV cache of earlier ones."""
        piece = self._speculator.max_num_tokens // self._num_reqs
        if positions.ndim == 1 or positions.shape[1] <= piece:
            return super()._at(run, fed, positions)
        pieces = zip(fed.split(piece, dim=1), positions.split(piece, dim=1), strict=True)
        outputs = [super(PagedForward, self)._at(run, *piece) for piece in pieces]
        return torch.cat([part.view(self._num_reqs, -1, part.shape[-1]) for part in outputs], dim=1)

    @contextmanager
    def attention(self, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        speculator, num_reqs = self._speculator, self._num_reqs
        buffers = speculator.input_buffers
        length = 1 if positions.ndim == 1 else positions.shape[1]
        rows = slice(num_reqs * length)
        starts = buffers.query_start_loc[: num_reqs + 1]
        torch.mul(speculator.query_starts[: num_reqs + 1], length, out=starts)
        torch.clamp(positions.reshape(-1), min=0, out=buffers.positions[rows])
        last = positions if positions.ndim == 1 else positions[:, -1]
        torch.add(last, 1, out=buffers.seq_lens[:num_reqs]).mul_(self._exists)
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
        """Returns attention metadata over the speculator's buffers: a graph's metadata, or for single tokens metadata
        that is reused if possible."""
        speculator = self._speculator
        if length * self._num_reqs == self._num_tokens and self._metadata is not None:
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
