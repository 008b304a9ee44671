"""What we need of the objects of Model Runner V1, beside the functions in seams.py. See compat.py."""

from vllm_specplugins.engine.versions.seam import Seam, members_of

V1_MEMBERS: tuple[Seam, ...] = (
    *members_of(
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner",
        "speculative_config device max_model_len num_spec_tokens vllm_config model_config",
        "the runner's own view of the configuration, V1",
    ),
    *members_of(
        "v1/worker/gpu_input_batch.py",
        "InputBatch",
        "req_ids(self) block_table num_computed_tokens_cpu num_reqs(self) temperature_cpu",
        "rows of the batch, V1",
    ),
    *members_of(
        "v1/worker/gpu_input_batch.py",
        "InputBatch",
        "request_lora_mapping lora_id_to_lora_request",
        "adapters of requests, V1",
    ),
    *members_of(
        "v1/worker/gpu_input_batch.py",
        "CachedRequestState",
        "sampling_params",
        "options of requests, V1",
    ),
    *members_of(
        "v1/worker/block_table.py",
        "BlockTable",
        "block_size",
        "where a token's KV goes, V1",
    ),
    *members_of(
        "v1/outputs.py",
        "",
        "LogprobsTensors SamplerOutput",
        "what verification returns, V1",
    ),
    *members_of(
        "v1/sample/metadata.py",
        "SamplingMetadata",
        "thinking_budget_state_holder",
        "sampling parameters, V1",
    ),
    *members_of(
        "v1/sample/thinking_budget_state.py",
        "ThinkingBudgetStateHolder",
        "has_tracked_requests(self)",
        "thinking budgets, V1",
    ),
    *members_of(
        "v1/sample/logits_processor/state.py",
        "LogitsProcessors",
        "argmax_invariant non_argmax_invariant all(self)",
        "which processors there are, V1",
    ),
    *members_of(
        "v1/sample/logits_processor/interface.py",
        "LogitsProcessor",
        "apply(self, logits) is_argmax_invariant(self)",
        "processors of the user's own, V1",
    ),
    *members_of(
        "v1/sample/logits_processor/builtin.py",
        "MinPLogitsProcessor",
        "apply(self, logits) is_argmax_invariant(self)",
        "vLLM's own processors, V1",
    ),
    *members_of(
        "v1/sample/logits_processor/builtin.py",
        "LogitBiasLogitsProcessor",
        "apply(self, logits) is_argmax_invariant(self)",
        "vLLM's own processors, V1",
    ),
    *members_of(
        "v1/sample/logits_processor/builtin.py",
        "MinTokensLogitsProcessor",
        "apply(self, logits) is_argmax_invariant(self)",
        "vLLM's own processors, V1",
    ),
)
