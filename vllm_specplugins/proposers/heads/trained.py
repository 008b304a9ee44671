"""A trained part in a folder: a safetensors file and a `config.json` that says what it was made for.

Knows nothing of vLLM, nor of what the parts compute. Whatever is wrong with a folder is one sentence.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from vllm_specplugins.config import ConfigError, brief, error_text

DTYPES = ("F16", "BF16", "F32", "F64")
CONFIG_FILE = "config.json"
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """What the folders of one kind of part hold.

    Args:
        config: a dataclass of numbers with a method `shapes`, which lists the tensors.
        file: the tensors' file.
        field: where a user names the folder, as in "early_exit: exit_head".
        noun: what a user calls the part.
    """

    config: type
    file: str
    field: str
    noun: str

    def save(self, folder: Path, config: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes a part into a folder, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        # Not `save_file`, which lets nobody else read the file.
        (folder / self.file).write_bytes(save(tensors, metadata={"format": "pt"}))
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(config), indent=1) + "\n")

    def load(self, folder: str | Path, device: Any, dtype: torch.dtype) -> tuple[Any, Weights]:
        """Configuration and tensors of a folder that `check` has passed."""
        config = self.read_config(folder)
        weights = load_file(Path(folder) / self.file)
        return config, {name: weights[name].to(device=device, dtype=dtype) for name in config.shapes()}

    def check(self, folder: str | Path, **wanted: int) -> Any:
        """The configuration in a folder; ConfigError unless a whole part lies there, for such a model and place."""
        config = self.read_config(folder)
        for name, value in wanted.items():
            if getattr(config, name) != value:
                self.refuse(folder, f"a {self.noun} whose {name} is {value}", f"{getattr(config, name)}")
        path = Path(folder) / self.file
        if not path.is_file():
            self.refuse(folder, f"a folder with {self.file}", "one without it")
        try:
            with safe_open(path, framework="pt") as file:
                self._check_tensors(folder, file, config.shapes())
        except (SafetensorError, OSError) as error:
            self.refuse(folder, f"a folder with a whole {self.file}", f"one that cannot be read ({error_text(error)})")
        return config

    def _check_tensors(self, folder: str | Path, file: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            found = tuple(slices[name].get_shape()) if name in slices else None
            if found != shape:
                words = "nothing" if found is None else brief(list(found))
                self.refuse(folder, f"a {self.noun} with {name} of shape {list(shape)}", words)
            if (dtype := slices[name].get_dtype()) not in DTYPES:
                self.refuse(folder, f"a {self.noun} with {name} of {', '.join(DTYPES)}", dtype)
            if not file.get_tensor(name).isfinite().all():
                self.refuse(folder, f"a {self.noun} with finite numbers in {name}", "one with NaN or infinity")

    def read_config(self, folder: str | Path) -> Any:
        """What the part in a folder was made for; ConfigError if there is none."""
        try:
            raw = json.loads((Path(folder) / CONFIG_FILE).read_text())
        except (OSError, ValueError, RecursionError):
            self.refuse(folder, f"a folder with a readable {CONFIG_FILE}", "one without it")
        names = {entry.name: entry.type for entry in fields(self.config)}
        whose = f"a {self.noun}'s folder, whose"
        if not isinstance(raw, dict) or not set(names) <= raw.keys():
            self.refuse(folder, f"{whose} {CONFIG_FILE} holds {', '.join(names)}", "one of something else")
        for name, kind in names.items():
            kinds = (int, float) if kind is float else int
            if not isinstance(raw[name], kinds) or isinstance(raw[name], bool) or not 0 <= raw[name] < 2**31:
                self.refuse(folder, f"{whose} {name} in {CONFIG_FILE} is a number from 0 on", brief(raw[name]))
        return self.config(**{name: raw[name] for name in names})

    def refuse(self, folder: str | Path, wanted: str, found: str) -> NoReturn:
        """Raises ConfigError with the one sentence."""
        raise ConfigError(f"{self.field} must be {wanted}, not {found} ({folder}).")
