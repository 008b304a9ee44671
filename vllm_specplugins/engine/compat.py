"""The version contract: every name of vLLM that we replace, override or read, in one list that can be checked.

The check reads vLLM's source and imports nothing of it, so it serves an installed vLLM as well as an unpacked
wheel of another version.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SUPPORTED = ">=0.32,<0.34"
_REGISTRY = "https://github.com/vllm-project/vllm/issues/36219"  # RFC: a registry for proposers
_CUSTOM_CLASS = "https://github.com/vllm-project/vllm/pull/39487"  # the custom_class slot of V1


@dataclass(frozen=True, slots=True)
class Seam:
    """One thing of vLLM that we touch.

    Args:
        file: source file below vLLM's package folder.
        name: "function", "Class.method", "Class.attribute" or a module's global name.
        parameters: the names of the function's parameters; None if it is not a function.
        kind: "wrap" (replaced while the plugin is loaded), "patch" (replaced once a method of ours runs),
            "swap" (replaced for the length of one call), "instance" (set on one object), "override" (in a
            subclass of ours), "read".
        why: what we need it for.
        upstream: where vLLM discusses a public way.
        remove_when: what makes this record unnecessary.
    """

    file: str
    name: str
    parameters: tuple[str, ...] | None
    kind: str
    why: str
    upstream: str = _REGISTRY
    remove_when: str = "vLLM has a registry for proposers"


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_PARAMETERS = "https://github.com/vllm-project/vllm/issues/42744"  # min_p and logit_bias under speculation


def _verifies(file: str, owner: str, names: str, kind: str, why: str) -> Iterator[Seam]:
    """Attributes of one class that verification touches."""
    for name in names.split():
        yield Seam(file, f"{owner}.{name}", None, kind, why, _PARAMETERS, "vLLM verifies with every sampling parameter")


def _verifies_by(file: str, name: str, parameters: str, kind: str, why: str) -> Seam:
    """A function that verification touches."""
    end = "vLLM verifies with every sampling parameter"
    return Seam(file, name, _names(parameters), kind, why, _PARAMETERS, end)


_V2 = "v1/worker/gpu/model_runner.py"
_V1 = "v1/worker/gpu_model_runner.py"
SEAMS: tuple[Seam, ...] = (
    Seam(
        "engine/arg_utils.py",
        "EngineArgs.create_speculative_config",
        _names("self target_model_config target_parallel_config"),
        "wrap",
        "returns our SpeculativeConfig for a method of ours",
    ),
    Seam(
        "engine/arg_utils.py",
        "EngineArgs.create_engine_config",
        _names("self usage_context headless"),
        "wrap",
        "reads the user's dictionary first, and puts our worker and scheduler into the result",
    ),
    Seam("engine/arg_utils.py", "EngineArgs.speculative_config", None, "read", "the user's dictionary"),
    Seam("engine/arg_utils.py", "EngineArgs.spec_method", None, "read", "the flag --spec-method"),
    Seam("engine/arg_utils.py", "EngineArgs.spec_model", None, "read", "the flag --spec-model"),
    Seam("engine/arg_utils.py", "EngineArgs.spec_tokens", None, "read", "the flag --spec-tokens"),
    Seam("engine/arg_utils.py", "EngineArgs.async_scheduling", None, "instance", "synchronous unless asked for"),
    Seam(
        "config/vllm.py",
        "NgramGPUTypes",
        None,
        "swap",
        "one of the names that vLLM's check of asynchronous scheduling accepts",
    ),
    Seam("config/vllm.py", "VllmConfig.use_v2_model_runner", _names("self"), "read", "which adapter to use"),
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
        _names("self"),
        "override",
        "our methods have no model",
    ),
    Seam("config/speculative.py", "SpeculativeConfig.draft_model_config", None, "instance", "the target's own"),
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
    Seam("v1/worker/gpu_worker.py", "Worker.init_device", _names("self"), "override", "builds the model runner"),
    Seam(
        "v1/worker/cpu_worker.py",
        "CPUWorker.init_device",
        _names("self"),
        "override",
        "builds the model runner",
    ),
    Seam(
        _V1,
        "create_custom_proposer",
        None,
        "swap",
        "vLLM's custom_class slot, for the time in which the runner is built",
        _CUSTOM_CLASS,
        "custom_class proposers get request ids, hidden states and events, or V1 is gone",
    ),
    Seam(
        _V1,
        "GPUModelRunner.propose_draft_token_ids",
        _names(
            "self scheduler_output sampled_token_ids sampling_metadata hidden_states sample_hidden_states "
            "aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings"
        ),
        "instance",
        "custom_class proposers see token ids only",
        _CUSTOM_CLASS,
        "custom_class proposers get what this method gets, or V1 is gone",
    ),
    Seam(
        _V1,
        "GPUModelRunner._update_states",
        _names("self scheduler_output"),
        "instance",
        "custom_class proposers are not told which requests are gone",
        _CUSTOM_CLASS,
        "custom_class proposers get events, or V1 is gone",
    ),
    Seam(
        _V1,
        "GPUModelRunner.effective_drafter_max_model_len",
        None,
        "instance",
        "V1 drafts zeros for a whole batch when one request nears the end of its context",
        _CUSTOM_CLASS,
        "V1 leaves that to the proposer, or V1 is gone",
    ),
    Seam(
        "v1/sample/rejection_sampler.py",
        "expand_batch_to_tokens",
        _names("x cu_num_tokens num_tokens replace_from replace_to"),
        "patch",
        "vLLM's CPU kernel leaves the drafted positions' temperature, top-k and top-p uninitialised",
        remove_when="vLLM's _expand_kernel_impl copies its result back",
    ),
    _verifies_by(
        "sampling_params.py",
        "SamplingParams._validate_spec_decode",
        "self speculative_config",
        "patch",
        "refuses min_p and logit_bias under speculation; checks our options of a request",
    ),
    _verifies_by(
        _V1, "GPUModelRunner._sample", "self logits spec_decode_metadata", "instance", "our operation samples, V1"
    ),
    Seam(
        _V1,
        "build_logitsprocs",
        None,
        "swap",
        "leaves out min_p, logit_bias and the user's processors under speculation",
        _PARAMETERS,
        "vLLM verifies with every sampling parameter",
    ),
    *_verifies(_V1, "GPUModelRunner", "sampler", "read", "how logprobs are made"),
    *_verifies(
        "v1/worker/gpu_input_batch.py",
        "InputBatch",
        "sampling_metadata logitsprocs thinking_budget_state_holder",
        "read",
        "sampling parameters, V1",
    ),
    *_verifies(
        "v1/sample/metadata.py",
        "SamplingMetadata",
        "temperature all_greedy top_p top_k max_num_logprobs no_penalties prompt_token_ids frequency_penalties "
        "presence_penalties repetition_penalties output_token_ids allowed_token_ids_mask bad_words_token_ids "
        "logitsprocs logprob_token_ids",
        "read",
        "sampling parameters, V1",
    ),
    *_verifies(
        "v1/spec_decode/metadata.py", "SpecDecodeMetadata", "draft_token_ids num_draft_tokens", "read", "drafts, V1"
    ),
    *_verifies(
        "v1/sample/logits_processor/builtin.py", "MinPLogitsProcessor", "min_p min_p_count", "read", "min_p, V1"
    ),
    *_verifies("v1/sample/logits_processor/builtin.py", "LogitBiasLogitsProcessor", "biases", "read", "biases, V1"),
    *_verifies("v1/sample/logits_processor/builtin.py", "MinTokensLogitsProcessor", "min_toks", "read", "V1"),
    _verifies_by(
        "v1/sample/logits_processor/builtin.py",
        "MinTokensLogitsProcessor.apply_with_spec_decode",
        "self logits num_draft_tokens",
        "read",
        "min_tokens by position, V1",
    ),
    *_verifies(
        "v1/sample/logits_processor/__init__.py", "AdapterLogitsProcessor", "req_info", "read", "who may not draft, V1"
    ),
    _verifies_by(
        "v1/sample/ops/bad_words.py",
        "apply_bad_words_with_drafts",
        "logits bad_words_token_ids past_tokens_ids num_draft_tokens",
        "read",
        "bad words by position, V1",
    ),
    _verifies_by(
        "v1/sample/ops/penalties.py",
        "apply_all_penalties",
        "logits prompt_token_ids presence_penalties frequency_penalties repetition_penalties output_token_ids",
        "read",
        "penalties by position, V1",
    ),
    *_verifies(
        "v1/sample/thinking_budget_state.py",
        "ThinkingBudgetStateHolder",
        "in_spec_mode",
        "instance",
        "requests with a budget have one row, V1",
    ),
    _verifies_by(
        "v1/sample/thinking_budget_state.py",
        "ThinkingBudgetStateHolder.update_state",
        "self output_token_ids spec_token_ids repeat_indices",
        "read",
        "thinking budgets, V1",
    ),
    _verifies_by(
        "v1/sample/thinking_budget_state.py",
        "ThinkingBudgetStateHolder.apply_to_logits",
        "self logits predict_bonus_token spec_token_ids",
        "read",
        "thinking budgets, V1",
    ),
    *_verifies("v1/sample/sampler.py", "Sampler", "logprobs_mode compute_logprobs", "read", "logprobs, V1"),
    _verifies_by("v1/sample/sampler.py", "Sampler.greedy_sample", "logits", "read", "its kernel for CPUs, V1"),
    _verifies_by(
        "v1/sample/sampler.py",
        "Sampler.gather_specific_token_logprobs",
        "self logprobs logprob_token_ids sampled",
        "read",
        "logprobs, V1",
    ),
    _verifies_by(
        "v1/sample/sampler.py", "Sampler.gather_logprobs", "logprobs num_logprobs token_ids", "read", "logprobs, V1"
    ),
    Seam(_V2, "init_model_state", None, "swap", "ModelState.custom_sampler is the way to samplers of one's own"),
    Seam(_V2, "GPUModelRunner.load_model", None, "instance", "makes the model state"),
    _verifies_by(
        "v1/worker/gpu/model_states/interface.py",
        "ModelState.custom_sampler",
        "self sampler",
        "instance",
        "documented: samplers of one's own, V2",
    ),
    _verifies_by(
        "v1/worker/gpu/spec_decode/rejection_sampler.py",
        "RejectionSampler._verify",
        "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np expanded_idx_mapping "
        "expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled",
        "override",
        "our operation verifies, V2",
    ),
    _verifies_by(
        "v1/worker/gpu/spec_decode/rejection_sampler.py",
        "RejectionSampler._get_logprobs_tensors",
        "self sampled num_sampled logits cu_num_logits cu_num_logits_np max_num_logprobs",
        "override",
        "logprob_token_ids, which are forgotten under speculation, V2",
    ),
    _verifies_by(
        "v1/worker/gpu/spec_decode/rejection_sampler.py",
        "_flatten_sampled_kernel",
        "flat_sampled_ptr sampled_ptr sampled_stride num_sampled_ptr cu_num_logits_ptr",
        "read",
        "logprobs, V2",
    ),
    _verifies_by(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.sample",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np return_logprobs",
        "instance",
        "our operation samples, V2",
    ),
    _verifies_by(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.add_request",
        "self req_idx sampling_params",
        "instance",
        "who needs more than the operation does, V2",
    ),
    _verifies_by(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.apply_sampling_params",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np skip_top_k_top_p",
        "read",
        "processed logprobs, V2",
    ),
    _verifies_by(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.get_logprobs_dims",
        "self idx_mapping_np include_token_ids",
        "read",
        "processed logprobs, V2",
    ),
    *_verifies(
        "v1/worker/gpu/sample/sampler.py",
        "Sampler",
        "logits_processors thinking_budget_state sampling_states return_sampling_mask logprob_token_ids_state",
        "read",
        "sampling parameters, V2",
    ),
    *_verifies(
        "v1/worker/gpu/sample/states.py",
        "SamplingStates",
        "temperature top_k top_p min_p seeds max_num_reqs vocab_size",
        "read",
        "sampling parameters, V2",
    ),
    *_verifies(
        "v1/worker/gpu/sample/logits_processor/interface.py",
        "LogitsContext",
        "expanded_idx_mapping idx_mapping idx_mapping_np expanded_local_pos input_ids pos seq_lens_upper_bound_np",
        "read",
        "what the processors see, V2",
    ),
    _verifies_by(
        "v1/worker/gpu/sample/logprob.py",
        "compute_topk_scores",
        "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state expanded_idx_mapping "
        "max_per_req_token_ids logits_mode",
        "read",
        "logprobs, V2",
    ),
    _verifies_by(
        "v1/worker/gpu/sample/logprob.py",
        "LogprobTokenIdsState.max_num_token_ids",
        "self idx_mapping_np",
        "read",
        "logprobs, V2",
    ),
    Seam(_V1, "GPUModelRunner.input_batch", None, "read", "token ids and request ids"),
    Seam(_V1, "GPUModelRunner.requests", None, "read", "sampling parameters"),
    Seam("v1/worker/gpu_input_batch.py", "InputBatch.num_tokens_no_spec", None, "read", "lengths of histories"),
    Seam("v1/worker/gpu_input_batch.py", "InputBatch.token_ids_cpu", None, "read", "histories"),
    Seam(_V2, "init_speculator", None, "swap", "V2's list of speculators is closed"),
    Seam(
        _V2,
        "GPUModelRunner.add_requests",
        _names("self scheduler_output"),
        "instance",
        "histories start here",
    ),
    Seam(
        _V2,
        "GPUModelRunner.finish_requests",
        _names("self scheduler_output"),
        "instance",
        "histories end here",
    ),
    Seam(
        _V2,
        "GPUModelRunner.sample_tokens",
        _names("self grammar_output"),
        "instance",
        "reports true draft lengths to our scheduler",
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
        _names(
            "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled "
            "num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run "
            "skip_attn_for_dummy_run mm_inputs is_profile num_speculative_tokens"
        ),
        "override",
        "the interface of V2's speculators",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/utils.py",
        "DraftTokensHandler.get_draft_tokens",
        _names("self"),
        "override",
        "V2 reports K for every request",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/utils.py",
        "DraftTokensHandler.set_draft_tokens",
        _names("self input_batch draft_tokens"),
        "override",
        "V2 reports K for every request",
    ),
    Seam(
        "v1/worker/gpu/async_utils.py",
        "AsyncOutput.model_runner_output",
        None,
        "instance",
        "carries the report",
    ),
    Seam(
        "v1/core/sched/async_scheduler.py",
        "AsyncScheduler._update_after_schedule",
        _names("self scheduler_output"),
        "override",
        "plans K drafts for every request before they exist",
    ),
    Seam(
        "v1/core/sched/scheduler.py",
        "Scheduler.update_from_output",
        _names("self scheduler_output model_runner_output"),
        "override",
        "receives the worker's report",
    ),
    Seam(
        "config/vllm.py",
        "VllmConfig.num_lookahead_tokens",
        _names("self"),
        "override",
        "slots of the KV cache past the last token, for methods that run the target's layers",
        remove_when="SpeculativeConfig says how many slots its method needs",
    ),
    Seam("config/vllm.py", "VllmConfig.num_speculative_tokens", _names("self"), "read", "K"),
    Seam("config/speculative.py", "SpeculativeConfig.draft_sample_method", None, "read", "whether V2 keeps q"),
    Seam("config/model.py", "ModelConfig.has_inner_state", _names("self"), "read", "targets that cannot be cut"),
    Seam("config/model.py", "ModelConfig.uses_mrope", _names("self"), "read", "targets that cannot be cut"),
    Seam(_V1, "GPUModelRunner._draft_probs", None, "instance", "q of the drafts, V1", _CUSTOM_CLASS),
    Seam(_V1, "GPUModelRunner._draft_prob_req_ids", None, "instance", "whose drafts they are, V1", _CUSTOM_CLASS),
    Seam(_V1, "GPUModelRunner.attn_groups", None, "read", "attention metadata builders, V1"),
    Seam("v1/worker/block_table.py", "BlockTable.get_device_tensor", _names("self num_reqs"), "read", "KV pages, V1"),
    Seam(
        "v1/attention/backend.py", "CommonAttentionMetadata.seq_lens_cpu_upper_bound", None, "read", "one draft token"
    ),
    Seam(
        "v1/worker/utils.py",
        "AttentionGroup.build_metadata_for_drafting",
        _names("self common_attn_metadata draft_index"),
        "read",
        "attention metadata for the target's layers, V1",
    ),
    Seam(
        "v1/worker/utils.py",
        "AttentionGroup.supports_draft_decode_metadata_update",
        _names("self"),
        "read",
        "metadata made once a step",
    ),
    Seam(
        "v1/worker/utils.py",
        "AttentionGroup.update_draft_decode_metadata",
        _names("self attn_metadata"),
        "read",
        "metadata made once a step",
    ),
    Seam(
        "model_executor/layers/logits_processor.py",
        "LogitsProcessor.get_top_tokens",
        _names("self lm_head hidden_states embedding_bias"),
        "read",
        "an argmax whose logits tensor-parallel ranks need not gather",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator._copy_request_inputs",
        _names("self num_reqs idx_mapping temperature seeds dummy_run"),
        "read",
        "rows of the request states, where a graph finds them",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator._update_draft_decode_metadata",
        _names("self attn_metadata num_reqs"),
        "read",
        "metadata made once a step",
    ),
    Seam("v1/worker/gpu/spec_decode/speculator.py", "DraftModelSpeculator.draft_logits", None, "instance", "q, V2"),
    Seam(
        "v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py",
        "SpeculatorCudaGraphManager.capture",
        _names(
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
        _names("self target_model target_attn_layer_names"),
        "override",
        "hands us the target",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator.set_attn",
        _names("self model_state kv_cache_config block_tables target_input_buffers target_attn_groups"),
        "override",
        "attention metadata builders, V2",
    ),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator._build_uniform_attn_metadata",
        _names("self batch_desc num_reqs num_query_per_req seq_lens_cpu_upper_bound step causal dcp_local_seq_lens"),
        "read",
        "attention metadata for the target's layers, V2",
    ),
    Seam(
        "v1/worker/gpu/attn_utils.py",
        "build_slot_mappings_by_layer",
        None,
        "read",
        "where a token's KV goes, V2",
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
        _CUSTOM_CLASS,
        "V1 is gone",
    ),
    Seam(_V1, "GPUModelRunner.drafter", None, "read", "the drafter that vLLM built for a stage"),
    Seam(
        "v1/spec_decode/llm_base_proposer.py",
        "SpecDecodeBaseProposer.load_model",
        _names("self target_model"),
        "instance",
        "hands us the target beside a stage that is built into vLLM, V1",
    ),
    Seam(
        "v1/spec_decode/llm_base_proposer.py",
        "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
        _names("self sampled_token_ids requests gpu_input_batch discard_request_mask"),
        "read",
        "at the end of a prompt's chunk it takes the prompt's last token for the next one: it is shown another length",
        remove_when="it takes the token behind the chunk, as prepare_next_token_ids_cpu does, or V1 is gone",
    ),
    Seam("v1/attention/backend.py", "CommonAttentionMetadata.max_seq_len", None, "read", "what a drafter can hold, V1"),
    Seam(
        "v1/worker/gpu/spec_decode/speculator.py",
        "DraftModelSpeculator.load_model",
        _names("self target_model"),
        "instance",
        "hands us the target beside a stage that is built into vLLM, V2",
    ),
    Seam("forward_context.py", "set_forward_context", None, "read", "the context in which attention layers run"),
    Seam("v1/outputs.py", "DraftTokenIds.draft_token_ids", None, "read", "ragged lists are allowed"),
    Seam("distributed/parallel_state.py", "get_tp_group", (), "read", "rank 0 drafts for all"),
    Seam("tokenizers/__init__.py", "cached_tokenizer_from_config", None, "read", "reference texts"),
)


@cache
def probe_installed() -> tuple[str, ...]:
    """What the installed vLLM lacks of SEAMS, one sentence each; empty if we can run on it."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ("vLLM is not installed",)
    return tuple(probe(Path(spec.submodule_search_locations[0])))


