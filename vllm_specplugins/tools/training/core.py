"""The training that all parts share: the model says what comes next, and a part learns to say the same.

Distillation against the full model's own distribution (Hinton et al. 2015); the model stays as it is. A step's rows
follow from its number alone, so that a run that was killed goes on as if it had not been. T: tokens, V: vocabulary.
"""

import time
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.files import other_run, save_whole
from vllm_specplugins.tools.training.parts import Part

STATE_FILE = "training_state.pt"
SAVE_SECONDS = 60.0
WARM_UP = 0.05  # of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides the weights of a run; a run can only be resumed with the same. Each part has fields of its own.

    Args:
        model: path or name.
        steps: optimizer steps.
        batch_tokens: about so many tokens a step.
        row_tokens: most tokens of a row.
        learning_rate: at its highest.
        seed: of the order of the rows.
        heldout: share of the rows that is not trained on.
        data: checksum of the token ids.
        own_text: temperature at which the model wrote the text; None: others did.
        num_draft: how many draft tokens it learns to say one after the other.
    """

    model: str
    steps: int
    batch_tokens: int
    row_tokens: int
    learning_rate: float
    seed: int
    heldout: float
    data: int
    own_text: float | None = None
    num_draft: int = 1

    @property
    def batch_rows(self) -> int:
        return max(1, self.batch_tokens // self.row_tokens)

    @abstractmethod
    def allowed(self, base: BaseModel) -> dict[str, tuple[int, int]]:
        """The least and the most that the part's own fields may be for a model."""

    @abstractmethod
    def begin(self, base: BaseModel, rows: Sequence[Sequence[int]]) -> Part:
        """The part before its training, in float32; it may look at some rows."""

    def check(self, base: BaseModel) -> None:
        """Raises ConfigError for a field that the model does not allow."""
        for name, (low, high) in self.allowed(base).items():
            if not low <= (value := getattr(self, name)) <= high:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be an integer from {low} to {high} for this model, not {value}.")


def train(
    base: BaseModel,
    rows: Sequence[Sequence[int]],
    settings: Settings,
    out: Path,
    advance: Callable[[int, float], None] = lambda step, loss: None,
) -> Part:
    """Trains a part and saves it in `out`, in the model's dtype; goes on where a run in `out` stopped.

    Args:
        base: the model.
        rows: token ids to train on.
        settings: see Settings.
        out: folder of the part and of the state of its training.
        advance: called after each step with the number of steps done and the loss, in nats a draft token.

    Raises:
        ConfigError: `out` holds a run with other settings, or cannot be written.
    """
    part = settings.begin(base, rows)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in part.weights.items()}
    part.weights.update(parameters)
    optimizer = torch.optim.AdamW(parameters.values(), betas=(0.9, 0.95), weight_decay=0.0)
    first = _resume(out / STATE_FILE, settings, parameters, optimizer)
    saved = time.monotonic()
    for step in range(first, settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * schedule(step, settings.steps)
        picked = rows_of_step(step, len(rows), settings.batch_rows, settings.seed)
        loss = distil(base, part, [rows[index] for index in picked], settings)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == settings.steps or time.monotonic() - saved > SAVE_SECONDS:
            _save_state(out / STATE_FILE, settings, parameters, optimizer, step + 1)
            saved = time.monotonic()
        advance(step + 1, loss)
    save_whole(out, lambda folder: part.save(folder, base.dtype))
    # What is scored is what was saved.
    part.weights.update({name: tensor.detach().to(base.dtype).float() for name, tensor in parameters.items()})
    return part


def distil(base: BaseModel, part: Part, rows: Sequence[Sequence[int]], settings: Settings) -> float:
    """Adds the gradient of the mean loss of some rows to the part's; returns it, in nats a draft token."""
    num_tokens = sum(map(len, rows)) * settings.num_draft
    total = 0.0
    with torch.autocast("cuda", torch.bfloat16, enabled=base.model.device.type == "cuda"):
        # A row at a time: logits [T, V], of which a part may make num_draft, are the largest thing here.
        for states in base.hidden_states(rows):
            full = base.logits(states[-1])
            guesses = part.guesses(base, states, settings.num_draft)
            loss = sum(
                cross_entropy(guess.logits.float(), guess.of(full).softmax(-1), reduction="sum") for guess in guesses
            )
            (loss / num_tokens).backward()
            total += loss.item() / num_tokens
    return total


def schedule(step: int, steps: int) -> float:
    """The learning rate's share of its highest: up over WARM_UP of the steps, then down to nothing."""
    return min(1.0, (step + 1) / (WARM_UP * steps + 1)) * (1 - step / steps)


def rows_of_step(step: int, num_rows: int, batch_rows: int, seed: int) -> list[int]:
    """The rows of a step: each row once an epoch, in an order of that epoch's own."""
    picked: list[int] = []
    orders: dict[int, torch.Tensor] = {}
    for index in range(step * batch_rows, (step + 1) * batch_rows):
        epoch, place = divmod(index, num_rows)
        if epoch not in orders:
            orders[epoch] = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        picked.append(int(orders[epoch][place]))
    return picked


def _resume(path: Path, settings: Settings, parameters: dict[str, Any], optimizer: Any) -> int:
    """Loads the state at `path`, if there is one; returns the number of steps that it has done."""
    if not path.exists():
        return 0
    whole = ConfigError(f"--out must be a folder whose {STATE_FILE} is whole, not {path.parent}.")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load looks at no checksum
            if archive.testzip() is not None:
                raise whole
        state = torch.load(path, weights_only=True, map_location=next(iter(parameters.values())).device)
        stored, step = dict(state["settings"]), state["step"]
        differing = [name for name, value in asdict(settings).items() if stored.get(name) != value]
    except Exception as error:
        raise whole from error
    if differing:
        raise other_run(differing[0], stored.get(differing[0]), getattr(settings, differing[0]), path.parent)
    try:
        if not 0 <= step <= settings.steps or type(step) is not int:
            raise whole
        _restore(state, parameters, optimizer)
    except Exception as error:
        raise whole from error
    return step


@torch.no_grad()
def _restore(state: dict[str, Any], parameters: dict[str, Any], optimizer: Any) -> None:
    """Raises whatever it may where the state is another's."""
    for name, tensor in parameters.items():
        found = state["weights"][name]
        if found.shape != tensor.shape:
            raise ValueError(f"{name} has the shape {tuple(found.shape)}")
        tensor.copy_(found)
    optimizer.load_state_dict(state["optimizer"])


def _save_state(path: Path, settings: Settings, parameters: dict[str, Any], optimizer: Any, step: int) -> None:
    """Writes the state of a run; a reader finds the old one or the new one, never a part."""
    state = {"settings": asdict(settings), "step": step, "optimizer": optimizer.state_dict()}
    state["weights"] = {name: tensor.data for name, tensor in parameters.items()}
    save_whole(path.parent, lambda folder: torch.save(state, folder / path.name))
