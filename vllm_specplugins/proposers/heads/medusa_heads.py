"""Reads published Medusa heads, and computes logits for several positions at once from hidden states.

Two formats name the same tensors: FasterDecoding's ("0.0.linear.weight", "0.1.weight", or with "medusa_heads." before
them) and vLLM's ("blocks.0.layers.0.weight", "lm_heads.0.weight", "lm_head.weight" shared by all, "token_map" if the
heads have only a part of the vocabulary). M: heads, N: tokens, H: hidden size, V: vocabulary, W: tokens of the heads'
vocabulary.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save

from vllm_specplugins.config import error_text
from vllm_specplugins.proposers.heads.trained import TrainedPart

FILES = ("model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
# The names in both formats, and the tensor's name in this file: HEAD.LAYER.weight, HEAD.LAYER.bias or HEAD.head.
_NAMES = {
    r"(?:medusa_heads\.)?(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)": r"\1.\2.\3",
    r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)": r"\1.\2.\3",
    r"(?:medusa_heads\.)?(\d{1,3})\.\d{1,3}\.weight|lm_heads\.(\d{1,3})\.weight": r"\1\2.head",
    r"lm_head\.weight": "0.head",
    r"token_map": "token_map",
}
Tensors = dict[str, torch.Tensor]


class MedusaHeads(TrainedPart):
    """The first `M` heads of a checkpoint; their layers are the parameters.

    Args:
        layers: weights [M, H, H] and biases [M, 1, H] of each layer, which adds SiLU(linear) to its input.
        head: [M, W, H], or [W, H] for all heads; None: the head of the target.
        token_map: [W] int64, the heads' tokens; None: the whole vocabulary.
    """

    file, field = FILES[0], "medusa: heads"

    def __init__(
        self,
        layers: list[tuple[torch.Tensor, torch.Tensor]],
        head: torch.Tensor | None,
        token_map: torch.Tensor | None,
        vocab_size: int,
    ):
        torch.nn.Module.__init__(self)
        tensors = (torch.nn.Parameter(tensor, requires_grad=False) for layer in layers for tensor in layer)
        self.layers = torch.nn.ParameterList(tensors)
        self.head, self.token_map, self.vocab_size = head, token_map, vocab_size

    def logits(
        self, hidden_states: torch.Tensor, num_draft: int, target_head: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Returns logits [num_draft, N, V] of the tokens after the next token, from states [N, H] after the final norm.
        A part without vocabulary matrices uses `target_head`."""
        states = hidden_states.expand(num_draft, *hidden_states.shape)
        tensors = iter(self.layers)
        for weight, bias in zip(tensors, tensors, strict=True):
            states = states + F.silu(torch.baddbmm(bias[:num_draft], states, weight[:num_draft].transpose(1, 2)))
        if self.head is None:
            return target_head(states.reshape(-1, states.shape[-1])).view(*states.shape[:2], -1)
        head = self.head if self.head.ndim == 2 else self.head[:num_draft]
        logits = states.to(head.dtype) @ head.mT
        if self.token_map is None:
            return F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)
        whole = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
        whole[..., self.token_map] = logits
        return whole

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Writes the heads in vLLM's format."""
        tensors = {} if self.token_map is None else {"token_map": self.token_map}
        for number, stacked in enumerate(self.layers):
            name = f"layers.{number // 2}.{('weight', 'bias')[number % 2]}"
            tensors |= {f"blocks.{head}.{name}": tensor for head, tensor in enumerate(stacked.squeeze(1))}
        if self.head is not None and self.head.ndim == 2:
            tensors["lm_head.weight"] = self.head
        elif self.head is not None:
            tensors |= {f"lm_heads.{number}.weight": tensor for number, tensor in enumerate(self.head)}
        for name, tensor in tensors.items():
            tensors[name] = tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        (folder / self.file).write_bytes(save(tensors))

    def like_this(self, folder: str | Path) -> "MedusaHeads":
        num_heads, _, hidden_size = self.layers[0].shape
        check_medusa(folder, num_heads=num_heads, hidden_size=hidden_size, vocab_size=self.vocab_size)
        heads = MedusaHeads.load(folder, num_heads, self.vocab_size)
        if len(heads.layers) != len(self.layers):
            self.refuse(folder, f"heads of {len(self.layers) // 2} layers", f"of {len(heads.layers) // 2}")
        return heads

    @classmethod
    def load(  # type: ignore[override]
        cls, folder: str | Path, num_heads: int, vocab_size: int, device: Any = "cpu", dtype: torch.dtype | None = None
    ) -> "MedusaHeads":
        """Loads the first heads of a checkpoint that has passed `check_medusa`."""
        tensors = _read(folder)
        if (count := _count(tensors)) < num_heads:
            wanted = f"a folder with a head for each of {num_heads} tokens (num_speculative_tokens, or a chain of it)"
            cls.refuse(folder, wanted, f"one with {count}")

        def stacked(part: str, num: int = num_heads) -> torch.Tensor:
            parts = (_checked(folder, tensors, f"{number}.{part}") for number in range(num))
            return torch.stack([tensor.to(device=device, dtype=dtype) for tensor in parts])

        layers = []
        for layer in range(1 + max(int(name.split(".")[1]) for name in tensors if name.endswith(".weight"))):
            weight = stacked(f"{layer}.weight")
            for number in range(num_heads):
                tensors.setdefault(f"{number}.{layer}.bias", torch.zeros(weight.shape[1]))
            layers.append((weight, stacked(f"{layer}.bias")[:, None]))
        num_matrices = sum(name.endswith(".head") for name in tensors)
        if not num_matrices:
            return cls(layers, None, None, vocab_size)
        head, token_map = stacked("head") if num_matrices > 1 else stacked("head", 1)[0], None
        if "token_map" in tensors:
            token_map = _checked(folder, tensors, "token_map").long()
            if not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size:
                cls.refuse(folder, f"heads whose token_map has tokens below {vocab_size}", "others")
            token_map = token_map.to(device)
            if head.shape[-2] > len(token_map):
                head = head.index_select(head.ndim - 2, token_map)
        return cls(layers, head, token_map, vocab_size)


