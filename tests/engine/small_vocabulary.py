"""A model whose vocabulary is so small that the distribution of its next three tokens can be enumerated."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 12
PROMPT = [3, 7, 1, 0, 5, 11, 2]
TEMPERATURE = 0.8
TOP_P = 0.9


def write_checkpoint(folder: Path) -> Path:
    """Two layers of which the first is a poor guess at both."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def exact_probs(
    checkpoint: Path, top_p: float = TOP_P, temperature: float = TEMPERATURE, prompt: list[int] = PROMPT
) -> np.ndarray:
    """[VOCAB_SIZE ** 3] probability of each three tokens, by enumeration."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    triples = torch.cartesian_prod(*[torch.arange(VOCAB_SIZE)] * 3)
    sequences = torch.cat((torch.tensor(prompt).expand(len(triples), -1), triples), dim=1)
    with torch.inference_mode():
        logits = model(sequences).logits[:, len(prompt) - 1 : -1].double()
    kept = kept_probs(torch.softmax(logits / temperature, dim=-1), top_p)
    return kept.gather(-1, triples[..., None])[..., 0].prod(dim=-1).numpy()


def kept_probs(probs: torch.Tensor, top_p: float = TOP_P) -> torch.Tensor:
    """Probabilities after top-p."""
    ordered, order = probs.sort(dim=-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    return torch.zeros_like(probs).scatter_(-1, order, ordered / ordered.sum(-1, keepdim=True))


def sampled(
    llm: Any, *num_samples: int, top_p: float = TOP_P, temperature: float = TEMPERATURE, prompt: list[int] = PROMPT
) -> np.ndarray:
    """[VOCAB_SIZE ** 3] how often each three tokens come up, of batches of so many samples.

    A request's last token is never drafted: a fourth one is asked for, and left out.
    """
    from vllm import SamplingParams

    outputs: list[list[int]] = []
    for number in num_samples:
        params = SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=4, n=number, ignore_eos=True, detokenize=False
        )
        [result] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        outputs += [list(output.token_ids[:3]) for output in result.outputs]
    return np.bincount(np.array(outputs) @ [VOCAB_SIZE**2, VOCAB_SIZE, 1], minlength=VOCAB_SIZE**3)


def answered(
    llm: Any, asked: list[dict[str, Any]], prompts: list[list[int]] | None = None, **common: Any
) -> list[list[int]]:
    """What requests with these parameters say, seeded by their place but for what they say; "words" are bad ones."""
    from vllm import SamplingParams

    common = {"max_tokens": 13, "ignore_eos": True, "detokenize": False, **common}
    params = []
    for seed, own in enumerate(asked):
        own = {"seed": seed, **common, **own}
        words = own.pop("words", None)
        params.append(SamplingParams(**own))
        params[-1]._bad_words_token_ids = words
    tokens = [{"prompt_token_ids": prompt} for prompt in prompts or [PROMPT] * len(params)]
    return [list(result.outputs[0].token_ids) for result in llm.generate(tokens, params, use_tqdm=False)]


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-squared; outcomes that are expected fewer than ten times are one cell. Impossible ones must not occur."""
    assert not counts[probs == 0].any()
    common = probs * counts.sum() >= 10
    cells = np.append(counts[common], counts[~common].sum())
    return chisquare(cells, np.append(probs[common], probs[~common].sum()) * counts.sum()).pvalue
