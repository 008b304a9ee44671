"""What we touch of Model Runner V2. See compat.py."""

from vllm_specplugins.engine.versions.seam import Seam, members_of, names_of, verifies, verifies_by

_V2 = "v1/worker/gpu/model_runner.py"
_PROCESSORS = "v1/worker/gpu/sample/logits_processor/interface.py"
_ARRAYS = "arrays of the operation that edits logits, V2"
V2: tuple[Seam, ...] = (
    Seam(_V2, "init_model_state", None, "swap", "ModelState.custom_sampler is the way to samplers of one's own"),
    Seam(
        _V2, "GPUModelRunner.load_model", names_of("self load_dummy_weights model"), "instance", "makes the model state"
    ),
    verifies_by(
        "v1/worker/gpu/model_states/interface.py",
        "ModelState.custom_sampler",
        "self sampler",
        "instance",
        "documented: samplers of one's own, V2",
    ),
    verifies_by(
        "v1/worker/gpu/spec_decode/rejection_sampler.py",
        "RejectionSampler._verify",
        "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np expanded_idx_mapping "
        "expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled",
        "override",
        "our operation verifies, V2",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/rejection_sampler.py",
        "RejectionSampler.__call__",
        names_of("self logits input_batch draft_logits invalid_drafts"),
        "override",
        "where a step's verification begins, V2",
    ),
    verifies_by(
        "v1/worker/gpu/spec_decode/rejection_sampler.py",
        "RejectionSampler._get_logprobs_tensors",
        "self sampled num_sampled logits cu_num_logits cu_num_logits_np max_num_logprobs",
        "override",
        "logprob_token_ids, which are forgotten under speculation, V2",
    ),
    verifies_by(
        "v1/worker/gpu/spec_decode/rejection_sampler.py",
        "_flatten_sampled_kernel",
        "flat_sampled_ptr sampled_ptr sampled_stride num_sampled_ptr cu_num_logits_ptr",
        "read",
        "logprobs, V2",
    ),
    verifies_by(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.sample",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np return_logprobs",
        "override",
        "our operation samples, V2",
    ),
    verifies_by(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.__call__",
        "self logits input_batch",
        "override",
        "steps without drafts, V2",
    ),
    verifies_by(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.add_request",
        "self req_idx sampling_params",
        "instance",
        "who needs more than the operation does, V2",
    ),
    verifies_by(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.apply_sampling_params",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np skip_top_k_top_p",
        "read",
        "processed logprobs, V2",
    ),
    verifies_by(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.get_logprobs_dims",
        "self idx_mapping_np include_token_ids",
        "read",
        "processed logprobs, V2",
    ),
    *verifies(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler",
        "logits_processors thinking_budget_state sampling_states return_sampling_mask logprob_token_ids_state "
        "compute_nans trace_replay_state req_states",
        "read",
        "sampling parameters, V2",
    ),
    *verifies(
        "v1/worker/gpu/sample/states.py",
        "SamplingStates",
        "temperature top_k top_p min_p seeds max_num_reqs vocab_size",
        "read",
        "sampling parameters, V2",
    ),
    *verifies(
        "v1/worker/gpu/sample/logit_bias.py",
        "LogitBiasState",
        "num_allowed_token_ids allowed_token_ids num_logit_bias logit_bias_token_ids logit_bias num_stop_token_ids "
        "stop_token_ids min_lens restore_when_all_masked",
        "read",
        _ARRAYS,
    ),
    *verifies(
        "v1/worker/gpu/sample/penalties.py",
        "PenaltiesState",
        "repetition_penalty frequency_penalty presence_penalty prompt_bin_mask output_bin_counts",
        "read",
        _ARRAYS,
    ),
    *verifies(
        "v1/worker/gpu/sample/bad_words.py",
        "BadWordsState",
        "num_bad_words bad_word_offsets bad_word_token_ids req_states",
        "read",
        _ARRAYS,
    ),
    *verifies(_PROCESSORS, "LogitsProcRequestState", "all_token_ids prompt_len", "read", _ARRAYS),
    *verifies("v1/worker/gpu/buffer_utils.py", "UvaBackedTensor", "gpu np", "read", _ARRAYS),
    *verifies("v1/worker/gpu/buffer_utils.py", "StagedWriteTensor", "gpu", "read", _ARRAYS),
    *verifies(
        _PROCESSORS,
        "LogitsContext",
        "expanded_idx_mapping idx_mapping idx_mapping_np expanded_local_pos input_ids pos seq_lens_upper_bound_np",
        "read",
        "what the processors see, V2",
    ),
    verifies_by(
        "v1/worker/gpu/sample/logprob.py",
        "compute_topk_scores",
        "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state expanded_idx_mapping "
        "max_per_req_token_ids logits_mode",
        "read",
        "logprobs, V2",
    ),
    verifies_by(
        "v1/worker/gpu/sample/logprob.py",
        "LogprobTokenIdsState.max_num_token_ids",
        "self idx_mapping_np",
        "read",
        "logprobs, V2",
    ),
    Seam(_V2, "init_speculator", None, "swap", "V2's list of speculators is closed"),
    Seam(_V2, "GPUModelRunner.add_requests", names_of("self scheduler_output"), "instance", "histories start here"),
    Seam(_V2, "GPUModelRunner.finish_requests", names_of("self scheduler_output"), "instance", "histories end here"),
    Seam(
        _V2,
        "GPUModelRunner.sample_tokens",
        names_of("self grammar_output"),
        "instance",
        "reports true draft lengths to our scheduler",
    ),
    Seam(
        _V2,
        "GPUModelRunner.profile_run",
        names_of("self randomize_inputs"),
        "instance",
        "cut bodies are compiled when the target has been, V2",
    ),
    Seam(_V2, "GPUModelRunner.draft_tokens_handler", None, "instance", "V2 reports K for every request"),
    Seam(_V2, "GPUModelRunner.req_states", None, "read", "token ids and lengths on the GPU"),
    Seam("v1/worker/gpu/states.py", "RequestState.all_token_ids", None, "read", "newest tokens"),
    Seam("v1/worker/gpu/states.py", "RequestState.total_len", None, "read", "lengths of histories"),
    Seam("v1/worker/gpu/input_batch.py", "InputBatch.idx_mapping", None, "read", "rows of the request states"),
    Seam("v1/worker/gpu/input_batch.py", "InputBatch.has_structured_output_reqs", None, "read", "grammars see drafts"),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "BaseSpeculator.propose",
        names_of(
            "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled "
            "num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run "
            "skip_attn_for_dummy_run mm_inputs is_profile num_speculative_tokens"
        ),
        "override",
        "the interface of V2's speculators",
    ),
    *members_of(
        "v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py",
        "TargetDependentARSpeculator",
        "init_cudagraph_manager(self, cudagraph_mode)",
        "a stage that is built into vLLM has a K of its own, V2",
        kind="instance",
    ),
    *members_of(
        "v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py",
        "",
        "TargetDependentARSpeculator",
        "as above",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/utils.py",
        "DraftTokensHandler.get_draft_tokens",
        names_of("self"),
        "override",
        "V2 reports K for every request",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/utils.py",
        "DraftTokensHandler.set_draft_tokens",
        names_of("self input_batch draft_tokens"),
        "override",
        "V2 reports K for every request",
    ),
    Seam("v1/worker/gpu/async_utils.py", "AsyncOutput.model_runner_output", None, "instance", "carries the report"),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator._copy_request_inputs",
        names_of("self num_reqs idx_mapping temperature seeds dummy_run"),
        "read",
        "rows of the request states, where a graph finds them",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator._update_draft_decode_metadata",
        names_of("self attn_metadata num_reqs"),
        "read",
        "metadata made once a step",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator.observe_verification",
        names_of("self idx_mapping num_sampled num_rejected"),
        "instance",
        "vLLM's estimator would learn from what other stages drafted, V2",
    ),
    Seam("v1/worker/gpu/spec_decode/speculator.py", "DraftModelSpeculator.draft_logits", None, "instance", "q, V2"),
    Seam(
        "v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py",
        "SpeculatorCudaGraphManager.capture",
        names_of(
            "self forward_fn model_state input_buffers block_tables attn_groups kv_cache_config progress_bar_desc "
            "specialize_spec_tokens"
        ),
        "read",
        "one CUDA graph for a whole draft",
    ),
    Seam(
        "v1/worker/gpu/dp_utils.py",
        "dispatch_cg_and_sync_dp",
        None,
        "read",
        "which of the graphs a batch size needs",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator.load_draft_model",
        names_of("self target_model target_attn_layer_names"),
        "override",
        "hands us the target",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator.set_attn",
        names_of("self model_state kv_cache_config block_tables target_input_buffers target_attn_groups"),
        "override",
        "attention metadata builders, V2",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator._build_uniform_attn_metadata",
        names_of("self batch_desc num_reqs num_query_per_req seq_lens_cpu_upper_bound step causal dcp_local_seq_lens"),
        "read",
        "attention metadata for the target's layers, V2",
    ),
    Seam(
        "v1/worker/gpu/attn_utils.py",
        "build_slot_mappings_by_layer",
        names_of("slot_mappings kv_cache_config"),
        "read",
        "where a token's KV goes, V2",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator.load_model",
        names_of("self target_model"),
        "instance",
        "hands us the target beside a stage that is built into vLLM, V2",
    ),
    Seam("v1/worker/gpu/model_runner.py", "GPUModelRunner.rejection_sampler", None, "instance", "times verification"),
    Seam(_V2, "GPUModelRunner.rejection_sampler", None, "instance", "vLLM's own, where our kernels fail their check"),
    Seam(_V2, "GPUModelRunner.sampler", None, "instance", "vLLM's own, where our kernels fail their check"),
    Seam(_V2, "GPUModelRunner.max_num_tokens", None, "read", "how many logits a step may have"),
    Seam(_V2, "GPUModelRunner.num_speculative_steps", None, "read", "how many logits a step may have"),
    Seam(
        "v1/worker/gpu/spec_decode/rejection_sampler.py",
        "get_max_chunk_logits",
        names_of("vocab_size"),
        "read",
        "how many logits are verified at once",
    ),
    Seam("config/model.py", "ModelConfig.head_dtype", names_of("self"), "read", "the type of logits"),
    Seam("config/model.py", "ModelConfig.get_hidden_size", names_of("self"), "read", "dummy logits of a model's head"),
    Seam("platforms/interface.py", "Platform.device_type", None, "read", "whether there is a device to check"),
    Seam("distributed/parallel_state.py", "GroupCoordinator.cpu_group", None, "read", "all ranks verify alike"),
)
