"""What we replace of vLLM: why, where vLLM discusses a public way, and what makes a record unnecessary."""

from vllm_specplugins.engine.vllm_api.seam import REGISTRY, Seam

_CUSTOM_CLASS = "https://github.com/vllm-project/vllm/pull/39487"  # the custom_class slot of V1
_PARAMETERS = "https://github.com/vllm-project/vllm/issues/42744"  # min_p and logit_bias under speculation
# Upstream, and what ends it.
_OPTIONS = (REGISTRY, "a plugin may check and change a request's extra_args")
_METRICS = (REGISTRY, "a worker has a public way to export metrics")
_VERIFIES = (_PARAMETERS, "vLLM verifies with every sampling parameter")
_V1_ENDS = (_CUSTOM_CLASS, "custom_class proposers get request ids, hidden states and events, or V1 is gone")
# And why, where several do the same.
_NEEDS_MORE = ("who needs more than the operation does", *_VERIFIES)
_RESOLVES = ("resolves our options of a request", *_OPTIONS)


# The front end: configurations, requests, metrics.
_FRONT_END = (
    Seam(
        "wrap engine/arg_utils.py EngineArgs: create_engine_config create_speculative_config",
        "read the user's dictionary, and put our SpeculativeConfig, worker and scheduler into the result",
    ),
    Seam("instance engine/arg_utils.py EngineArgs: async_scheduling", "synchronous where tokens are read"),
    Seam("swap config/vllm.py: NgramGPUTypes", "the names that vLLM's check of asynchronous scheduling knows"),
    Seam(
        "override config/vllm.py VllmConfig: __post_init__",
        "an engine's own process checks its configuration again, with the names that may be scheduled asynchronously",
        remove_when="that check asks the method, and not its name",
    ),
    Seam(
        "override config/vllm.py VllmConfig: num_lookahead_tokens",
        "slots of the KV cache past the last token, for methods that run the target's layers",
        remove_when="SpeculativeConfig says how many slots its method needs",
    ),
    Seam("override config/speculative.py SpeculativeConfig: __post_init__", "our methods have no model"),
    Seam("override config/speculative.py SpeculativeConfig: use_ngram", "tokens on the device"),
    Seam(
        "instance config/speculative.py SpeculativeConfig: method model num_speculative_tokens prompt_lookup_min "
        "prompt_lookup_max target_model_config target_parallel_config draft_model_config draft_parallel_config "
        "enable_adaptive_verification",
        "our methods have no model, and a cascade has stages",
    ),
    Seam(
        "instance config/speculative.py SpeculativeConfig: disable_padded_drafter_batch",
        "V1 asks a drafter of its own for drafts before the sampled tokens are on the host",
        _CUSTOM_CLASS,
        "V1 is gone",
    ),
    Seam(
        "instance config/speculative.py SpeculativeConfig: num_speculative_tokens_per_batch_size",
        "graphs of one token a request beside those of K + 1",
    ),
    Seam("instance config/parallel.py ParallelConfig: worker_cls", "documented: names our worker class"),
    Seam(
        "instance config/scheduler.py SchedulerConfig: scheduler_cls async_scheduling",
        "documented: names our scheduler, synchronous where tokens are read",
    ),
    Seam(
        "patch sampling_params.py SamplingParams: _validate_spec_decode",
        "refuses min_p and logit_bias under speculation",
        *_VERIFIES,
    ),
    Seam("instance sampling_params.py SamplingParams: extra_args", "our options of a request", *_OPTIONS),
    Seam("patch v1/engine/input_processor.py InputProcessor: __init__ process_inputs", *_RESOLVES),
    Seam("patch v1/engine/async_llm.py AsyncLLM: add_request", *_RESOLVES),
    Seam("patch entrypoints/openai/chat_completion/protocol.py ChatCompletionRequest: to_sampling_params", *_RESOLVES),
    Seam(
        "patch v1/engine/utils.py: get_engine_process_shutdown_timeout",
        "time to save, before engines are killed",
        remove_when="servers give engines time to end",
    ),
    Seam(
        "patch v1/metrics/loggers.py StatLoggerManager: __init__ record",
        "our metrics beside vLLM's, whose own loggers do not see our report",
        *_METRICS,
    ),
    Seam(
        "instance v1/metrics/stats.py SchedulerStats: ec_connector_stats",
        "carries our report to the front end",
        *_METRICS,
    ),
)