def check_medusa(folder: str | Path, *, num_heads: int, hidden_size: int, vocab_size: int) -> None:
    """Raises ConfigError unless a folder has heads with finite weights for a model of these sizes."""
    states = torch.empty(1, hidden_size, device="meta")
    try:  # the shapes are right if a pass without data succeeds
        heads = MedusaHeads.load(folder, num_heads, vocab_size, "meta", states.dtype)
        heads.logits(states, num_heads, lambda rows: rows.new_empty(len(rows), vocab_size))
    except (RuntimeError, IndexError) as error:
        wanted = f"heads with shapes that fit together and hidden_size {hidden_size}"
        MedusaHeads.refuse(folder, wanted, f"others ({error_text(error)})")
    if heads.head is not None:
        width, token_map = heads.head.shape[-2], heads.token_map
        if width > vocab_size or (token_map is not None and width != len(token_map)):
            wanted = f"heads of at most {vocab_size} tokens, as many as a token_map has"
            MedusaHeads.refuse(folder, wanted, str(width))


def num_heads(folder: str | Path) -> int:
    """Returns the number of heads in a folder. Raises ConfigError if there are none."""
    return _count(_read(folder)) or MedusaHeads.refuse(folder, "a folder with heads", "one without any")


def _count(tensors: Tensors) -> int:
    return 1 + max((int(name.split(".")[0]) for name in tensors if name.endswith(".weight")), default=-1)


def _read(folder: str | Path) -> Tensors:
    """Returns the tensors of a checkpoint by their name in this file, mapped from the disk."""
    path = next((path for name in FILES if (path := Path(folder) / name).is_file()), None)
    if path is None:
        MedusaHeads.refuse(folder, f"a folder with {' or '.join(FILES)}", "one without")
    try:
        if path.suffix == ".safetensors":
            tensors: Any = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch, zipfile and pickle may raise anything for a damaged file
        wanted = f"a folder with a whole {path.name}"
        MedusaHeads.refuse(folder, wanted, f"one that cannot be read ({error_text(error)})")
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        MedusaHeads.refuse(folder, f"a folder whose {path.name} holds tensors by name", "something else")
    matches = ((re.fullmatch(names, str(name)), ours, name) for name in tensors for names, ours in _NAMES.items())
    return {match.expand(ours): tensors[name] for match, ours, name in matches if match}


def _checked(folder: str | Path, tensors: Tensors, name: str) -> torch.Tensor:
    if (tensor := tensors.get(name)) is None:
        MedusaHeads.refuse(folder, f"a folder with the {name} of its heads", "one without it")
    if tensor.is_floating_point() == (name == "token_map") or tensor.is_complex():
        kind = "integers" if name == "token_map" else "floating-point numbers"
        MedusaHeads.refuse(folder, f"heads with {kind} in {name}", str(tensor.dtype))
    if not tensor.numel() or not tensor.float().isfinite().all():
        MedusaHeads.refuse(folder, f"heads with finite numbers in {name}", "none, NaN or infinity")
    return tensor
