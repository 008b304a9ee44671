"""Model Runner V1: edits the logits before the temperature, exactly at every draft position. One operation handles
biases, minimum lengths, penalties and bad words (kernels/rejection/adjust); it takes arrays where V1 has lists. N:
rows, B: requests, V: vocab_size, M: entries of the longest list."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor

from vllm_specplugins.engine.v1.rows import Rows
from vllm_specplugins.engine.verify import edit_drafted
from vllm_specplugins.kernels.rejection.adjust import BadWords, Bias, Edits, MinTokens, Penalties, adjust

_OF_VLLM = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)


def custom(processors: Sequence[Any]) -> Iterator[Any]:
    """Yields the logits processors that are not part of vLLM."""
    return (processor for processor in processors if type(processor) not in _OF_VLLM)


def edit(logits: torch.Tensor, metadata: Any, input_batch: Any, rows: Rows) -> torch.Tensor:
    """Edits logits [N, V] in vLLM's order, in float32. Returns the same tensor if no request has edits."""
    processors = [p for p in metadata.logitsprocs.non_argmax_invariant if type(p) not in _OF_VLLM or _restores(p)]
    allowed, holder = metadata.allowed_token_ids_mask, metadata.thinking_budget_state_holder
    budgets = holder is not None and holder.has_tracked_requests()
    edits, max_num_draft = _edits(metadata, input_batch, logits.shape[-1]), max(rows.num_draft)
    if edits == Edits() and allowed is None and not (processors or budgets):
        return logits
    edits = Edits(*(_on_device(field, logits.device) for field in edits))
    # Penalties come after the processors.
    edited = adjust(logits, *rows.layout, edits._replace(penalties=None) if processors else edits, max_num_draft)
    if allowed is not None:
        edited.masked_fill_(allowed[rows.as_tensor(rows.requests)], -torch.inf)
    for processor in processors:
        if isinstance(processor, MinTokensLogitsProcessor):
            edited = processor.apply_with_spec_decode(edited, rows.counts.tolist())
        else:
            edited = _on_last_rows(edited, rows, processor.apply)
    if processors and edits.penalties is not None:
        edited = adjust(edited, *rows.layout, Edits(penalties=edits.penalties), max_num_draft)
    if budgets:
        holder.in_spec_mode = False  # a request with a thinking budget has one row, as without speculation
        holder.update_state(metadata.output_token_ids, None)
        edited = _on_last_rows(edited, rows, lambda last: holder.apply_to_logits(last, False, None))
    return edited


def edit_of_drafts(metadata: Any, runner: Any, rows: list[int]) -> Any:
    """`draft.Target.edit` for these rows of the runner's batch; None if no request has edits. It ignores thinking
    budgets and a user's logits processors."""
    edits = _edits(metadata, runner.input_batch, runner.model_config.get_vocab_size())
    allowed = metadata.allowed_token_ids_mask
    if edits == Edits() and allowed is None:
        return None
    states = torch.tensor(rows, device=runner.device)
    edits = Edits(*(_on_device(field, runner.device) for field in edits))

    def edit_drafts(logits: torch.Tensor, *where: Any) -> torch.Tensor:
        edited = edit_drafted(states, edits, logits, *where)
        if allowed is None:
            return edited
        return edited.masked_fill_(allowed[states.repeat_interleave(len(logits) // len(states))], -torch.inf)

    return edit_drafts


def _restores(processor: Any) -> bool:
    """Returns whether the processor may allow stop tokens early, if structured output allows no other token; it then
    needs whole rows."""
    return isinstance(processor, MinTokensLogitsProcessor) and any(entry[3] for entry in processor.min_toks.values())


def _on_last_rows(logits: torch.Tensor, rows: Rows, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if len(logits) == len(rows.counts):
        return function(logits)
    last = rows.as_tensor(rows.starts[1:] - 1)
    logits[last] = function(logits[last])
    return logits


def _edits(metadata: Any, input_batch: Any, vocab_size: int) -> Edits:
    """Returns the batch's edits as arrays, without allowed tokens, which V1 has as masks, and without processors that
    `_restores`."""
    num_reqs = input_batch.num_reqs
    prompt_lengths, bias, min_tokens = input_batch.num_prompt_tokens[:num_reqs], None, None
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, LogitBiasLogitsProcessor) and processor.biases:
            values = {request: biases.values() for request, biases in processor.biases.items()}
            bias = Bias(*_lists(processor.biases, num_reqs), _lists(values, num_reqs, np.float32)[1])
        elif isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks and not _restores(processor):
            min_positions = prompt_lengths.copy()
            for request, (length, *_) in processor.min_toks.items():
                min_positions[request] += length
            stop_tokens = {request: entry[2] for request, entry in processor.min_toks.items()}
            min_tokens = MinTokens(*_lists(stop_tokens, num_reqs), min_positions)
    penalties = None if metadata.no_penalties else _penalties(metadata, input_batch, vocab_size)
    words, bad_words = metadata.bad_words_token_ids, None
    if words:
        ends = {request: [0, *accumulate(map(len, banned))] for request, banned in words.items()}
        num_ends, offsets = _lists(ends, num_reqs)
        _, token_ids = _lists({request: list(chain(*banned)) for request, banned in words.items()}, num_reqs)
        num_words = (num_ends - 1).clip(0)
        bad_words = BadWords(num_words, offsets, token_ids, input_batch.token_ids_cpu[:num_reqs], prompt_lengths)
    return Edits(bias=bias, min_tokens=min_tokens, penalties=penalties, bad_words=bad_words)


def _lists(
    lists: Mapping[int, Collection[float]], num_reqs: int, dtype: Any = np.int32
) -> tuple[np.ndarray, np.ndarray]:
    """Returns lengths [B] int32 and entries [B, M] of the requests' lists."""
    lengths = np.zeros(num_reqs, np.int32)
    entries = np.zeros((num_reqs, max(map(len, lists.values()))), dtype)
    for request, values in lists.items():
        lengths[request] = len(values)
        entries[request, : len(values)] = list(values)
    return lengths, entries


def _penalties(metadata: Any, input_batch: Any, vocab_size: int) -> Penalties:
    """Counts the tokens of requests with penalties in each step, which costs much less than the logits."""
    parameters = metadata.repetition_penalties, metadata.frequency_penalties, metadata.presence_penalties
    counts = np.zeros((input_batch.num_reqs, vocab_size), np.int32)
    prompt_mask = np.zeros((input_batch.num_reqs, -(-vocab_size // 32)), np.int32)
    for request, asked in enumerate(zip(*(values.tolist() for values in parameters), strict=True)):
        if asked == (1.0, 0.0, 0.0):
            continue
        prompt_length = input_batch.num_prompt_tokens[request]
        token_ids = input_batch.token_ids_cpu[request, : input_batch.num_tokens_no_spec[request]]
        is_prompt = np.zeros(32 * prompt_mask.shape[1], bool)
        is_prompt[token_ids[:prompt_length]] = True
        prompt_mask[request] = np.packbits(is_prompt, bitorder="little").view(np.int32)
        np.add.at(counts[request], token_ids[prompt_length:], 1)
    return Penalties(*parameters, prompt_mask, counts)


def _on_device(arrays: Any, device: torch.device) -> Any:
    return arrays and type(arrays)(*(torch.as_tensor(array, device=device) for array in arrays))
