"""States of training on disk: one that was spoilt somewhere is refused with one sentence, or goes on."""

import io
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rubbish import JSON, NUMBERS, check_sentence
from spoil import spoilt

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.train_exit_head import STATE_FILE, Settings, _resume, _save_state

SETTINGS = Settings(
    model="m", exit_layer=1, rank=0, steps=12, batch_tokens=128, row_tokens=64, learning_rate=0.02, seed=0,
    heldout=0.1, data=1,
)  # fmt: skip
SHAPES = {"norm.weight": (4,), "head.weight": (6, 4)}


def fresh() -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    """Parameters and their optimizer, as a run begins."""
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    return parameters, torch.optim.AdamW(parameters.values(), betas=(0.9, 0.95), weight_decay=0.0)


def step(parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    sum(parameter.square().sum() + parameter.sum() for parameter in parameters.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def whole_state() -> bytes:
    """The file of a run that has done 3 steps."""
    parameters, optimizer = fresh()
    for _ in range(3):
        step(parameters, optimizer)
    with TemporaryDirectory() as folder:
        _save_state(Path(folder) / STATE_FILE, SETTINGS, parameters, optimizer, 3)
        return (Path(folder) / STATE_FILE).read_bytes()


WHOLE = whole_state()
TENSORS = st.sampled_from([(), (4,), (6, 4), (0,), (4, 6)]).map(torch.zeros)
LEAVES = JSON | NUMBERS | TENSORS


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    """A state of which one entry, at any depth, is another or missing."""
    state = torch.load(io.BytesIO(WHOLE), weights_only=True)
    place: Any = state
    while True:
        key = draw(st.sampled_from(sorted(place, key=repr) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or draw(st.integers(0, 3)) == 0:
            break
        place = place[key]
    if draw(st.booleans()):
        place[key] = draw(LEAVES)
    else:
        del place[key]
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def resumed(data: bytes) -> int | None:
    """The number of steps that a run with this state has done, None if it is refused; the run then goes on."""
    parameters, optimizer = fresh()
    with TemporaryDirectory() as folder:
        (Path(folder) / STATE_FILE).write_bytes(data)
        try:
            done = _resume(Path(folder) / STATE_FILE, SETTINGS, parameters, optimizer)
        except ConfigError as error:
            check_sentence(error)
            return None
    assert isinstance(done, int) and 0 <= done <= SETTINGS.steps
    step(parameters, optimizer)
    assert {name: tuple(parameter.shape) for name, parameter in parameters.items()} == SHAPES
    return done


def test_a_whole_one_goes_on() -> None:
    assert resumed(WHOLE) == 3


@pytest.mark.filterwarnings("ignore")
@given(edited())
def test_an_edited_one(data: bytes) -> None:
    """Kills: an entry that is not looked at before it is used."""
    resumed(data)


@pytest.mark.filterwarnings("ignore")
@given(spoilt(WHOLE))
def test_a_spoilt_one(data: bytes) -> None:
    """Kills: a traceback of torch's or pickle's."""
    if resumed(data) is None:
        assert data != WHOLE
