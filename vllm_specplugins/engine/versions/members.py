"""What both runners need of vLLM's objects, beside the functions in seams.py. See compat.py."""

from vllm_specplugins.engine.versions.seam import Seam, members_of

COMMON_MEMBERS: tuple[Seam, ...] = (
    *members_of(
        "entrypoints/llm.py",
        "LLM",
        "llm_engine generate(self, prompts, sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, "
        "mm_processor_kwargs) collective_rpc(self, method, timeout, args, kwargs) get_metrics(self)",
        "engines that the tools measure",
    ),
    *members_of(
        "config/vllm.py",
        "VllmConfig",
        "model_config parallel_config scheduler_config speculative_config lora_config watermark_config",
        "what the engine is asked for",
    ),
    *members_of(
        "config/speculative.py",
        "SpeculativeConfig",
        "method model num_speculative_tokens prompt_lookup_min prompt_lookup_max target_model_config "
        "target_parallel_config",
        "our methods have no model",
        kind="instance",
    ),
    *members_of(
        "config/speculative.py",
        "SpeculativeConfig",
        "parallel_drafting use_local_argmax_reduction",
        "how a stage that is built into vLLM drafts",
    ),
    *members_of(
        "config/utils.py",
        "",
        "config(cls)",
        "the decorator of vLLM's configurations",
    ),
    *members_of(
        "config/model.py",
        "ModelConfig",
        "is_encoder_decoder(self) is_hybrid(self) is_attention_free(self) is_multimodal_model(self) is_moe(self)",
        "targets that cannot be cut",
    ),
    *members_of(
        "config/model.py",
        "ModelConfig",
        "get_total_num_hidden_layers(self) get_hidden_size(self) get_vocab_size(self) max_model_len dtype seed model",
        "the target's shape",
    ),
    *members_of(
        "config/parallel.py",
        "ParallelConfig",
        "pipeline_parallel_size data_parallel_size decode_context_parallel_size prefill_context_parallel_size",
        "what a method that runs the target cannot be split over",
    ),
    *members_of(
        "v1/worker/lora_model_runner_mixin.py",
        "LoRAModelRunnerMixin",
        "lora_config _set_active_loras(self, prompt_lora_mapping, token_lora_mapping, lora_requests, mapping_type)",
        "which adapters the layers run",
    ),
    *members_of(
        "config/scheduler.py",
        "SchedulerConfig",
        "max_num_batched_tokens max_num_seqs",
        "how much is drafted for at once",
    ),
    *members_of(
        "config/scheduler.py",
        "SchedulerConfig",
        "async_scheduling",
        "synchronous where tokens are read",
        kind="instance",
    ),
    *members_of(
        "model_executor/models/llama.py",
        "LlamaModel",
        "layers norm start_layer end_layer embed_input_ids(self, input_ids) "
        "forward(self, input_ids, positions, intermediate_tensors, inputs_embeds)",
        "a decoder's body, as most families have it: its copy ends earlier",
        kind="instance",
    ),
    *members_of(
        "model_executor/models/llama.py",
        "LlamaForCausalLM",
        "model lm_head logits_processor compute_logits(self, hidden_states)",
        "the target's own head",
    ),
    *members_of(
        "model_executor/layers/logits_processor.py",
        "LogitsProcessor",
        "scale",
        "an argmax whose logits tensor-parallel ranks need not gather",
    ),
    *members_of(
        "distributed/parallel_state.py",
        "GroupCoordinator",
        "rank_in_group world_size broadcast(self, input_, src)",
        "rank 0 drafts for all",
    ),
    *members_of(
        "v1/attention/backend.py",
        "CommonAttentionMetadata",
        "query_start_loc_cpu",
        "where a request's tokens begin",
    ),
    *members_of(
        "v1/attention/backend.py",
        "AttentionMetadataBuilder",
        "build(self, common_prefix_len, common_attn_metadata, fast_build) supports_draft_decode_metadata_update "
        "update_draft_decode_metadata(self, metadata)",
        "whether metadata can be updated in place",
    ),
    *members_of(
        "v1/worker/utils.py",
        "AttentionGroup",
        "layer_names get_metadata_builder(self, ubatch_id)",
        "attention metadata for the target's layers",
    ),
    *members_of(
        "v1/core/sched/output.py",
        "SchedulerOutput",
        "scheduled_new_reqs num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens "
        "num_spec_tokens_to_schedule finished_req_ids preempted_req_ids",
        "which requests there are, and what a step verifies",
    ),
    *members_of(
        "v1/core/sched/output.py",
        "NewRequestData",
        "req_id prefill_token_ids prompt_embeds sampling_params",
        "where a history starts",
    ),
    *members_of(
        "v1/core/sched/scheduler.py",
        "Scheduler",
        "requests num_spec_tokens max_model_len dynamic_sd_lookup vllm_config add_request(self, request)",
        "the requests whose drafts are planned",
    ),
    *members_of(
        "v1/core/sched/output.py",
        "SchedulerOutput",
        "num_scheduled_tokens scheduled_spec_decode_tokens total_num_scheduled_tokens num_spec_tokens_to_schedule",
        "how many tokens a step drafts",
    ),
    *members_of("v1/worker/gpu/async_utils.py", "AsyncOutput", "sampled_token_ids", "what a step brought"),
    *members_of("v1/worker/gpu/input_batch.py", "InputBatch", "has_prefill", "steps that draft nothing"),
    *members_of(
        "v1/core/sched/async_scheduler.py",
        "AsyncScheduler",
        "__init__(self)",
        "plans K drafts for every request before they exist",
        kind="override",
    ),
    *members_of(
        "v1/engine/__init__.py",
        "EngineCoreRequest",
        "sampling_params cache_salt",
        "a tenant's requests share its store",
    ),
    *members_of(
        "v1/request.py",
        "Request",
        "spec_token_ids sampling_params num_tokens(self)",
        "the drafts that are planned",
        kind="instance",
    ),
    *members_of(
        "sampling_params.py",
        "SamplingParams",
        "structured_outputs thinking_token_budget extra_args min_p logit_bias",
        "what verification has to look at, and a request's options",
    ),
    *members_of(
        "outputs.py",
        "RequestOutput",
        "outputs",
        "engines that the tools measure",
    ),
    *members_of(
        "outputs.py",
        "CompletionOutput",
        "token_ids",
        "engines that the tools measure",
    ),
    *members_of(
        "v1/metrics/reader.py",
        "Metric",
        "name labels",
        "engines that the tools measure",
    ),
    *members_of(
        "v1/metrics/reader.py",
        "Counter",
        "value",
        "engines that the tools measure",
    ),
    *members_of(
        "v1/worker/gpu_worker.py",
        "Worker",
        "update_max_model_len(self, max_model_len)",
        "vLLM fits the context to its memory after the proposer was made",
        kind="override",
    ),
    *members_of("triton_utils/__init__.py", "", "HAS_TRITON", "which runner there can be"),
    *members_of("envs.py", "", "VLLM_USE_V2_MODEL_RUNNER", "which runner is asked for"),
    *members_of(
        "config/vllm.py", "VllmConfig", "_get_v2_model_runner_unsupported_features(self)", "which runner there can be"
    ),
    *members_of("entrypoints/llm.py", "LLM", "model_config get_tokenizer(self)", "engines that the tools measure"),
    *members_of("platforms/__init__.py", "", "current_platform", "which device there is"),
    *members_of(
        "platforms/interface.py", "Platform", "is_cpu(self) get_device_name(cls, device_id)", "which device there is"
    ),
    *members_of("logger.py", "", "init_logger(name)", "sentences that every process says once"),
    *members_of("sampling_params.py", "RequestOutputKind", "DELTA", "engines that the tools measure"),
    *members_of(
        "v1/engine/llm_engine.py",
        "LLMEngine",
        "vllm_config get_num_unfinished_requests(self)",
        "engines that the tools measure",
    ),
    *members_of("outputs.py", "RequestOutput", "request_id", "engines that the tools measure"),
)
