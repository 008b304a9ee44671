"""Model Runner V2: LoRA adapters for the rows that are drafted and verified."""

from typing import Any

import numpy as np

from vllm_specplugins.engine.target.layers import Adapters


def adapters_of(runner: Any, input_batch: Any, rehearses: bool) -> Adapters:
    state = runner.lora_state
    if rehearses:
        return Adapters(runner._set_active_loras, np.zeros(input_batch.num_reqs, np.int32), set())
    ids, requests = state.lora_ids[input_batch.idx_mapping_np], state.get_activate_loras(input_batch.req_ids)
    return Adapters(runner._set_active_loras, ids, requests)


def map_all_logits(runner: Any) -> None:
    """Maps each row of logits to an adapter: vLLM maps one row per request, a step that verifies drafts has more."""
    prepare_inputs, make_lora_inputs = runner.prepare_inputs, runner.lora_state.make_lora_inputs
    num_logits = np.zeros(0, np.int64)

    def prepared(*args: Any) -> Any:
        nonlocal num_logits
        input_batch = prepare_inputs(*args)
        num_logits = np.diff(input_batch.cu_num_logits_np)
        return input_batch

    def mapped(*args: Any) -> Any:
        by_request, by_token, requests = make_lora_inputs(*args)
        return tuple(np.repeat(by_request, num_logits).tolist()), by_token, requests

    runner.prepare_inputs, runner.lora_state.make_lora_inputs = prepared, mapped
