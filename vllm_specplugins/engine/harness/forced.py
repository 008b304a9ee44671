"""Makes engines emit exactly the tokens of a log, so any traffic can be timed without the model's weights. While a step
samples, `ForcedLog` (vLLM's `worker_extension_cls`) writes one large value into each row of the target's logits, at the
log's token. All methods of vLLM and the plugin then verify their drafts at temperature 0 with the kernels, shapes and
host times of real serving."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_specplugins.engine.harness.serving import LOGGED
from vllm_specplugins.engine.hooks import replaced, wrap

LARGE = 30_000.0  # above any logit, and finite in float16


class ForcedLog:
    """Methods that vLLM adds to its worker."""

    model_runner: Any
    use_v2_model_runner: bool

    def specplugins_force(self, outputs: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]] | None) -> None:
        """Makes requests emit their rows of the log from the next step on. `accepted`, if given, holds the number of
        correct tokens of vLLM's drafter at each position; Model Runner V1 ignores it."""
        log = _Log(outputs, accepted, self.model_runner.device)
        kind = _OnV2 if self.use_v2_model_runner else _OnV1
        kind(self.model_runner, log)


class _Log:
    """The log's tokens on the device: [rows, longest + 1] int64, in which the last token of a row repeats."""

    def __init__(self, outputs: Sequence[Sequence[int]], accepted: Any, device: torch.device):
        self.tokens = torch.from_numpy(_padded(outputs)).to(device)
        self.accepted = None if accepted is None else torch.from_numpy(_padded(accepted)).to(device)

    def force(self, logits: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Writes into the logits [N, V]: row i emits token `places[i]` of row `rows[i]` of the log."""
        tokens = self.tokens[rows, places.clamp(0, self.tokens.shape[1] - 1)]
        logits.scatter_(1, tokens[:, None], LARGE)

    def draft(self, drafts: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Fills the drafts [R, K] with the log's tokens that are accepted at `places` [R], and then with wrong
        tokens."""
        assert self.accepted is not None
        last = self.tokens.shape[1] - 1
        offsets = torch.arange(drafts.shape[1], device=drafts.device)
        tokens = self.tokens[rows[:, None], (places[:, None] + offsets).clamp(0, last)]
        is_right = offsets < self.accepted[rows, places.clamp(0, last)][:, None]
        drafts.copy_(torch.where(is_right, tokens, (tokens == 0).long()))


def _padded(rows: Sequence[Sequence[int]]) -> Any:
    length = max(map(len, rows)) + 1
    return np.array([[*row, *[row[-1] if row else 0] * (length - len(row))] for row in rows], np.int64)


class _OnV1:
    """Model Runner V1: its batch is on the host."""

    def __init__(self, runner: Any, log: _Log):
        self._runner, self._log = runner, log
        wrap(runner, "_sample", self._sample)

    def _sample(self, sample: Any, logits: Any, metadata: Any) -> Any:
        input_batch = self._runner.input_batch
        num_rows = (
            [1] * len(input_batch.req_ids) if metadata is None else [1 + num for num in metadata.num_draft_tokens]
        )
        params = [self._runner.requests[request_id].sampling_params for request_id in input_batch.req_ids]
        rows = [params.extra_args[LOGGED] for params in params]
        starts = input_batch.num_tokens_no_spec[: len(rows)] - input_batch.num_prompt_tokens[: len(rows)]
        places = np.concatenate([start + np.arange(num) for start, num in zip(starts, num_rows, strict=True)])
        on_device = partial(torch.as_tensor, dtype=torch.int64, device=logits.device)
        self._log.force(logits, on_device(np.repeat(rows, num_rows)), on_device(places))
        return sample(logits, metadata)


class _OnV2:
    """Model Runner V2, whose rows and positions are on the device, so they stay valid if drafts are trimmed."""

    def __init__(self, runner: Any, log: _Log):
        self._runner, self._log, self._batch = runner, log, None
        # By slot of a request: its row of the log, and the beginning of its output.
        self._rows, self._starts = torch.zeros(2, runner.max_num_reqs, dtype=torch.int64, device=runner.device)
        wrap(runner, "add_requests", self._add)
        wrap(runner, "sample", self._sample)
        wrap(runner.model, "compute_logits", self._compute_logits)
        if log.accepted is not None:  # a cascade's drafter proposes before the plugin's speculator
            ours = getattr(runner.speculator, "specplugins", None)
            wrap(*((runner.speculator, "propose") if ours is None else (ours, "propose_theirs")), self._propose)

    def _add(self, add: Any, scheduler_output: Any) -> None:
        add(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            slot = self._runner.req_states.req_id_to_index[new.req_id]
            self._rows[slot], self._starts[slot] = new.sampling_params.extra_args[LOGGED], new.prompt_len

    def _sample(self, sample: Any, hidden_states: Any, input_batch: Any, *rest: Any) -> Any:
        self._batch = input_batch
        with replaced(self, {"_samples": True}):
            return sample(hidden_states, input_batch, *rest)

    _samples = False

    def _compute_logits(self, compute: Any, *args: Any, **kwargs: Any) -> Any:
        logits, batch = compute(*args, **kwargs), self._batch
        if self._samples:
            assert batch is not None
            slots = batch.expanded_idx_mapping.long()
            places = batch.positions[batch.logits_indices] + 1 - self._starts[slots]
            self._log.force(logits, self._rows[slots], places)
        return logits

    def _propose(self, propose: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        self._draft(drafts)
        return drafts

    def _draft(self, drafts: torch.Tensor) -> None:
        if self._batch is None:  # rehearsals
            return
        slots = self._batch.idx_mapping.long()
        places = self._runner.req_states.total_len.gpu[slots] - self._starts[slots]
        self._log.draft(drafts[: len(slots)], self._rows[slots], places)
