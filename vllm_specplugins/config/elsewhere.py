"""Settings of other engines, and what they are called here; for refusals, and docs/from-elsewhere.md."""

from collections.abc import Iterable

# Theirs, without dashes before it -> whose it is, and names of ours, of which a method has one.
ELSEWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_lookup_max": ("vLLM", ("max_ngram",)),
    "prompt_lookup_min": ("vLLM", ("min_ngram",)),
    "suffix_decoding_max_cached_requests": ("vLLM", ("store_bytes",)),
    "suffix_decoding_min_token_prob": ("vLLM", ("min_confidence",)),
    "suffix_decoding_max_tree_depth": ("vLLM", ("num_speculative_tokens",)),
    "prompt_lookup_num_tokens": ("transformers", ("num_speculative_tokens",)),
    "num_assistant_tokens": ("transformers", ("num_speculative_tokens",)),
    "max_matching_ngram_size": ("transformers", ("max_ngram",)),
    "assistant_early_exit": ("transformers", ("exit_layer",)),
    "draft_max": ("llama.cpp", ("num_speculative_tokens",)),
    "draft_min": ("llama.cpp", ("min_ngram", "num_speculative_tokens")),
    "draft_p_min": ("llama.cpp", ("min_confidence", "gate")),
    "speculative_num_draft_tokens": ("SGLang", ("num_speculative_tokens",)),
    "speculative_num_steps": ("SGLang", ("num_speculative_tokens",)),
    "NGRAM": ("SGLang", ("prompt_lookup",)),
}


def name_here(name: object, names: Iterable[str]) -> str | None:
    """A sentence about another engine's name, if one of `names` stands for it.

    >>> name_here("prompt_lookup_max", ["max_ngram", "min_ngram"])
    "prompt_lookup_max is vLLM's; here it is max_ngram"
    """
    whose, ours = ELSEWHERE.get(str(name).lstrip("-").replace("-", "_"), ("", ()))
    found = next((own for own in ours if own in set(names)), None)
    return found and f"{name} is {whose}'s; here it is {found}"