def probe(package: Path) -> Iterator[str]:
    """Checks SEAMS against the source of vLLM in the folder `package`; yields a sentence for each that fails."""
    modules: dict[str, ast.Module | None] = {}
    for seam in SEAMS:
        if seam.file not in modules:
            path = package / seam.file
            modules[seam.file] = ast.parse(path.read_text()) if path.is_file() else None
        module = modules[seam.file]
        where = f"vllm/{seam.file}: {seam.name}"
        if module is None or (found := _find(module, seam.name)) is None:
            yield f"{where} is missing; supported is vLLM {SUPPORTED}"
        elif seam.parameters is not None:
            parameters = _parameters(found)
            if parameters != seam.parameters:
                wanted = ", ".join(seam.parameters)
                yield f"{where} does not take ({wanted}); supported is vLLM {SUPPORTED}"


def _find(module: ast.Module, name: str) -> ast.AST | None:
    """The node that binds `name` in a module, or a method or attribute in one of its classes."""
    owner, _, member = name.rpartition(".")
    if not owner:
        return _binding(ast.walk(module), member)
    scope = next((node for node in module.body if isinstance(node, ast.ClassDef) and node.name == owner), None)
    return None if scope is None else _binding(ast.walk(scope), member)


def _binding(nodes: Iterator[ast.AST], name: str) -> ast.AST | None:
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                return node
            case ast.alias() if (node.asname or node.name) == name:
                return node
            case ast.Name(ctx=ast.Store()) if node.id == name:
                return node
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self")) if node.attr == name:
                return node
    return None


def _parameters(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = node.args
    return tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
