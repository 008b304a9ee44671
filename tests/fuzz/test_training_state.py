"""States of training on disk: one that was spoilt somewhere is refused with one sentence, or goes on."""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rubbish import JSON, NUMBERS, check_sentence
from spoil import spoilt

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.training.core import STATE_FILE, _resume, _save_state
from vllm_specplugins.tools.training.exit_head import ExitHeadSettings

SETTINGS = ExitHeadSettings(
    model="m", exit_layer=1, rank=0, steps=12, batch_tokens=128, row_tokens=64, learning_rate=0.02, seed=0,
    heldout=0.1, data=1,
)  # fmt: skip
SHAPES = {"norm.weight": (64,), "head.weight": (100, 64)}


def fresh() -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    """Parameters and their optimizer, as a run begins."""
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    return parameters, torch.optim.AdamW(parameters.values(), betas=(0.9, 0.95), weight_decay=0.0)


def step(parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    sum(parameter.square().sum() + parameter.sum() for parameter in parameters.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def whole_state() -> tuple[bytes, dict[str, torch.nn.Parameter]]:
    """The file of a run that has done 3 steps, and its parameters after 4."""
    parameters, optimizer = fresh()
    for _ in range(3):
        step(parameters, optimizer)
    with TemporaryDirectory() as folder:
        _save_state(Path(folder) / STATE_FILE, SETTINGS, parameters, optimizer, 3)
        data = (Path(folder) / STATE_FILE).read_bytes()
    step(parameters, optimizer)
    return data, parameters


WHOLE, RESUMED = whole_state()
TENSORS = st.sampled_from([(), (64,), (100, 64), (0,), (64, 100)]).map(torch.zeros)
LEAVES = JSON | NUMBERS | TENSORS


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    """A state of which an entry of ours is another or missing. The optimizer's own entries are torch's."""
    state = torch.load(io.BytesIO(WHOLE), weights_only=True)
    place = draw(st.sampled_from([state, state["settings"], state["weights"]]))
    key = draw(st.sampled_from(sorted(place)))
    if draw(st.integers(0, 4)):
        place[key] = draw(TENSORS if place is state["weights"] and draw(st.booleans()) else LEAVES)
    else:
        del place[key]
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def resumed(data: bytes) -> dict[str, torch.nn.Parameter] | None:
    """The parameters of a run that began with this state, one step on; None if it was refused."""
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
    return parameters


def test_a_whole_one_goes_on() -> None:
    parameters = resumed(WHOLE)
    assert parameters is not None and all(torch.equal(parameters[name], RESUMED[name]) for name in SHAPES)


@pytest.mark.filterwarnings("ignore")
@given(edited())
def test_an_edited_one(data: bytes) -> None:
    """Kills: an entry that is not looked at before it is used; weights of another shape that are spread over ours."""
    if resumed(data) is not None:
        weights = torch.load(io.BytesIO(data), weights_only=True)["weights"]
        assert {name: tuple(weights[name].shape) for name in SHAPES} == SHAPES


@pytest.mark.filterwarnings("ignore")
@given(spoilt(WHOLE))
def test_a_spoilt_one(data: bytes) -> None:
    """Kills: a traceback of torch's or pickle's; weights that are read with bits that are not theirs."""
    parameters = resumed(data)
    if parameters is not None:
        assert all(torch.equal(parameters[name], RESUMED[name]) for name in SHAPES)
