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
from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.tools.training.core import STATE_FILE, resume, save_state
from vllm_specplugins.tools.training.kinds import ExitHeadSettings

SETTINGS = ExitHeadSettings(
    model="m", exit_layer=1, steps=12, batch_tokens=128, row_tokens=64, learning_rate=0.02, seed=0,
    heldout=0.1, data=1,
)  # fmt: skip
CONFIG = ExitHeadConfig(exit_layer=1, hidden_size=64, vocab_size=100, rms_norm_eps=1e-5)


class Run:
    """A part and its optimizer, as a run begins."""

    def __init__(self) -> None:
        self.part = ExitHead(CONFIG, {"norm.weight": torch.zeros(64), "head.weight": torch.zeros(100, 64)})
        self.part.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.part.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def step(self) -> None:
        sum(parameter.square().sum() + parameter.sum() for parameter in self.part.parameters()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def whole_state() -> tuple[bytes, dict[str, torch.Tensor]]:
    """The file of a run that has done 3 steps, and its parameters after 4."""
    run = Run()
    for _ in range(3):
        run.step()
    with TemporaryDirectory() as folder:
        save_state(Path(folder) / STATE_FILE, SETTINGS, run.part, run.optimizer, 3)
        data = (Path(folder) / STATE_FILE).read_bytes()
    run.step()
    return data, run.part.state_dict()


WHOLE, RESUMED = whole_state()
TENSORS = st.sampled_from([(), (64,), (100, 64), (0,), (64, 100)]).map(torch.zeros)


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    """A state of which an entry of ours is another or missing. The optimizer's own entries are torch's."""
    state = torch.load(io.BytesIO(WHOLE), weights_only=True)
    place = draw(st.sampled_from([state, state["settings"], state["weights"]]))
    key = draw(st.sampled_from(sorted(place)))
    if draw(st.integers(0, 4)):
        tensors = place is state["weights"] and draw(st.booleans())
        place[key] = draw(TENSORS if tensors else JSON | NUMBERS | TENSORS)
    else:
        del place[key]
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def resumed(data: bytes) -> dict[str, torch.Tensor] | None:
    """The parameters of a run that began with this state, one step on; None if it was refused."""
    run = Run()
    with TemporaryDirectory() as folder:
        (Path(folder) / STATE_FILE).write_bytes(data)
        try:
            done = resume(Path(folder) / STATE_FILE, SETTINGS, run.part, run.optimizer)
        except ConfigError as error:
            check_sentence(error)
            return None
    assert isinstance(done, int) and 0 <= done <= SETTINGS.steps
    run.step()
    weights = run.part.state_dict()
    assert {name: tensor.shape for name, tensor in weights.items()} == {name: RESUMED[name].shape for name in weights}
    return weights


@pytest.mark.filterwarnings("ignore")
@given(edited())
def test_an_edited_one(data: bytes) -> None:
    """Kills: an entry that is not looked at before it is used; weights of another shape that are spread over ours."""
    if resumed(data) is not None:
        weights = torch.load(io.BytesIO(data), weights_only=True)["weights"]
        assert {name: weights[name].shape for name in RESUMED} == {name: RESUMED[name].shape for name in RESUMED}


@pytest.mark.filterwarnings("ignore")
@given(spoilt(WHOLE))
def test_a_spoilt_one(data: bytes) -> None:
    """Kills: a traceback of torch's or pickle's; weights that are read with bits that are not theirs; a whole one
    that does not go on."""
    weights = resumed(data)
    assert weights is not None or data != WHOLE
    assert weights is None or all(torch.equal(weights[name], RESUMED[name]) for name in RESUMED)
