"""The exact distribution of a tiny model's first tokens under sampling parameters, by enumeration of all outcomes.

The parameters are applied here once more, in float64 and as plainly as can be, in vLLM's order. R: rows, V: vocab_size,
t: tokens of an outcome.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Params = Mapping[str, Any]  # keyword arguments of vLLM's SamplingParams


class ExactModel:
    """The probabilities of all outcomes that follow a prompt.

    Args:
        model: of transformers, causal.
        num_tokens: t.
    """

    def __init__(self, model: Any, num_tokens: int):
        self._model = model
        self._vocab_size: int = model.config.vocab_size
        self._num_tokens = num_tokens
        self._logits: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def joint(self, prompt: Sequence[int], params: Params, slack: float = 0.0) -> NDArray[np.float64]:
        """[V] * t: probability of each outcome. After a stop token it is repeated to the end.

        Args:
            slack: by what share a token may miss a cut (min-p, top-k, top-p) and still be left in.
        """
        joint = torch.ones((), dtype=torch.float64)
        for length, logits in enumerate(self._prefix_logits(tuple(prompt))):
            prefixes = self._prefixes(length)
            probs = next_probs(logits, prompt, prefixes, params, slack)
            for stop in params.get("stop_token_ids", ()):
                ended = (prefixes == stop).any(-1)
                probs[ended] = torch.nn.functional.one_hot(torch.tensor(stop), self._vocab_size).double()
            joint = joint[..., None] * probs.reshape([self._vocab_size] * (length + 1))
        result: NDArray[np.float64] = joint.numpy()
        return result

    def _prefixes(self, length: int) -> torch.Tensor:
        """[V ** length, length]: all of them, in order."""
        return torch.tensor(list(product(range(self._vocab_size), repeat=length)), dtype=torch.long)

    def _prefix_logits(self, prompt: tuple[int, ...]) -> list[torch.Tensor]:
        """For each length below t: the logits [V ** length, V] after all prefixes of this length."""
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
    """[R, V]: probabilities of the next token.

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
    """Allowed tokens, logit bias and min tokens."""
    if allowed := params.get("allowed_token_ids"):
        forbidden = torch.ones(logits.shape[-1], dtype=torch.bool)
        forbidden[allowed] = False
        logits[:, forbidden] = -torch.inf
    for token, bias in params.get("logit_bias", {}).items():
        logits[:, int(token)] += bias
    if length < params.get("min_tokens", 0):
        logits[:, params["stop_token_ids"]] = -torch.inf
    return logits


def _penalise(logits: torch.Tensor, prompt: Sequence[int], prefixes: torch.Tensor, params: Params) -> torch.Tensor:
    """Repetition penalty for tokens of prompt and output; frequency and presence penalty for those of the output."""
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
    """min-p, top-k and top-p, in this order, and renormalised."""
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
