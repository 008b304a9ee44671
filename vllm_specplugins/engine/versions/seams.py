"""What both runners need of vLLM: its front end, its configuration, its scheduler. See compat.py."""

from collections.abc import Iterator

from vllm_specplugins.engine.versions.seam import CUSTOM_CLASS, Seam, names_of, verifies_by


def _request(file: str, name: str, parameters: str, kind: str) -> Seam:
    """Where requests come in, in the front end's process."""
    why, end = "resolves our options of a request", "a plugin may check and change a request's extra_args"
    return Seam(file, name, names_of(parameters), kind, why, remove_when=end)


METRICS = "a worker has a public way to export metrics"


def _for_metrics(file: str, owner: str, names: str, why: str) -> Iterator[Seam]:
    for name in names.split():
        yield Seam(file, f"{owner}.{name}", None, "read", why, remove_when=METRICS)


COMMON: tuple[Seam, ...] = (
    Seam(
        "engine/arg_utils.py",
        "EngineArgs.create_speculative_config",
        names_of("self target_model_config target_parallel_config"),
        "wrap",
        "returns our SpeculativeConfig for a method of ours",
    ),
    Seam(
        "engine/arg_utils.py",
        "EngineArgs.create_engine_config",
        names_of("self usage_context headless"),
        "wrap",
        "reads the user's dictionary first, and puts our worker and scheduler into the result",
    ),
    Seam("engine/arg_utils.py", "EngineArgs.speculative_config", None, "read", "the user's dictionary"),
    Seam("engine/arg_utils.py", "EngineArgs.spec_method", None, "read", "the flag --spec-method"),
    Seam("engine/arg_utils.py", "EngineArgs.spec_model", None, "read", "the flag --spec-model"),
    Seam("engine/arg_utils.py", "EngineArgs.spec_tokens", None, "read", "the flag --spec-tokens"),
    Seam(
        "engine/arg_utils.py",
        "EngineArgs.async_scheduling",
        None,
        "instance",
        "synchronous where tokens are read",
    ),
    Seam("engine/arg_utils.py", "EngineArgs.gpu_memory_utilization", None, "read", "whether vLLM would start"),
    Seam("engine/arg_utils.py", "EngineArgs.pipeline_parallel_size", None, "read", "a pipeline is not synchronous"),
    Seam(
        "config/vllm.py",
        "NgramGPUTypes",
        None,
        "swap",
        "one of the names that vLLM's check of asynchronous scheduling accepts",
    ),
    Seam("config/vllm.py", "VllmConfig.use_v2_model_runner", names_of("self"), "read", "which adapter to use"),
    Seam(
        "config/speculative.py",
        "SpeculativeMethod",
        None,
        "read",
        "vLLM's own method names, which pass through",
    ),
    Seam(
        "config/speculative.py",
        "SpeculativeConfig.__post_init__",
        names_of("self"),
        "override",
        "our methods have no model",
    ),
    Seam("config/speculative.py", "SpeculativeConfig.draft_model_config", None, "instance", "the target's own"),
    Seam(
        "config/speculative.py",
        "SpeculativeConfig.compute_hash",
        names_of("self"),
        "override",
        "compiled code goes by the layers whose states the target hands out",
    ),
    Seam(
        "model_executor/models/interfaces.py", "supports_eagle3", names_of("model"), "read", "models that can do that"
    ),
    Seam(
        "model_executor/models/interfaces.py",
        "SupportsEagle3.set_aux_hidden_state_layers",
        names_of("self layers"),
        "read",
        "has the target hand out states of early layers, as for EAGLE 3",
    ),
    Seam(
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner.use_aux_hidden_state_outputs",
        None,
        "instance",
        "whether it takes such states, V1",
    ),
    Seam(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner.use_aux_hidden_state_outputs",
        None,
        "instance",
        "whether it takes such states, V2",
    ),
    Seam(
        "config/parallel.py",
        "ParallelConfig.worker_cls",
        None,
        "instance",
        "documented: names our worker class",
    ),
    Seam(
        "config/scheduler.py",
        "SchedulerConfig.scheduler_cls",
        None,
        "instance",
        "documented: names our scheduler",
    ),
    Seam("v1/worker/gpu_worker.py", "Worker.init_device", names_of("self"), "override", "builds the model runner"),
    Seam(
        "v1/worker/cpu_worker.py",
        "CPUWorker.init_device",
        names_of("self"),
        "override",
        "builds the model runner",
    ),
    Seam(
        "triton_utils/dispatcher.py",
        "_rebind_kernels",
        names_of("overrides"),
        "patch",
        "on a CPU, looks into all modules at each start of an engine, and dies of numba's",
        remove_when="vLLM's search skips objects whose __dict__ is none",
    ),
    Seam("triton_utils/dispatcher.py", "sys", None, "swap", "the modules that it looks into"),
    verifies_by(
        "sampling_params.py",
        "SamplingParams._validate_spec_decode",
        "self speculative_config",
        "patch",
        "refuses min_p and logit_bias under speculation",
    ),
    _request(
        "v1/engine/input_processor.py", "InputProcessor.__init__", "self vllm_config renderer mm_registry", "patch"
    ),
    _request(
        "v1/engine/input_processor.py",
        "InputProcessor.process_inputs",
        "self request_id prompt params supported_tasks arrival_time lora_request tokenization_kwargs trace_headers "
        "priority data_parallel_rank resumable session_id kv_hints",
        "patch",
    ),
    _request(
        "v1/engine/async_llm.py",
        "AsyncLLM.add_request",
        "self request_id prompt params arrival_time lora_request tokenization_kwargs trace_headers priority "
        "data_parallel_rank session_id prompt_text reasoning_ended reasoning_parser_kwargs kv_hints",
        "patch",
    ),
    _request("v1/engine/input_processor.py", "InputProcessor.tokenizer", "self", "read"),
    Seam("v1/engine/async_llm.py", "AsyncLLM.input_processor", None, "read", "resolves our options of a request"),
    Seam("sampling_params.py", "SamplingParams.extra_args", None, "read", "our options of a request"),
    Seam(
        "v1/core/sched/async_scheduler.py",
        "AsyncScheduler._update_after_schedule",
        names_of("self scheduler_output"),
        "override",
        "plans K drafts for every request before they exist",
    ),
    Seam(
        "v1/core/sched/scheduler.py",
        "Scheduler.update_from_output",
        names_of("self scheduler_output model_runner_output"),
        "override",
        "receives the worker's report",
    ),
    Seam(
        "config/vllm.py",
        "VllmConfig.__post_init__",
        names_of("self"),
        "override",
        "an engine's own process checks its configuration again, with the names that may be scheduled asynchronously",
        remove_when="that check asks the method, and not its name",
    ),
    Seam(
        "config/vllm.py",
        "VllmConfig.num_lookahead_tokens",
        names_of("self"),
        "override",
        "slots of the KV cache past the last token, for methods that run the target's layers",
        remove_when="SpeculativeConfig says how many slots its method needs",
    ),
    Seam("config/vllm.py", "VllmConfig.num_speculative_tokens", names_of("self"), "read", "K"),
    Seam("config/speculative.py", "SpeculativeConfig.draft_sample_method", None, "read", "whether V2 keeps q"),
    Seam("config/model.py", "ModelConfig.has_inner_state", names_of("self"), "read", "targets that cannot be cut"),
    Seam("config/model.py", "ModelConfig.uses_mrope", names_of("self"), "read", "targets that cannot be cut"),
    Seam("config/model.py", "ModelConfig.registry", names_of("self"), "read", "where a model's source stands"),
    Seam("config/model.py", "ModelConfig.architecture", names_of("self"), "read", "where a model's source stands"),
    Seam("model_executor/models/registry.py", "_ModelRegistry.models", None, "read", "where a model's source stands"),
    Seam(
        "model_executor/models/registry.py",
        "_LazyRegisteredModel.module_name",
        None,
        "read",
        "where a model's source stands",
    ),
    Seam(
        "model_executor/layers/logits_processor.py",
        "LogitsProcessor.get_top_tokens",
        names_of("self lm_head hidden_states embedding_bias"),
        "read",
        "an argmax whose logits tensor-parallel ranks need not gather",
    ),
    Seam(
        "config/speculative.py",
        "SpeculativeConfig.draft_parallel_config",
        None,
        "instance",
        "a cascade's view beside a stage that is built into vLLM",
    ),
    Seam(
        "config/speculative.py",
        "SpeculativeConfig.disable_padded_drafter_batch",
        None,
        "instance",
        "V1 asks a drafter of its own for drafts before the sampled tokens are on the host",
        CUSTOM_CLASS,
        "V1 is gone",
    ),
    Seam(
        "forward_context.py",
        "set_forward_context",
        names_of(
            "attn_metadata vllm_config num_tokens num_tokens_across_dp cudagraph_runtime_mode batch_descriptor "
            "ubatch_slices slot_mapping skip_compiled is_padding"
        ),
        "read",
        "the context in which attention layers run",
    ),
    Seam("config/vllm.py", "set_current_vllm_config", names_of("vllm_config check_compile prefix"), "read", "compiles"),
    Seam("compilation/backends.py", "set_model_tag", names_of("tag is_encoder"), "read", "a cut body's own code"),
    Seam(
        "compilation/wrapper.py",
        "TorchCompileWithNoGuardsWrapper.__init__",
        names_of("self compile_prefix is_encoder"),
        "read",
        "a cut body's own code, made anew as vLLM's reset_compile_wrapper does",
    ),
    Seam(
        "compilation/decorators.py", "_model_hash_key", names_of("fn"), "read", "code on disk goes by a method's name"
    ),
    Seam("compilation/decorators.py", "do_not_compile", None, "read", "whether vLLM compiles the target"),
    Seam("compilation/decorators.py", "aot_compiled_fn", None, "instance", "a cut body's own code"),
    Seam("compilation/decorators.py", "was_aot_compile_fn_loaded_from_disk", None, "instance", "a cut body's own code"),
    Seam("compilation/decorators.py", "_compile_tag", None, "instance", "a cut body's name in vLLM's log"),
    Seam("v1/outputs.py", "DraftTokenIds.draft_token_ids", None, "read", "ragged lists are allowed"),
    Seam(
        "distributed/parallel_state.py",
        "GroupCoordinator.broadcast_object",
        names_of("self obj src"),
        "read",
        "the gates of all ranks go by rank 0's times",
    ),
    _request(
        "entrypoints/openai/chat_completion/protocol.py",
        "ChatCompletionRequest.to_sampling_params",
        "self max_tokens default_sampling_params",
        "patch",
    ),
    Seam("exceptions.py", "VLLMValidationError", None, "read", "what the front end answers 400 to"),
    Seam(
        "v1/engine/llm_engine.py",
        "LLMEngine.add_request",
        names_of(
            "self request_id prompt params arrival_time lora_request tokenization_kwargs trace_headers priority "
            "session_id prompt_text kv_hints"
        ),
        "read",
        "calibrate times single steps",
    ),
    Seam("v1/engine/llm_engine.py", "LLMEngine.step", names_of("self"), "read", "calibrate times single steps"),
    Seam(
        "v1/engine/llm_engine.py",
        "LLMEngine.has_unfinished_requests",
        names_of("self"),
        "read",
        "whether verify-lossless was refused, or a step failed",
    ),
    Seam("distributed/parallel_state.py", "get_tp_group", (), "read", "rank 0 drafts for all"),
    Seam("distributed/parallel_state.py", "get_pp_group", (), "read", "the last stage drafts, and saves"),
    Seam(
        "config/parallel.py", "ParallelConfig.data_parallel_index", None, "read", "engines save to files of their own"
    ),
    Seam("v1/worker/gpu_worker.py", "Worker.shutdown", names_of("self"), "override", "saves for the last time"),
    Seam(
        "v1/engine/utils.py",
        "get_engine_process_shutdown_timeout",
        names_of("request_timeout process_timeout"),
        "patch",
        "time to save, before engines are killed",
        remove_when="servers give engines time to end",
    ),
    Seam("tokenizers/__init__.py", "cached_tokenizer_from_config", None, "read", "a proposer's own texts"),
    Seam(
        "v1/metrics/loggers.py",
        "StatLoggerManager.__init__",
        names_of(
            "self vllm_config engine_idxs custom_stat_loggers enable_default_loggers aggregate_engine_logging "
            "client_count"
        ),
        "patch",
        "our metrics beside vLLM's",
        remove_when=METRICS,
    ),
    Seam(
        "v1/metrics/loggers.py",
        "StatLoggerManager.record",
        names_of("self scheduler_stats iteration_stats mm_cache_stats engine_idx"),
        "patch",
        "takes our report out of what vLLM's own loggers see",
        remove_when=METRICS,
    ),
    *_for_metrics(
        "v1/metrics/loggers.py", "PrometheusStatLogger", "_counter_cls _gauge_cls _histogram_cls", "its kinds"
    ),
    *_for_metrics("v1/metrics/loggers.py", "PrometheusStatLogger", "per_engine_labelvalues", "vLLM's labels"),
    *_for_metrics("v1/metrics/loggers.py", "StatLoggerManager", "stat_loggers", "vLLM's own logger"),
    *_for_metrics("v1/metrics/stats.py", "SchedulerStats", "ec_connector_stats", "carries our report to the front end"),
    *_for_metrics("v1/outputs.py", "ModelRunnerOutput", "ec_connector_output", "carries our report to the scheduler"),
    *_for_metrics("v1/outputs.py", "ECConnectorOutput", "ec_connector_stats", "carries our report to the scheduler"),
    *_for_metrics("distributed/ec_transfer/ec_connector/metrics.py", "ECConnectorStats", "data", "carries our report"),
    *_for_metrics("config/vllm.py", "VllmConfig", "ec_transfer_config", "whether that way is taken"),
    *(
        Seam(
            "v1/worker/gpu_worker.py",
            f"Worker.{name}",
            names_of(parameters),
            "override",
            "where a step's report is made",
            remove_when=METRICS,
        )
        for name, parameters in {
            "load_model": "self load_dummy_weights",
            "execute_model": "self scheduler_output",
            "sample_tokens": "self grammar_output",
            "compile_or_warm_up_model": "self",
        }.items()
    ),
)
