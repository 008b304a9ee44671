"""Runs the served model in transformers, frozen and without vLLM, and returns states after its layers and logits of its
head. T: tokens, H: hidden size, V: vocabulary, L: layers."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from vllm_specplugins.config import ConfigError, brief, error_text
from vllm_specplugins.proposers.heads.norm import effective_norm_weight

Run = Callable[..., torch.Tensor]  # of states, and a step


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A causal language model with a final RMSNorm and a head after its layers."""

    model: Any  # a model of transformers, in eval mode and without gradients
    dtype: torch.dtype  # dtype of the stored checkpoint
    norm_weight: torch.Tensor  # [H] float32, factor of the final norm (for Gemma, one more than its parameter)
    norm_eps: float  # of the final norm

    @classmethod
    def load(cls, path: str, device: str) -> "BaseModel":
        """Loads a checkpoint from a path or a Hugging Face name, in float32 on a CPU, otherwise in the checkpoint's
        dtype. Raises ConfigError if there is no checkpoint, or if it has no final RMSNorm."""
        logging.disable_progress_bar()
        model = _from_pretrained(AutoModelForCausalLM, path, dtype="auto")
        dtype = model.dtype
        model = model.to(device, torch.float32 if device == "cpu" else dtype).eval().requires_grad_(False)
        norm = getattr(model.base_model, "norm", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        like = model.get_input_embeddings().weight[0]
        weight = effective_norm_weight(norm, like, float(eps)) if norm is not None and eps else None
        if weight is None or model.get_output_embeddings() is None:
            raise ConfigError(f"MODEL must be one that ends in an RMSNorm and a head, not a {type(model).__name__}.")
        return cls(model, dtype, weight, float(eps or 0))

    @property
    def num_layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return len(self.norm_weight)

    @property
    def head_weight(self) -> torch.Tensor:
        """Returns the weight of the head, [V, H]."""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def hidden_states(self, rows: Sequence[Sequence[int]]) -> Iterator[list[torch.Tensor]]:
        """Yields, for each row of token ids, the states after 0 to L layers: L + 1 tensors [T, H], the last one
        normed."""
        tensors = [torch.tensor(row) for row in rows]
        # Attention is causal, so padding at the end affects no earlier token.
        batch = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(self.model.device)
        states = self.model.base_model(batch, output_hidden_states=True, use_cache=False).hidden_states
        for index, row in enumerate(rows):
            yield [state[index, : len(row)] for state in states]

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Returns logits [T, V] float32 of normed hidden states [T, H], as the model computes them after its layers."""
        layers, normed = self.model.base_model, normed.to(self.head_weight.dtype)
        layers.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=normed[None])
        try:
            token_ids = torch.zeros(1, len(normed), dtype=torch.long, device=normed.device)
            logits: torch.Tensor = self.model(token_ids, use_cache=False).logits[0].float()
        finally:
            del layers.forward  # it hides the method of the class
        return logits

    @torch.no_grad()
    def generate(
        self, prompts: torch.Tensor, num_tokens: int, choose: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> list[list[int]]:
        """Continues prompts [N, T] int64, each up to an end token or to `num_tokens` in total, and returns them with
        their continuations. `choose` picks the next tokens [N] from their logits [N, V] and their position."""
        cache, rows, fed = DynamicCache(), prompts, prompts
        for position in range(prompts.shape[1], num_tokens):
            states = self.model.base_model(fed, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
            fed = choose(self.logits(states), position)[:, None]
            rows = torch.cat((rows, fed), dim=1)
        ends, begin = self.model.generation_config.eos_token_id, prompts.shape[1]
        stops = {ends} if isinstance(ends, int) else set(ends or ())
        return [
            row[: next((end + 1 for end in range(begin, len(row)) if row[end] in stops), len(row))]
            for row in rows.tolist()
        ]

    def passes(self, first: int, num_tokens: int, end: int | None = None, normed: bool = True) -> Run:
        """Returns a function that runs the layers [first, end), or all from `first` on, over a row, once for each draft
        token. It maps states [T, H] before the layers to states after them: states of the text in step 0, and then
        states of draft tokens at the text's places. Step k sees the text up to k tokens before a token, and then the
        tokens of steps 1 to k."""
        layers = range(first, self.num_layers if end is None else end)
        return self._passes(self.cut(layers, normed), num_tokens, DynamicCache())

    def text_cache(self, states: torch.Tensor) -> DynamicCache:
        """Returns the keys and values of a text in all layers, from its states [T, H] before the first layer."""
        cache = DynamicCache()
        self.model.base_model(inputs_embeds=states[None], past_key_values=cache, use_cache=True)
        return cache

    def passes_beside(self, layers: Sequence[int], text: DynamicCache, first: int = 0, normed: bool = True) -> Run:
        """Does the same as `passes` for layers with any indices, over the tokens from `first` on. The text already has
        the keys and values of the whole model, so steps begin with 1."""
        cache = copy.copy(text)
        cache.layers = [copy.copy(layer) for layer in text.layers]  # the layer of a step has new tensors
        return self._passes(self.cut(layers, normed), text.get_seq_length(), cache, first)

    def _passes(self, body: Any, num_tokens: int, cache: DynamicCache, first: int = 0) -> Run:
        like = next(body.parameters())
        positions = torch.arange(num_tokens, device=like.device)
        distance = positions[first:, None] - positions  # distance from a key to a query

        def run(states: torch.Tensor, step: int = 0) -> torch.Tensor:
            seen = [distance >= step, *(distance[:, first:] == step - earlier for earlier in range(1, step + 1))]
            allowed = torch.cat(seen, dim=1)[None, None]
            mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
            mask.masked_fill_(~allowed, torch.finfo(like.dtype).min)
            output = body(
                inputs_embeds=states.to(like.dtype)[None],
                attention_mask=mask,
                position_ids=positions[None, first:],
                past_key_values=cache,
            )
            return output.last_hidden_state[0].float()

        return run

    def cut(self, layers: Sequence[int], normed: bool = True) -> Any:
        """Returns the model's body with only the layers of these indices; the weights are shared."""
        body = copy.copy(self.model.base_model)
        parts = {"layers": torch.nn.ModuleList([body.layers[layer] for layer in layers])}
        parts |= {} if normed else {"norm": torch.nn.Identity()}
        body._modules = {**body._modules, **parts}
        body.config = copy.copy(body.config)
        body.config.num_hidden_layers = len(layers)
        if kinds := getattr(body.config, "layer_types", None):  # bodies look up each layer's kind by its place
            body.config.layer_types = [kinds[layer] for layer in layers]
        return body


def overlap(full_logits: torch.Tensor, exit_logits: torch.Tensor) -> torch.Tensor:
    """Returns the sum of min(p, q), [T]: the acceptance probability at temperature 1 of a token drawn from the exit
    (Leviathan et al. 2023).

    >>> overlap(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -torch.inf]]))
    tensor([0.5000])
    """
    return torch.minimum(full_logits.softmax(-1), exit_logits.softmax(-1)).sum(-1)


def load_tokenizer(path: str) -> Any:
    """Returns the tokenizer of a checkpoint. Raises ConfigError if it has none."""
    return _from_pretrained(AutoTokenizer, path)


def load_config(path: str) -> Any:
    """Returns the configuration of a checkpoint's language model. Raises ConfigError if there is none."""
    return _from_pretrained(AutoConfig, path).get_text_config()


def _from_pretrained(kind: Any, path: str, **arguments: Any) -> Any:
    logging.set_verbosity_error()
    if path.startswith((".", "/")) and not Path(path, "config.json").is_file():
        raise ConfigError(f"MODEL must be a Hugging Face name or a folder with a config.json, not {brief(path)}.")
    try:
        return kind.from_pretrained(path, **arguments)
    except Exception as error:  # transformers and tokenizers may raise anything for a damaged file
        cause = error_text(error)
        raise ConfigError(f"MODEL must be a checkpoint that transformers can load, not {path} ({cause}).") from error
