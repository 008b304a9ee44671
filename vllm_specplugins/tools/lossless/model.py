"""Makes a tiny Llama with random weights, and computes the exact distribution of its first tokens under sampling
parameters. Its first layer approximates both layers reasonably well. Its distributions are far from uniform and differ
between contexts, so wrong sampling becomes visible. All outcomes are enumerated, with the parameters applied in float64
and in vLLM's order. R: rows, V: vocab_size, t: tokens of an outcome."""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
from vllm_specplugins.proposers.heads.look_ahead import LookAhead, LookAheadConfig

VOCAB_SIZE = 10
MAX_MODEL_LEN = 64
HIDDEN_SIZE, NUM_LAYERS = 64, 2
Params = Mapping[str, Any]  # keyword arguments of vLLM's SamplingParams


def write_checkpoint(folder: Path, seed: int) -> LlamaForCausalLM:
    """Writes the model of this seed into a folder, without a tokenizer."""
    logging.disable_progress_bar()
    model = make_model(seed)
    model.save_pretrained(folder)
    return model


def write_parts(folder: Path, seed: int) -> None:
    """Writes a `jump` and a `look_ahead` with random weights, and a `draft_model` and an `eagle` from the first
    layer."""
    model, generator = make_model(seed), torch.Generator().manual_seed(seed)
    _write_eagle(folder / "eagle", model)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    model.save_pretrained(folder / "draft_model")
    config = JumpHeadConfig(
        early_layers=1, late_layer=1, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE, inner_size=8, rms_norm_eps=1e-6
    )
    shapes = JumpHead(config).state_dict()
    weights = {name: 0.05 * torch.randn(like.shape, generator=generator) for name, like in shapes.items()}
    JumpHead(config, weights | {"norm.weight": torch.ones(HIDDEN_SIZE)}).save(folder / "jump")
    embeddings = {"embeddings.weight": 0.2 * torch.randn(1, HIDDEN_SIZE, generator=generator)}
    ahead = LookAheadConfig(exit_layer=1, hidden_size=HIDDEN_SIZE, num_embeddings=1)
    LookAhead(ahead, embeddings).save(folder / "look_ahead")


def _write_eagle(folder: Path, model: LlamaForCausalLM) -> None:
    folder.mkdir()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    same, parts = torch.eye(HIDDEN_SIZE), model.model.layers[0].state_dict()
    weights = {f"layers.0.{name}": part for name, part in parts.items() if not name.startswith("input_layernorm")}
    weights["fc.weight"] = torch.cat((same, 0.1 * same), dim=1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def make_model(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest size that vLLM's CPU attention supports
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.3 if name.startswith("lm_head") else 0.2, generator=generator)
    return model.eval()


class ExactModel:
    """The probabilities of all outcomes of `num_tokens` tokens after a prompt, from a causal model in transformers."""

    def __init__(self, model: Any, num_tokens: int):
        self._model, self._vocab_size, self._num_tokens = model, int(model.config.vocab_size), num_tokens
        self._logits: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def joint(self, prompt: Sequence[int], params: Params, slack: float = 0.0) -> NDArray[np.float64]:
        """Returns the probability of each outcome, [V] * t, in which a stop token repeats to the end. A token stays if
        it misses a cut (min-p, top-k, top-p) by at most the share `slack`."""
        joint = torch.ones((), dtype=torch.float64)
        for length, logits in enumerate(self._prefix_logits(tuple(prompt))):
            prefixes = self._prefixes(length)
            probs = next_probs(logits, prompt, prefixes, params, slack)
            for stop in params.get("stop_token_ids", ()):
                probs[(prefixes == stop).any(-1)] = torch.eye(self._vocab_size, dtype=torch.float64)[stop]
            joint = joint[..., None] * probs.reshape([self._vocab_size] * (length + 1))
        return joint.numpy()

    def _prefixes(self, length: int) -> torch.Tensor:
        """Returns all prefixes in order, [V ** length, length]."""
        return torch.tensor(list(product(range(self._vocab_size), repeat=length)), dtype=torch.long)

    def _prefix_logits(self, prompt: tuple[int, ...]) -> list[torch.Tensor]:
        """Yields, for each length below t, the logits [V ** length, V] after all prefixes of this length."""
        if prompt not in self._logits:
            prefixes = self._prefixes(self._num_tokens - 1)
            sequences = torch.cat([torch.tensor(prompt).expand(len(prefixes), -1), prefixes], dim=1)
            with torch.inference_mode():
                logits = self._model(sequences).logits[:, len(prompt) - 1 :].double()
            steps = [self._vocab_size**later for later in reversed(range(self._num_tokens))]
            self._logits[prompt] = [logits[::step, length] for length, step in enumerate(steps)]
        return self._logits[prompt]


def next_probs(
    logits: torch.Tensor,  # [R, V] float64
    prompt: Sequence[int],
    prefixes: torch.Tensor,  # [R, length]: the output so far
    params: Params,
    slack: float = 0.0,
) -> torch.Tensor:
    """Returns the probabilities of the next token, [R, V].

    >>> logits = torch.tensor([[1.0, 2.0, 3.0]]).double()
    >>> next_probs(logits, [0], torch.tensor([[2]]), {"presence_penalty": 9, "top_k": 1})
    tensor([[0., 1., 0.]], dtype=torch.float64)
    """
    logits = _penalise(_edit(logits.clone(), prefixes.shape[1], params), prompt, prefixes, params)
    temperature = params.get("temperature", 1.0)
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return _truncate(torch.softmax(logits / temperature, -1), params, slack)


def _edit(logits: torch.Tensor, length: int, params: Params) -> torch.Tensor:
    if allowed := params.get("allowed_token_ids"):
        logits[:, [token for token in range(logits.shape[-1]) if token not in allowed]] = -torch.inf
    for token, bias in params.get("logit_bias", {}).items():
        logits[:, int(token)] += bias
    if length < params.get("min_tokens", 0):
        logits[:, params["stop_token_ids"]] = -torch.inf
    return logits


def _penalise(logits: torch.Tensor, prompt: Sequence[int], prefixes: torch.Tensor, params: Params) -> torch.Tensor:
    counts = torch.zeros_like(logits).scatter_add_(1, prefixes, torch.ones_like(prefixes, dtype=logits.dtype))
    seen = counts > 0
    seen[:, list(prompt)] = True
    repetition = params.get("repetition_penalty", 1.0)
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return (
        logits
        - params.get("frequency_penalty", 0.0) * counts
        - params.get("presence_penalty", 0.0) * (counts > 0).double()
    )


def _truncate(probs: torch.Tensor, params: Params, slack: float) -> torch.Tensor:
    if min_p := params.get("min_p", 0.0):
        probs = torch.where(probs >= (1 - slack) * min_p * probs.amax(-1, keepdim=True), probs, 0)
    if (top_k := params.get("top_k", 0)) > 0:
        probs = torch.where(probs >= (1 - slack) * probs.topk(top_k).values[:, -1:], probs, 0)
    probs = probs / probs.sum(-1, keepdim=True)
    if (top_p := params.get("top_p", 1.0)) < 1:
        ordered, order = probs.sort(-1, descending=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered < (1 + slack) * top_p, ordered, 0)
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
    return probs / probs.sum(-1, keepdim=True)
