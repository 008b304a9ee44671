"""A trained exit head: turns hidden states of an early layer into logits, in place of the model's own norm and head.

A folder with `config.json` and `exit_head.safetensors`. The head is a matrix of the vocabulary, or the product of two
(rank R), which also costs less to run. Knows nothing of vLLM; made by `python -m vllm_specplugins train-exit-head`.
N: tokens, H: hidden size, V: vocabulary, R: rank.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from vllm_specplugins.config import ConfigError, said, shown

DTYPES = ("F16", "BF16", "F32", "F64")
CONFIG_FILE, WEIGHTS_FILE = "config.json", "exit_head.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitHeadConfig:
    """What a head was made for.

    Args:
        exit_layer: how many layers run before it.
        hidden_size: H.
        vocab_size: V.
        rank: R; 0 is one full matrix.
        rms_norm_eps: of its norm.
    """

    exit_layer: int
    hidden_size: int
    vocab_size: int
    rank: int
    rms_norm_eps: float

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the weights file and their shapes."""
        hidden, vocab, rank = self.hidden_size, self.vocab_size, self.rank
        if rank == 0:
            return {"norm.weight": (hidden,), "head.weight": (vocab, hidden)}
        return {"norm.weight": (hidden,), "down.weight": (rank, hidden), "up.weight": (vocab, rank)}


@dataclass(frozen=True, slots=True)
class ExitHead:
    """A head in memory; `weights` as ExitHeadConfig.shapes lists them.

    >>> config = ExitHeadConfig(exit_layer=1, hidden_size=2, vocab_size=3, rank=0, rms_norm_eps=0.0)
    >>> head = ExitHead(config, {"norm.weight": torch.ones(2), "head.weight": torch.eye(3, 2)})
    >>> head.logits(torch.tensor([[3.0, 3.0]]))
    tensor([[1., 1., 0.]])
    """

    config: ExitHeadConfig
    weights: dict[str, torch.Tensor]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states [N, H] after layer `exit_layer`, before any norm."""
        weights = self.weights
        hidden_states = F.rms_norm(
            hidden_states, (self.config.hidden_size,), weights["norm.weight"], self.config.rms_norm_eps
        )
        if self.config.rank == 0:
            return F.linear(hidden_states, weights["head.weight"])
        return F.linear(F.linear(hidden_states, weights["down.weight"]), weights["up.weight"])

    def save(self, folder: Path) -> None:
        """Writes the head into a folder, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.weights.items()}
        # Not `save_file`, which lets nobody else read the file.
        (folder / WEIGHTS_FILE).write_bytes(save(weights, metadata={"format": "pt"}))
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> "ExitHead":
        """The head in a folder that `check_exit_head` has passed."""
        config = read_head_config(folder)
        weights = load_file(Path(folder) / WEIGHTS_FILE)
        return cls(config, {name: weights[name].to(device, dtype) for name in config.shapes()})


def check_exit_head(folder: str | Path, *, exit_layer: int, hidden_size: int, vocab_size: int) -> None:
    """Raises ConfigError unless a folder holds a whole head for this layer of a model of these sizes."""
    config = read_head_config(folder)
    wanted = {"exit_layer": exit_layer, "hidden_size": hidden_size, "vocab_size": vocab_size}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            _refuse(folder, f"a head whose {name} is {value}", f"{getattr(config, name)}")
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        _refuse(folder, f"a folder with {WEIGHTS_FILE}", "one without it")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        _refuse(folder, f"a folder with a whole {WEIGHTS_FILE}", f"one that cannot be read ({said(error)})")
    for name, shape in config.shapes().items():
        found = tuple(slices[name].get_shape()) if name in slices else None
        if found != shape:
            words = "nothing" if found is None else shown(list(found))
            _refuse(folder, f"a head with {name} of shape {list(shape)}", words)
        if (dtype := slices[name].get_dtype()) not in DTYPES:
            _refuse(folder, f"a head with {name} of {', '.join(DTYPES)}", dtype)


def read_head_config(folder: str | Path) -> ExitHeadConfig:
    """What the head in a folder was made for; ConfigError if there is none."""
    path = Path(folder) / CONFIG_FILE
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        _refuse(folder, f"a folder with a readable {CONFIG_FILE}", "one without it")
    names = [entry.name for entry in fields(ExitHeadConfig)]
    if not isinstance(raw, dict) or not set(names) <= raw.keys():
        _refuse(folder, f"a head's folder, whose {CONFIG_FILE} holds {', '.join(names)}", "one of something else")
    for name in names:
        kind = (int, float) if name == "rms_norm_eps" else int
        if not isinstance(raw[name], kind) or isinstance(raw[name], bool) or not 0 <= raw[name] < 2**31:
            _refuse(folder, f"a head's folder, whose {name} in {CONFIG_FILE} is a number from 0 on", shown(raw[name]))
    return ExitHeadConfig(**{name: raw[name] for name in names})


def _refuse(folder: str | Path, wanted: str, found: str) -> Any:
    raise ConfigError(f"early_exit: exit_head must be {wanted}, not {found} ({folder}).")
