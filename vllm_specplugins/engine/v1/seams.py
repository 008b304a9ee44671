"""What we touch of Model Runner V1. See compat.py."""

from vllm_specplugins.engine.versions.seam import CUSTOM_CLASS, PARAMETERS, Seam, names_of, verifies, verifies_by

_V1 = "v1/worker/gpu_model_runner.py"
V1: tuple[Seam, ...] = (
    Seam(
        _V1,
        "create_custom_proposer",
        None,
        "swap",
        "vLLM's custom_class slot, for the time in which the runner is built",
        CUSTOM_CLASS,
        "custom_class proposers get request ids, hidden states and events, or V1 is gone",
    ),
    *(
        Seam(_V1, name, None, "swap", "a stage that is built into vLLM has a K of its own, V1")
        for name in ["DFlashProposer", "DraftModelProposer", "EagleProposer", "Gemma4Proposer", "Step3p5MTPProposer"]
    ),
    Seam(
        _V1,
        "GPUModelRunner.propose_draft_token_ids",
        names_of(
            "self scheduler_output sampled_token_ids sampling_metadata hidden_states sample_hidden_states "
            "aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings"
        ),
        "instance",
        "custom_class proposers see token ids only",
        CUSTOM_CLASS,
        "custom_class proposers get what this method gets, or V1 is gone",
    ),
    Seam(
        _V1,
        "GPUModelRunner._update_states",
        names_of("self scheduler_output"),
        "instance",
        "custom_class proposers are not told which requests are gone",
        CUSTOM_CLASS,
        "custom_class proposers get events, or V1 is gone",
    ),
    Seam(
        "v1/worker/gpu_input_batch.py",
        "InputBatch.generators",
        None,
        "instance",
        "a seeded request with a chunked prompt: torch's generators on CPUs have no offset to wind back",
        remove_when="vLLM saves a generator's state, or V1 is gone",
    ),
    Seam(
        _V1,
        "GPUModelRunner.profile_run",
        names_of("self randomize_inputs"),
        "instance",
        "cut bodies are compiled when the target has been, V1",
    ),
    Seam(
        _V1,
        "GPUModelRunner.update_max_model_len",
        names_of("self max_model_len"),
        "instance",
        "the end of drafting, which it sets, is set behind it once more",
        CUSTOM_CLASS,
        "V1 leaves that to the proposer, or V1 is gone",
    ),
    Seam(
        _V1,
        "GPUModelRunner.effective_drafter_max_model_len",
        None,
        "instance",
        "V1 drafts zeros for a whole batch when one request nears the end of its context",
        CUSTOM_CLASS,
        "V1 leaves that to the proposer, or V1 is gone",
    ),
    Seam(
        "v1/sample/rejection_sampler.py",
        "expand_batch_to_tokens",
        names_of("x cu_num_tokens num_tokens replace_from replace_to"),
        "patch",
        "vLLM's CPU kernel leaves the drafted positions' temperature, top-k and top-p uninitialised",
        remove_when="vLLM's _expand_kernel_impl copies its result back",
    ),
    verifies_by(
        _V1, "GPUModelRunner._sample", "self logits spec_decode_metadata", "instance", "our operation samples, V1"
    ),
    Seam(
        _V1,
        "build_logitsprocs",
        None,
        "swap",
        "leaves out min_p, logit_bias and the user's processors under speculation",
        PARAMETERS,
        "vLLM verifies with every sampling parameter",
    ),
    *verifies(_V1, "GPUModelRunner", "sampler", "read", "how logprobs are made"),
    *verifies(
        "v1/worker/gpu_input_batch.py",
        "InputBatch",
        "sampling_metadata logitsprocs thinking_budget_state_holder",
        "read",
        "sampling parameters, V1",
    ),
    *verifies(
        "v1/sample/metadata.py",
        "SamplingMetadata",
        "temperature all_greedy top_p top_k max_num_logprobs no_penalties frequency_penalties "
        "presence_penalties repetition_penalties output_token_ids allowed_token_ids_mask bad_words_token_ids "
        "logitsprocs logprob_token_ids",
        "read",
        "sampling parameters, V1",
    ),
    *verifies(
        "v1/spec_decode/metadata.py", "SpecDecodeMetadata", "draft_token_ids num_draft_tokens", "read", "drafts, V1"
    ),
    *verifies("v1/sample/logits_processor/builtin.py", "MinPLogitsProcessor", "min_p min_p_count", "read", "min_p, V1"),
    *verifies("v1/sample/logits_processor/builtin.py", "LogitBiasLogitsProcessor", "biases", "read", "biases, V1"),
    *verifies("v1/sample/logits_processor/builtin.py", "MinTokensLogitsProcessor", "min_toks", "read", "V1"),
    verifies_by(
        "v1/sample/logits_processor/builtin.py",
        "MinTokensLogitsProcessor.apply_with_spec_decode",
        "self logits num_draft_tokens",
        "read",
        "min_tokens where a grammar leaves stop tokens alone, V1",
    ),
    *verifies(
        "v1/sample/logits_processor/__init__.py", "AdapterLogitsProcessor", "req_info", "read", "who may not draft, V1"
    ),
    *verifies(
        "v1/sample/thinking_budget_state.py",
        "ThinkingBudgetStateHolder",
        "in_spec_mode",
        "instance",
        "requests with a budget have one row, V1",
    ),
    verifies_by(
        "v1/sample/thinking_budget_state.py",
        "ThinkingBudgetStateHolder.update_state",
        "self output_token_ids spec_token_ids repeat_indices",
        "read",
        "thinking budgets, V1",
    ),
    verifies_by(
        "v1/sample/thinking_budget_state.py",
        "ThinkingBudgetStateHolder.apply_to_logits",
        "self logits predict_bonus_token spec_token_ids",
        "read",
        "thinking budgets, V1",
    ),
    *verifies("v1/sample/sampler.py", "Sampler", "logprobs_mode", "read", "logprobs, V1"),
    verifies_by("v1/sample/sampler.py", "Sampler.compute_logprobs", "logits", "read", "logprobs, V1"),
    verifies_by("v1/sample/sampler.py", "Sampler.greedy_sample", "logits", "read", "its kernel for CPUs, V1"),
    verifies_by(
        "v1/sample/sampler.py",
        "Sampler.gather_specific_token_logprobs",
        "self logprobs logprob_token_ids sampled",
        "read",
        "logprobs, V1",
    ),
    verifies_by(
        "v1/sample/sampler.py", "Sampler.gather_logprobs", "logprobs num_logprobs token_ids", "read", "logprobs, V1"
    ),
    Seam(_V1, "GPUModelRunner.input_batch", None, "read", "token ids and request ids"),
    Seam(_V1, "GPUModelRunner.requests", None, "read", "sampling parameters"),
    Seam("v1/worker/gpu_input_batch.py", "InputBatch.num_tokens_no_spec", None, "read", "lengths of histories"),
    Seam("v1/worker/gpu_input_batch.py", "InputBatch.token_ids_cpu", None, "read", "histories"),
    Seam("v1/worker/gpu_input_batch.py", "InputBatch.req_prompt_embeds", None, "read", "rows without token ids"),
    Seam("v1/worker/gpu_input_batch.py", "InputBatch.num_prompt_tokens", None, "read", "where outputs begin"),
    Seam(_V1, "GPUModelRunner._draft_probs", None, "instance", "q of the drafts, V1", CUSTOM_CLASS),
    Seam(_V1, "GPUModelRunner._draft_prob_req_ids", None, "instance", "whose drafts they are, V1", CUSTOM_CLASS),
    Seam(_V1, "GPUModelRunner.attn_groups", None, "read", "attention metadata builders, V1"),
    Seam("v1/worker/block_table.py", "BlockTable.get_device_tensor", names_of("self num_reqs"), "read", "KV pages, V1"),
    Seam(
        "v1/attention/backend.py", "CommonAttentionMetadata.seq_lens_cpu_upper_bound", None, "read", "one draft token"
    ),
    Seam(
        "v1/worker/utils.py",
        "AttentionGroup.build_metadata_for_drafting",
        names_of("self common_attn_metadata draft_index"),
        "read",
        "attention metadata for the target's layers, V1",
    ),
    Seam(
        "v1/worker/utils.py",
        "AttentionGroup.supports_draft_decode_metadata_update",
        names_of("self"),
        "read",
        "metadata made once a step",
    ),
    Seam(
        "v1/worker/utils.py",
        "AttentionGroup.update_draft_decode_metadata",
        names_of("self attn_metadata"),
        "read",
        "metadata made once a step",
    ),
    Seam(_V1, "GPUModelRunner.drafter", None, "read", "the drafter that vLLM built for a stage"),
    Seam(
        "v1/spec_decode/llm_base_proposer.py",
        "SpecDecodeBaseProposer.load_model",
        names_of("self target_model"),
        "instance",
        "hands us the target beside a stage that is built into vLLM, V1",
    ),
    Seam(
        "v1/spec_decode/llm_base_proposer.py",
        "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
        names_of("self sampled_token_ids requests gpu_input_batch discard_request_mask"),
        "read",
        "at the end of a prompt's chunk it takes the prompt's last token for the next one: it is shown another length",
        remove_when="it takes the token behind the chunk, as prepare_next_token_ids_cpu does, or V1 is gone",
    ),
    Seam("v1/attention/backend.py", "CommonAttentionMetadata.max_seq_len", None, "read", "what a drafter can hold, V1"),
)