# The engine, on either runner: scheduler, worker, target.
_ENGINE = (
    Seam(
        "override v1/core/sched/async_scheduler.py AsyncScheduler: __init__ _update_after_schedule",
        "plans K drafts for every request before they exist",
    ),
    Seam(
        "override v1/core/sched/scheduler.py Scheduler: add_request update_from_output", "receives the worker's report"
    ),
    Seam("instance v1/request.py Request: spec_token_ids", "the drafts that are planned"),
    Seam(
        "instance v1/core/sched/output.py SchedulerOutput: num_spec_tokens_to_schedule",
        "a stage that is built into vLLM has a K of its own",
    ),
    Seam("override v1/worker/gpu_worker.py Worker: init_device", "builds the model runner"),
    Seam("override v1/worker/cpu_worker.py CPUWorker: init_device", "builds the model runner"),
    Seam(
        "override v1/worker/gpu_worker.py Worker: update_max_model_len",
        "vLLM fits the context to its memory after the proposer was made",
    ),
    Seam("override v1/worker/gpu_worker.py Worker: shutdown", "saves for the last time"),
    Seam(
        "override v1/worker/gpu_worker.py Worker: load_model execute_model sample_tokens compile_or_warm_up_model",
        "where a step's report is made",
        *_METRICS,
    ),
    Seam(
        "instance v1/outputs.py ModelRunnerOutput: ec_connector_output",
        "carries our report to the scheduler",
        *_METRICS,
    ),
    Seam(
        "patch triton_utils/dispatcher.py: _rebind_kernels",
        "on a CPU, looks into all modules at each start of an engine, and dies of numba's",
        remove_when="vLLM's search skips objects whose __dict__ is none",
    ),
    Seam("swap triton_utils/dispatcher.py: sys", "the modules that it looks into"),
    Seam(
        "instance model_executor/models/llama.py LlamaModel: layers norm start_layer end_layer embed_input_ids forward",
        "a decoder's body, as most families have it: its copy ends earlier",
    ),
    Seam(
        "instance compilation/decorators.py: aot_compiled_fn was_aot_compile_fn_loaded_from_disk _compile_tag",
        "a cut body's own code, and its name in vLLM's log",
    ),
)


_RUNNER_V1 = (
    Seam(
        "swap v1/worker/gpu_model_runner.py: create_custom_proposer",
        "vLLM's custom_class slot, for the time in which the runner is built",
        *_V1_ENDS,
    ),
    Seam(
        "swap v1/worker/gpu_model_runner.py: DFlashProposer DraftModelProposer EagleProposer Gemma4Proposer "
        "Step3p5MTPProposer",
        "a stage that is built into vLLM has a K of its own",
    ),
    Seam(
        "swap v1/worker/gpu_model_runner.py: build_logitsprocs",
        "leaves out min_p, logit_bias and the user's processors under speculation",
        *_VERIFIES,
    ),
    Seam(
        "instance v1/worker/gpu_model_runner.py GPUModelRunner: propose_draft_token_ids _update_states "
        "_draft_probs _draft_prob_req_ids",
        "custom_class proposers see token ids only, and not which requests are gone; what they draft has no q",
        *_V1_ENDS,
    ),
    Seam(
        "instance v1/worker/gpu_model_runner.py GPUModelRunner: profile_run",
        "cut bodies are compiled when the target has been",
    ),
    Seam(
        "instance v1/worker/gpu_model_runner.py GPUModelRunner: update_max_model_len effective_drafter_max_model_len",
        "V1 drafts zeros for a whole batch when one request nears the end of its context",
        _CUSTOM_CLASS,
        "V1 leaves that to the proposer, or V1 is gone",
    ),
    Seam("instance v1/worker/gpu_model_runner.py GPUModelRunner: _sample", "our operation samples", *_VERIFIES),
    Seam(
        "instance v1/worker/gpu_input_batch.py InputBatch: generators",
        "a seeded request with a chunked prompt: torch's generators on CPUs have no offset to wind back",
        remove_when="vLLM saves a generator's state, or V1 is gone",
    ),
    Seam(
        "patch v1/sample/rejection_sampler.py: expand_batch_to_tokens",
        "vLLM's CPU kernel leaves the drafted positions' temperature, top-k and top-p uninitialised",
        remove_when="vLLM's _expand_kernel_impl copies its result back",
    ),
    Seam(
        "instance v1/sample/thinking_budget_state.py ThinkingBudgetStateHolder: in_spec_mode",
        "requests with a budget have one row",
        *_VERIFIES,
    ),
    Seam(
        "instance v1/spec_decode/llm_base_proposer.py SpecDecodeBaseProposer: load_model",
        "hands us the target beside a stage that is built into vLLM",
    ),
)


