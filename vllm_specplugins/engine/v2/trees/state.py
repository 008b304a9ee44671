"""Stores the draft trees of all request slots and verifies them in a step, on the device and without waiting.

A node's slot of the KV cache follows its index, its position follows its depth. A tree stays until the request's next
draft; the scheduler may cut it. Verification of any tree is exact, since the tables hold the nodes that the target read
and their places. S: slots of requests, W: nodes, root included.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.config import ConfigError
from vllm_specplugins.config.trees import chain_length
from vllm_specplugins.engine.hooks import both, replaced, wrap
from vllm_specplugins.engine.v2.trees.attention import TreeAttentionImpl
from vllm_specplugins.kernels.rejection import Sampling, rejection_sample
from vllm_specplugins.kernels.rounds.siblings import in_rounds
from vllm_specplugins.kernels.trees import compact, walk
from vllm_specplugins.kernels.trees.reference import ancestors


class Trees:
    """The tables of all trees.

    Args:
        num_nodes: number of nodes of a tree without its root, W - 1.
    """

    masks = False  # whether attention uses `bits` and `first`
    is_off = False  # whether all drafts are chains without tokens

    def __init__(self, vllm_config: VllmConfig, num_nodes: int, device: torch.device):
        scheduler = vllm_config.scheduler_config
        self._num_slots = scheduler.max_num_seqs
        self._nodes = torch.arange(num_nodes + 1, device=device)
        self._chain_length = chain_length(num_nodes)
        self.chain = self._nodes[None, :-1]  # parents, [1, W - 1], of a chain of nodes
        # The last row is for padding.
        tables = torch.zeros(4, self._num_slots + 1, num_nodes + 1, dtype=torch.int64, device=device)
        self._parents, self._depths, self._ancestors, self._path = tables
        self.put(torch.arange(self._num_slots + 1, device=device), self.chain)
        self._branches = torch.zeros(self._num_slots + 1, dtype=torch.bool, device=device)
        # Inputs of a step that a graph of the target reads (kernels.trees.Mask).
        self.bits = torch.full((scheduler.max_num_batched_tokens,), -1, dtype=torch.int64, device=device)
        self.first = torch.zeros(self._num_slots, dtype=torch.int32, device=device)
        self._step: Any = None  # the batch of the trees that are verified
        self._shift = self._nodes[:0]
        self._caches: list[torch.Tensor] = []

    def attach(self, runner: Any) -> None:
        self._runner = runner
        wrap(runner, "prepare_attn", self._prepare)
        wrap(runner, "sample", self._sample)
        wrap(runner, "capture_model", self._record)
        runner.initialize_kv_cache = both(runner.initialize_kv_cache, lambda *_, **__: self._find_layers())

    def _find_layers(self) -> None:
        wrap(self._runner.model_state, "postprocess_state", self._move)
        context = self._runner.vllm_config.compilation_config.static_forward_context
        groups = self._runner.kv_cache_config.kv_cache_groups
        layers = [context[name] for group in groups for name in group.layer_names]
        self._caches = [layer.kv_cache for layer in layers]
        if len(groups) > 1 or len({(cache.shape, cache.stride()) for cache in self._caches}) > 1:
            raise ConfigError("remove tree: it does not support a model with different kinds of KV caches.")
        for layer in layers:
            if not isinstance(layer.impl, TreeAttentionImpl):
                raise ConfigError("tree requires the attention backend TRITON_ATTN in all layers.")
            layer.impl.trees = self
        pointers = [cache.data_ptr() for cache in self._caches]
        self._pointers = torch.tensor(pointers, dtype=torch.uint64, device=self.bits.device)
        if not self.is_off:
            self._warm_up()

    def release(self) -> None:
        self._caches = []

    def _warm_up(self) -> None:
        """Compiles the kernels that no graph launches, on a tree without nodes, which moves no keys and values."""
        _, num_emitted, path = walk(self._parents[:1], self._path[:1], self._path[:1])
        table = self._runner.block_tables.block_tables[0].gpu[:1]
        compact(self._caches, self._pointers, table, path[:, 0], path, num_emitted * 0)

    def add(self, slots: list[int], branches: list[bool]) -> None:
        """Adds requests that are new, or resumed after a preemption. Only those with `branches` may have trees, since
        edits of logits that depend on earlier tokens, and reports of logits, assume a chain."""
        rows, branches_there = async_tensor_h2d(np.array([slots, branches]), self.bits.device)
        self._branches[rows] = branches_there.bool()
        self.put(rows, self.chain)

    def branches(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns whether requests of these slots, -1 for padding, may have trees, [R] bool."""
        return self._branches[self.table_rows(rows)]

    def put(self, rows: torch.Tensor, parents: torch.Tensor) -> None:
        """Stores new trees of these slots, -1 for padding: parents [R or 1, W - 1] int64 of all nodes except the
        root."""
        rows, parents = self.table_rows(rows), pad(parents, (1, 0))
        self._parents[rows] = parents
        self._depths[rows], self._ancestors[rows] = ancestors(parents)

    def table_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows < 0, self._num_slots, rows)

    def _prepare(self, prepare: Any, input_batch: Any) -> Any:
        """Lets vLLM compute KV slots from positions by index, then sets positions by depth until the step samples."""
        prepared, had_tree = prepare(input_batch), self._step is not None
        self._step, self.masks = None, input_batch.num_draft_tokens > 0 and not self.is_off
        if self.masks or had_tree:  # a graph for prompts also reads masks in a step without drafts
            self.bits.fill_(-1)
        if self.masks:
            self._step, rows = input_batch, input_batch.logits_indices
            states, local = input_batch.expanded_idx_mapping.long(), input_batch.expanded_local_pos.long()
            self.bits[rows] = self._ancestors[states, local]
            num_reqs, num_logits = input_batch.num_reqs, input_batch.cu_num_logits.diff()
            self.first[:num_reqs] = input_batch.seq_lens[:num_reqs] - num_logits
            self._shift = self._depths[states, local] - local
            input_batch.positions[rows] += self._shift
        return prepared

    def _sample(self, sample: Any, hidden_states: Any, input_batch: Any, *rest: Any) -> Any:
        """Restores positions by index, which sampling needs."""
        self.masks = False
        if self._step is not None:
            input_batch.positions[input_batch.logits_indices] -= self._shift
        return sample(hidden_states, input_batch, *rest)

    def _move(self, postprocess: Any, idx_mapping: Any, num_sampled: Any, *rest: Any) -> None:
        """Moves accepted K/V before the next draft reads them. vLLM passes the integer 0 if no token is sampled."""
        if self._step is not None and isinstance(num_sampled, torch.Tensor):
            slots, num_reqs = idx_mapping.long(), len(num_sampled)
            table = self._runner.block_tables.block_tables[0].gpu[slots]
            root = self.first[:num_reqs].long()
            compact(self._caches, self._pointers, table, root, self._path[slots], num_sampled)
        postprocess(idx_mapping, num_sampled, *rest)

    def last_rows(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
        """Returns the row of the state from which each request's newest token was sampled, [R] int64."""
        last = input_batch.query_start_loc[1 : input_batch.num_reqs + 1].long() - 1
        if self._step is None:
            return last
        path, ends = self._path[input_batch.idx_mapping.long()], (num_sampled.long() - 1).clamp(min=0)
        node = path.gather(1, ends[:, None])[:, 0]
        return last - (input_batch.cu_num_logits.diff() - 1) + node

    def _record(self, capture_model: Any, *args: Any, **kwargs: Any) -> Any:
        """Records graphs with masks. Graphs of more than one token per request serve steps that verify trees."""
        with replaced(self, {"masks": not self.is_off}):
            return capture_model(*args, **kwargs)

    def verify(
        self,
        states: torch.Tensor,  # [num_logits] slot of each row
        local: torch.Tensor,  # [num_logits] node of each row
        logits: torch.Tensor,  # [num_logits, vocab_size], edited
        cu_num_logits: torch.Tensor,
        draft_token_ids: torch.Tensor,
        positions: torch.Tensor,  # by index
        idx_mapping: torch.Tensor,
        sampling: Sampling,
        max_num_draft: int,
        draft_logits: torch.Tensor | None = None,  # [S, >= D, vocab_size], of sampled drafts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws each row's token with the noise of its depth, like `rejection_sample` with a one-hot q or in rounds,
        and follows the tokens."""
        states, local, num_logits = states.long(), local.long(), len(logits)
        places = positions + self._depths[states, local] - local
        alone = torch.arange(num_logits + 1, dtype=torch.int32, device=logits.device)
        drawn, _ = rejection_sample(logits, alone, draft_token_ids, places, states, sampling, 0)
        starts = cu_num_logits.long()
        rows = starts[:-1, None] + self._nodes
        is_node = rows < starts[1:, None]
        rows = rows.clamp(max=num_logits - 1)
        tokens = draft_token_ids.long()[rows].masked_fill(~is_node, -1)
        slots = idx_mapping.long()
        after = drawn[:, 0][rows]
        if draft_logits is not None:
            tree, q_logits = (self._parents[slots], self._depths[slots]), draft_logits[slots, : self._chain_length]
            after = in_rounds(after, tokens, tree, logits, rows, q_logits, places[starts[:-1]], sampling.at(slots))
        return self.follow(slots, tokens, after)

    def follow(
        self, slots: torch.Tensor, tokens: torch.Tensor, drawn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Follows trees of these tokens along the target's tokens after them, [R, W] int64 each
        (kernels.trees.walk)."""
        emitted, num_emitted, path = walk(self._parents[slots], tokens, drawn)
        self._path[slots] = path
        return emitted, num_emitted
