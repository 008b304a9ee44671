"""What we need of the objects of Model Runner V2, beside the functions in seams.py. See compat.py."""

from collections.abc import Iterator

from vllm_specplugins.engine.versions.seam import Seam, members_of


def _trims(file: str, owner: str, members: str, kind: str = "read") -> Iterator[Seam]:
    """What adaptive verification takes."""
    return members_of(file, owner, members, "drafts are trimmed on the device", kind)


def _maps(file: str, owner: str, members: str, kind: str = "read") -> Iterator[Seam]:
    """What says which row runs which LoRA adapter."""
    return members_of(file, owner, members, "adapters of drafted and of verified rows", kind)


V2_MEMBERS: tuple[Seam, ...] = (
    *members_of(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner",
        "speculator speculative_config device vllm_config",
        "the runner's own view of the configuration, V2",
    ),
    *members_of(
        "v1/worker/gpu/input_batch.py",
        "InputBatch",
        "req_ids num_reqs num_tokens input_ids query_start_loc seq_lens seq_lens_cpu_upper_bound idx_mapping_np "
        "cu_num_logits_np",
        "rows of the batch, V2",
    ),
    *members_of(
        "v1/worker/gpu/input_batch.py",
        "InputBuffers",
        "input_ids positions query_start_loc seq_lens",
        "inputs of the target's layers, where a graph finds them",
        kind="instance",
    ),
    *members_of(
        "v1/worker/gpu/block_table.py",
        "BlockTables",
        "input_block_tables compute_slot_mappings(self, idx_mapping, query_start_loc, positions, num_tokens_padded, "
        "out)",
        "where a token's KV goes, V2",
    ),
    *members_of(
        "v1/worker/utils.py",
        "AttentionGroup",
        "kv_cache_group_id map_to_kernel_block_table(self, block_table, ubatch_idx)",
        "block tables of a graph",
    ),
    *members_of(
        "v1/kv_cache_interface.py",
        "KVCacheConfig",
        "kv_cache_groups",
        "the target's layers, V2",
    ),
    *members_of(
        "config/compilation.py",
        "CUDAGraphMode",
        "NONE FULL FULL_DECODE_ONLY decode_mode(self)",
        "whether drafting is recorded",
    ),
    *members_of(
        "forward_context.py",
        "",
        "BatchDescriptor",
        "the context in which attention layers run, V2",
    ),
    *members_of(
        "utils/gpu_sync_debug.py",
        "",
        "gpu_sync_allowed(first_only)",
        "says where a wait for the device is meant",
    ),
    *members_of(
        "v1/worker/gpu/cudagraph_utils.py",
        "BatchExecutionDescriptor",
        "cg_mode num_tokens num_reqs uniform_token_count",
        "which graph fits a batch",
    ),
    *members_of(
        "v1/worker/gpu/cudagraph_utils.py",
        "CudaGraphManager",
        "__init__(self, vllm_config, device, cudagraph_mode, decode_query_len, lora_capture_cases, varlen_decode, "
        "ubatch_runner) run_fullgraph(self, desc) capture(self, create_forward_fn, progress_bar_desc)",
        "one CUDA graph for a whole draft",
    ),
    *members_of(
        "v1/worker/gpu/spec_decode/speculator.py",
        "BaseSpeculator",
        "init_cudagraph_manager(self, cudagraph_mode) capture(self)",
        "the interface of V2's speculators",
        kind="override",
    ),
    *members_of(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator",
        "__init__(self, vllm_config, device) _configure_decode_metadata_update(self)",
        "a draft model without layers of its own",
        kind="override",
    ),
    *members_of(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator",
        "attn_groups block_tables device draft_attn_layer_names draft_max_seq_len draft_tokens dtype hidden_size "
        "idx_mapping input_buffers kv_cache_config max_model_len max_num_reqs max_num_tokens model_state "
        "num_speculative_steps supports_decode_metadata_update vllm_config",
        "what a draft model's speculator keeps",
        kind="instance",
    ),
    *members_of(
        "v1/worker/gpu/sample/states.py",
        "",
        "NO_LOGPROBS",
        "logprobs, V2",
    ),
    *members_of(
        "config/model.py",
        "",
        "PROCESSED_LOGPROBS_MODES",
        "logprobs, V2",
    ),
    *members_of(
        "v1/worker/gpu/spec_decode/rejection_sampler.py",
        "RejectionSampler",
        "__init__(self, sampler, spec_config, device, watermark_key) enable_adaptive_verification "
        "num_speculative_steps sampler",
        "our operation verifies, V2",
        kind="instance",
    ),
    *members_of(
        "v1/worker/gpu/input_batch.py",
        "InputBatch",
        "cu_num_logits input_ids positions idx_mapping logits_indices seq_lens req_ids",
        "our operation verifies, V2",
    ),
    *members_of(
        "v1/worker/gpu/sample/output.py",
        "SamplerOutput",
        "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected sampling_mask_tensors",
        "our operation verifies, V2",
    ),
    *members_of(
        "v1/worker/gpu/model_states/interface.py",
        "ModelState",
        "add_request(self, req_index, new_req_data)",
        "who needs more than the operation does, V2",
    ),
    *members_of(
        "v1/worker/gpu/sample/logits_processor/interface.py",
        "LogitsProcessor",
        "add_request(self, req_idx, sampling_params) apply(self, logits, ctx)",
        "processors of the user's own, V2",
        kind="instance",
    ),
    *members_of(
        "v1/worker/gpu/sample/thinking_budget.py",
        "ThinkingBudgetState",
        "add_request(self, req_idx, sampling_params) apply(self, logits, ctx)",
        "thinking budgets, V2",
        kind="instance",
    ),
    *members_of(
        "v1/worker/gpu/sample/logprob.py",
        "LogprobTokenIdsState",
        "add_request(self, req_idx, sampling_params)",
        "logprobs, V2",
    ),
    *members_of("v1/worker/gpu/model_runner.py", "GPUModelRunner", "model max_num_reqs", "warm-up and self-check"),
    *_maps("v1/worker/gpu/model_runner.py", "GPUModelRunner", "lora_state"),
    *_maps(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner",
        "prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, num_active_loras)",
        "instance",
    ),
    *_maps(
        "v1/worker/gpu/lora_utils.py",
        "LoraState",
        "make_lora_inputs(self, req_ids, idx_mapping, num_scheduled_tokens)",
        "instance",
    ),
    *_maps("v1/worker/gpu/lora_utils.py", "LoraState", "lora_ids get_activate_loras(self, req_ids)"),
    *_maps("v1/worker/gpu/input_batch.py", "InputBatch", "cu_num_logits_np idx_mapping_np"),
    *members_of(
        "v1/worker/gpu/states.py",
        "RequestState",
        "max_num_reqs max_model_len req_id_to_index num_computed_tokens_np prefill_len",
        "tokens on the device",
    ),
    *members_of("v1/worker/gpu/buffer_utils.py", "UvaBackedTensor", "copy_to_uva(self, n)", "limits on the device"),
    *_trims("v1/worker/gpu/buffer_utils.py", "", "is_uva_available UvaBuffer"),
    *_trims("v1/worker/gpu/buffer_utils.py", "UvaBuffer", "np uva(self, n)"),
    *members_of("utils/torch_utils.py", "", "async_tensor_h2d(data, device, dtype, out)", "references on the device"),
    *members_of(
        "config/speculative.py", "SpeculativeConfig", "use_ngram(self)", "tokens on the device", kind="override"
    ),
    *_trims("v1/worker/gpu/model_runner.py", "", "maybe_create_adaptive_verification_manager", "swap"),
    *_trims("v1/worker/gpu/model_runner.py", "GPUModelRunner", "adaptive_verification", "instance"),
    *_trims(
        "v1/worker/gpu/spec_decode/adaptive_verification.py",
        "AdaptiveVerificationManager",
        "req_states num_speculative_steps cost_tables _stale_confidences _stale_idx add_request(self, req_idx) "
        "record_confidences(self, confidence_probs, input_batch) reallocate_drafts(self, req_ids, idx_mapping) "
        "_cu_num_logits query_start_loc _confidence_probs num_bonus_tokens _batch_budget _max_total_logits "
        "_pending_resets get_num_tokens(self, num_tokens_per_req, draft_tokens) "
        "compact_batch(self, num_draft_tokens_per_req, num_scheduled_tokens, cu_num_logits_np)",
        "instance",
    ),
    *_trims(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner",
        "initialize_kv_cache(self, kv_cache_config, is_profiling, kv_cache_allocation_context)",
        "instance",
    ),
    *_trims(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator",
        "enable_adaptive_verification draft_token_confidence_probs use_acceptance_estimator "
        "_maybe_predict_acceptance(self, logits, idx_mapping, draft_step)",
        "instance",
    ),
    *_trims("config/speculative.py", "SpeculativeConfig", "enable_adaptive_verification", "instance"),
    *_trims("config/vllm.py", "VllmConfig", "attention_config aux_output_config compilation_config"),
    *_trims("config/attention.py", "AttentionConfig", "backend"),
    *_trims("config/aux_output.py", "AuxOutputConfig", "enabled(self)"),
    *_trims("config/compilation.py", "CompilationConfig", "cudagraph_mode"),
    *_trims("config/compilation.py", "CUDAGraphMode", "has_full_cudagraphs(self)"),
    *_trims("config/parallel.py", "ParallelConfig", "enable_batch_sharded_sampling"),
    *_trims("config/model.py", "ModelConfig", "return_sampling_mask"),
    *_trims("v1/attention/backends/registry.py", "AttentionBackendEnum", "get_class(self)"),
    *_trims("v1/attention/backend.py", "AttentionBackend", "supports_device_cpu_query_lens_mismatch(cls) get_name()"),
    *_trims("v1/worker/utils.py", "AttentionGroup", "backend"),
)
