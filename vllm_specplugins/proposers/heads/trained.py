"""The base class of trained parts. A part is a torch module whose folder has its weights and (except for Medusa) a
`config.json` with its sizes."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from vllm_specplugins.config import ConfigError, brief, error_text

DTYPES = ("F16", "BF16", "F32", "F64")
CONFIG_FILE = "config.json"
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Epsilon = Annotated[float, msgspec.Meta(gt=0, le=1)]


class TrainedPart(torch.nn.Module):  # type: ignore[misc]
    """A part in memory; its parameters have no gradients until training. `config` is a dataclass of numbers that
    describe the model and the place for which it was trained. Without `weights` the parameters have only shapes."""

    Config: ClassVar[type]
    file: ClassVar[str]  # of the tensors
    field: ClassVar[str]  # the field that names the folder, as in "early_exit: exit_head"
    noun: ClassVar[str]  # the part's name in messages

    def __init__(self, config: Any, weights: Mapping[str, torch.Tensor] | None = None):
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.make_layers()
        self.requires_grad_(False)
        if weights is not None:
            self.load_state_dict(weights, assign=True)

    def make_layers(self) -> None:
        raise NotImplementedError

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in self.state_dict().items()}
        # `save_file` would write a file that other users cannot read.
        (folder / self.file).write_bytes(save(tensors, metadata={"format": "pt"}))
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path, device: Any = "cpu", dtype: torch.dtype | None = torch.float32) -> Self:
        """Loads the part from a folder that has passed `check`."""
        part, weights = cls(cls.read_config(folder)), load_file(Path(folder) / cls.file)
        part.load_state_dict({name: weights[name].to(device, dtype) for name in part.state_dict()}, assign=True)
        return part

    def like_this(self, folder: str | Path) -> Self:
        """Loads the part from a folder. Raises ConfigError unless it was trained for the same model and layers."""
        if (config := self.check(folder)) != self.config:
            self.refuse(folder, f"a {self.noun} for {self.config}", str(config))
        return self.load(folder)

    @classmethod
    def check(cls, folder: str | Path, **wanted: Any) -> Any:
        """Returns the configuration in a folder. Raises ConfigError unless it has these values and no weights are
        missing."""
        config = cls.read_config(folder)
        for name, value in wanted.items():
            if getattr(config, name) != value:
                cls.refuse(folder, f"a {cls.noun} whose {name} is {value}", f"{getattr(config, name)}")
        path = Path(folder) / cls.file
        if not path.is_file():
            cls.refuse(folder, f"a folder with {cls.file}", "one without it")
        try:
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                for name, tensor in cls(config).state_dict().items():
                    shape = list(slices[name].get_shape()) if name in slices else None
                    if shape != list(tensor.shape):
                        cls.refuse(
                            folder,
                            f"a {cls.noun} with {name} of shape {list(tensor.shape)}",
                            brief(shape) if shape else "nothing",
                        )
                    if (dtype := slices[name].get_dtype()) not in DTYPES:
                        cls.refuse(folder, f"a {cls.noun} with {name} of {', '.join(DTYPES)}", dtype)
                    if not file.get_tensor(name).isfinite().all():
                        cls.refuse(folder, f"a {cls.noun} with finite numbers in {name}", "one with NaN or infinity")
        except (SafetensorError, OSError) as error:
            cls.refuse(folder, f"a folder with a whole {cls.file}", f"one that cannot be read ({error_text(error)})")
        return config

    @classmethod
    def read_config(cls, folder: str | Path) -> Any:
        """Returns the configuration in a folder. Raises ConfigError if there is none."""
        try:
            return msgspec.json.decode((Path(folder) / CONFIG_FILE).read_bytes(), type=cls.Config)
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error_text(error)
            cls.refuse(folder, f"a folder with the {CONFIG_FILE} of a {cls.noun}", f"one without it ({why})")

    @classmethod
    def refuse(cls, folder: str | Path, wanted: str, given: str) -> NoReturn:
        raise ConfigError(f"{cls.field} must be {wanted}, not {given} ({folder}).")
