"""Provides the services of an engine's tokenizer to tools that run a proposer without an engine."""

from typing import Any


def services(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Returns `tokenize` and `codec` of a `draft.ProposerContext`, from a tokenizer of transformers."""
    from vllm_specplugins.engine.codec import TextCodec

    return {
        "tokenize": lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        "codec": lambda: TextCodec(tokenizer, vocab_size),
    }