_RUNNER_V2 = (
    Seam(
        "swap v1/worker/gpu/model_runner.py: init_model_state",
        "ModelState.custom_sampler is the way to samplers of one's own",
    ),
    Seam("swap v1/worker/gpu/model_runner.py: init_speculator", "V2's list of speculators is closed"),
    Seam(
        "swap v1/worker/gpu/model_runner.py: maybe_create_adaptive_verification_manager",
        "drafts are trimmed on the device",
    ),
    Seam("instance v1/worker/gpu/model_runner.py GPUModelRunner: load_model", "makes the model state"),
    Seam(
        "instance v1/worker/gpu/model_runner.py GPUModelRunner: add_requests finish_requests",
        "where histories start and end",
    ),
    Seam(
        "instance v1/worker/gpu/model_runner.py GPUModelRunner: sample_tokens draft_tokens_handler",
        "V2 reports K for every request, and not the true lengths of its drafts",
    ),
    Seam(
        "instance v1/worker/gpu/model_runner.py GPUModelRunner: profile_run",
        "cut bodies are compiled when the target has been",
    ),
    Seam(
        "instance v1/worker/gpu/model_runner.py GPUModelRunner: prepare_inputs",
        "adapters of drafted and of verified rows",
    ),
    Seam(
        "instance v1/worker/gpu/model_runner.py GPUModelRunner: initialize_kv_cache", "drafts are trimmed on the device"
    ),
    Seam(
        "instance v1/worker/gpu/model_runner.py GPUModelRunner: sampler rejection_sampler",
        "vLLM's own, where our kernels fail their check",
        *_VERIFIES,
    ),
    Seam(
        "instance v1/worker/gpu/lora_utils.py LoraState: make_lora_inputs", "adapters of drafted and of verified rows"
    ),
    Seam(
        "instance v1/worker/gpu/model_states/interface.py ModelState: custom_sampler",
        "documented: samplers of one's own",
        *_VERIFIES,
    ),
    Seam(
        "override v1/worker/gpu/spec_decode/rejection_sampler.py RejectionSampler: __init__ __call__ _verify "
        "_get_logprobs_tensors",
        "our operation verifies, and knows logprob_token_ids",
        *_VERIFIES,
    ),
    Seam(
        "instance v1/worker/gpu/spec_decode/rejection_sampler.py RejectionSampler: enable_adaptive_verification",
        "off where an attention backend cannot",
    ),
    Seam("override v1/worker/gpu/sample/sampler.py Sampler: __call__ sample", "our operation samples", *_VERIFIES),
    Seam("instance v1/worker/gpu/sample/sampler.py Sampler: add_request", *_NEEDS_MORE),
    Seam("instance v1/worker/gpu/model_states/interface.py ModelState: add_request", *_NEEDS_MORE),
    Seam("instance v1/worker/gpu/sample/logits_processor/interface.py LogitsProcessor: add_request", *_NEEDS_MORE),
    Seam("instance v1/worker/gpu/sample/thinking_budget.py ThinkingBudgetState: add_request", *_NEEDS_MORE),
    Seam("instance v1/worker/gpu/sample/logprob.py LogprobTokenIdsState: add_request", *_NEEDS_MORE),
    Seam(
        "override v1/worker/gpu/spec_decode/speculator.py BaseSpeculator: propose init_cudagraph_manager capture",
        "the interface of V2's speculators",
    ),
    Seam(
        "override v1/worker/gpu/spec_decode/speculator.py DraftModelSpeculator: __init__ load_draft_model "
        "set_attn _configure_decode_metadata_update _copy_request_inputs",
        "a draft model without layers of its own",
    ),
    Seam(
        "instance v1/worker/gpu/spec_decode/speculator.py DraftModelSpeculator: load_model draft_logits "
        "num_speculative_steps observe_verification",
        "a stage that is built into vLLM has a K and a q of its own, and learns from its own drafts",
    ),
    Seam(
        "instance v1/worker/gpu/spec_decode/speculator.py DraftModelSpeculator: enable_adaptive_verification "
        "draft_token_confidence_probs use_acceptance_estimator",
        "drafts are trimmed on the device",
    ),
    Seam(
        "instance v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py TargetDependentARSpeculator: "
        "init_cudagraph_manager",
        "a stage that is built into vLLM has a K of its own",
    ),
    Seam(
        "override v1/worker/gpu/spec_decode/utils.py DraftTokensHandler: get_draft_tokens set_draft_tokens",
        "V2 reports K for every request",
    ),
    Seam(
        "instance v1/worker/gpu/spec_decode/adaptive_verification.py AdaptiveVerificationManager: add_request "
        "record_confidences reallocate_drafts get_num_tokens compact_batch _batch_budget",
        "drafts are trimmed on the device",
    ),
)


REPLACED: tuple[Seam, ...] = (*_FRONT_END, *_ENGINE, *_RUNNER_V1, *_RUNNER_V2)
