"""Published Medusa heads: reads their files, and turns hidden states into logits for several positions at once.

Two formats are known, which name the same tensors: FasterDecoding's ("0.0.linear.weight", "0.1.weight", or with
"medusa_heads." before them) and vLLM's ("blocks.0.layers.0.weight", "lm_heads.0.weight", "lm_head.weight" shared by
all, "token_map" where the heads know a part of the vocabulary). How many heads and layers there are the tensors say
themselves. M: heads, N: tokens, H: hidden size, V: vocabulary, W: tokens that the heads know.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from vllm_specplugins.config import ConfigError, error_text

FILES = ("model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
_LAYER = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
_HEAD = re.compile(r"(?:(\d+)\.\d+|lm_heads\.(\d+))\.weight")
Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Heads in memory, the first `M` of a checkpoint.

    Args:
        layers: of each layer the weights [M, H, H] and biases [M, 1, H]; it adds SiLU(linear) to its input.
        head: [M, W, H], [W, H] for all, or None: the target's own.
        token_map: [W] int64 the heads' tokens; None: they know them all.
        vocab_size: V.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    head: torch.Tensor | None
    token_map: torch.Tensor | None
    vocab_size: int

    def logits(
        self, hidden_states: torch.Tensor, num_draft: int, own_head: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Logits [num_draft, N, V] of the tokens after the next one, from states [N, H] after the final norm.

        Args:
            own_head: the target's, for heads without one.
        """
        states = hidden_states.expand(num_draft, *hidden_states.shape)
        for weight, bias in self.layers:
            states = states + F.silu(torch.baddbmm(bias[:num_draft], states, weight[:num_draft].transpose(1, 2)))
        if self.head is None:
            return own_head(states.reshape(-1, states.shape[-1])).view(*states.shape[:2], -1)
        if self.head.ndim == 2:
            logits = F.linear(states, self.head)
        else:
            logits = torch.bmm(states, self.head[:num_draft].transpose(1, 2))
        if self.token_map is None:
            return F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)
        whole = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
        whole[..., self.token_map] = logits
        return whole

    @classmethod
    def load(
        cls, folder: str | Path, num_heads: int, vocab_size: int, device: Any = "cpu", dtype: torch.dtype | None = None
    ) -> "MedusaHeads":
        """The first heads of a checkpoint.

        Raises:
            ConfigError: the folder holds no heads, fewer, or such as do not fit together.
        """
        layers, heads, token_map = _parts(folder, num_heads)
        made = [
            (_stack(folder, weights, device, dtype), _stack(folder, biases, device, dtype)[:, None])
            for weights, biases in layers
        ]
        hidden_size = made[0][0].shape[-1]
        for weight, bias in made:
            if weight.shape[1:] != (hidden_size, hidden_size) or bias.shape[2:] != (hidden_size,):
                _refuse(folder, "heads whose layers are square", _words(weight.shape[1:]))
        head = None
        if heads:
            head = heads[0].to(device=device, dtype=dtype) if len(heads) == 1 else _stack(folder, heads, device, dtype)
            if token_map is not None and head.shape[-2] > len(token_map):
                head = head.index_select(head.ndim - 2, token_map.to(head.device))
            num_tokens = vocab_size if token_map is None else len(token_map)
            if head.shape[-1] != hidden_size or not 1 <= head.shape[-2] <= num_tokens:
                wanted = f"heads of at most {num_tokens} tokens and {hidden_size} numbers each"
                _refuse(folder, wanted, _words(head.shape[-2:]))
            if token_map is not None:
                fits = (
                    len(token_map) == head.shape[-2] and 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size
                )
                if not fits:
                    _refuse(folder, f"heads whose token_map has a token below {vocab_size} for each row", "others")
                token_map = token_map.to(device)
        return cls(made, head, token_map, vocab_size)


def check_medusa(folder: str | Path, *, num_heads: int, hidden_size: int, vocab_size: int) -> None:
    """Raises ConfigError unless a folder holds heads for a model of these sizes, of finite numbers."""
    found = MedusaHeads.load(folder, num_heads, vocab_size, "meta").layers[0][0].shape[-1]
    if found != hidden_size:
        _refuse(folder, f"heads whose hidden_size is {hidden_size}", str(found))


def num_heads(folder: str | Path) -> int:
    """How many heads a folder holds; ConfigError if none."""
    names = [name.replace("medusa_heads.", "") for name in _read(folder)]
    found = {next(filter(None, match.groups()[:4:2])) for name in names if (match := _LAYER.fullmatch(name))}
    if not found:
        _refuse(folder, "a folder with heads", "one without any")
    return len(found)


def _parts(folder: str | Path, num_heads: int) -> tuple[list[tuple[Tensors, Tensors]], Tensors, torch.Tensor | None]:
    """Weights and biases of the first heads by layer; their heads, or one for all, or none; the token map."""
    layers: dict[tuple[int, int, str], torch.Tensor] = {}
    heads: dict[int, torch.Tensor] = {}
    token_map = None
    for name, tensor in _read(folder).items():
        name = name.replace("medusa_heads.", "")
        if match := _LAYER.fullmatch(name):
            head, layer = (int(number) for number in match.groups()[:4] if number is not None)
            layers[head, layer, match[5]] = _of_dimensions(folder, name, tensor, 2 if match[5] == "weight" else 1)
        elif match := _HEAD.fullmatch(name):
            heads[int(match[1] or match[2])] = _of_dimensions(folder, name, tensor, 2)
        elif name == "lm_head.weight":
            heads[0] = _of_dimensions(folder, name, tensor, 2)
        elif name == "token_map":
            token_map = _of_dimensions(folder, name, tensor, 1).long()
    num_found = 1 + max((head for head, *_ in layers), default=-1)
    if num_found < num_heads:
        wanted = f"a folder with a head for each of the {num_heads} num_speculative_tokens"
        _refuse(folder, wanted, f"one with {num_found}")

    def of_all(layer: int) -> tuple[Tensors, Tensors]:
        weights = [_taken(folder, layers, (head, layer, "weight")) for head in range(num_heads)]
        places = [(head, layer, "bias") for head in range(num_heads)]
        return weights, [layers.get(at, torch.zeros(len(weight))) for at, weight in zip(places, weights, strict=True)]

    num_layers = 1 + max(layer for _, layer, _ in layers)
    shared = len(heads) <= 1
    own = list(heads.values()) if shared else [_taken(folder, heads, (head,)) for head in range(num_heads)]
    return [of_all(layer) for layer in range(num_layers)], own, token_map


def _read(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name, where they lie on the disk."""
    path = next((path for name in FILES if (path := Path(folder) / name).is_file()), None)
    if path is None:
        _refuse(folder, f"a folder with {' or '.join(FILES)}", "one without")
    try:
        if path.suffix == ".safetensors":
            tensors: Any = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged file makes torch, zipfile or pickle raise
        _refuse(folder, f"a folder with a whole {path.name}", f"one that cannot be read ({error_text(error)})")
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        _refuse(folder, f"a folder whose {path.name} holds tensors by name", "something else")
    return {str(name): tensor for name, tensor in tensors.items()}


def _of_dimensions(folder: str | Path, name: str, tensor: torch.Tensor, dimensions: int) -> torch.Tensor:
    if tensor.ndim != dimensions or not tensor.numel() or tensor.is_complex():
        _refuse(folder, f"heads with {name} of {dimensions} dimensions", _words(tensor.shape))
    if not tensor.float().isfinite().all():
        _refuse(folder, f"heads with finite numbers in {name}", "some with NaN or infinity")
    return tensor


def _taken(folder: str | Path, tensors: dict[Any, torch.Tensor], key: tuple[Any, ...]) -> torch.Tensor:
    tensor = tensors.get(key if len(key) > 1 else key[0])
    if tensor is None:
        _refuse(folder, f"a folder with the weights of head {' layer '.join(map(str, key[:2]))}", "one without them")
    return tensor


def _stack(folder: str | Path, tensors: Tensors, device: Any, dtype: torch.dtype | None) -> torch.Tensor:
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        _refuse(folder, "heads of one shape", " and ".join(map(_words, shapes[:2])))
    return torch.stack([tensor.to(device=device, dtype=dtype) for tensor in tensors])


def _words(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _refuse(folder: str | Path, wanted: str, found: str) -> NoReturn:
    raise ConfigError(f"medusa: heads must be {wanted}, not {found} ({folder}).")
