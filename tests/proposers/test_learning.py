"""Parts that learn while they serve: what is kept, how much time that takes, which weights serve, and what is saved."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplugins.config import ConfigError, JumpConfig, LearnConfig
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.methods import learns
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.heads.distillation import jump_guesser
from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
from vllm_specplugins.proposers.learning import learner as learner_module
from vllm_specplugins.proposers.learning import trainer
from vllm_specplugins.proposers.learning.examples import Examples
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.proposers.learning.pace import Pace, Stopped
from vllm_specplugins.proposers.learning.promotion import Comparison
from vllm_specplugins.proposers.learning.served import ServedEnd
from vllm_specplugins.proposers.learning.trainer import Trainer
from vllm_specplugins.proposers.learning.windows import LENGTH, Windows
from vllm_specplugins.target import Reading

HIDDEN, VOCAB, K = 16, 12, 3
SMALL = 16 * LENGTH * HIDDEN * 4  # bytes of 16 windows


def windows(max_bytes: int = SMALL) -> Windows:
    return Windows(max_bytes, HIDDEN, "cpu", torch.float32)


def reading(places: dict[str, list[int]], **options: dict[str, Any]) -> Reading:
    """Of requests at these positions; a state, a token and the next one are told by request and position."""
    flat = [(name, position) for name, own in places.items() for position in own]
    positions = [position for _, position in flat]
    values = np.array([1000 * int(name[1:]) + position for name, position in flat], np.int32)
    return Reading(
        list(places), [options.get(name, {}) for name in places], [0.0] * len(places), list(map(len, places.values())),
        positions, values, values + 1, torch.from_numpy(values).float()[:, None].expand(-1, HIDDEN),
    )  # fmt: skip


def test_windows_hold_what_was_read() -> None:
    """Kills: a place that is written over, a request's window that goes on after a gap, one of the next request's."""
    kept = windows(1 << 20)
    examples = Examples(kept, shortest=5)
    for start in range(0, 90, 3):
        examples.add(reading({"r1": [start, start + 1, start + 2], "r2": [start // 3]}))
    examples.add(reading({"r1": [200]}))  # it was preempted, and came back with more
    examples.add(reading({"r1": list(range(201, 207))}))
    examples.forget(["r1", "r2", "r9"])
    found = [kept.read(slot) for held in (True, False) for slot in kept.sample(held, 99, np.random.default_rng(0))]
    assert sorted(len(window.token_ids) for window in found if window) == [7, 26, 30, 64]
    for window in found:
        assert window is not None
        first = int(window.token_ids[0])
        assert window.token_ids.tolist() == list(range(first, first + len(window.token_ids)))
        assert torch.equal(window.next_ids, window.token_ids + 1)
        assert torch.equal(window.states[:, 0].long(), window.token_ids)
    assert examples.num_tokens == 90 + 30 + 7


def test_a_request_that_does_not_want_it_leaves_nothing() -> None:
    """Kills: `learn` false that is not looked at."""
    kept = windows()
    examples = Examples(kept, shortest=2)
    for start in range(0, 300, 10):
        examples.add(reading({"r1": list(range(start, start + 10))}, r1={"learn": False}))
    examples.forget(["r1"])
    assert examples.num_tokens == kept.num_closed == 0


def test_a_flood_takes_its_part() -> None:
    """In bounded memory. Kills: the oldest window of all that goes, windows without end, a limit in tokens."""
    kept = windows()
    assert kept.num_bytes <= SMALL + 16 * (LENGTH + 1) * 8
    examples = Examples(kept, shortest=2)
    rare, flood = {"tenant": b"rare"}, {"tenant": b"flood"}
    for number in range(24):
        examples.add(reading({f"r{number}": list(range(8))}, **{f"r{number}": rare}))
        examples.forget([f"r{number}"])
    of_rare = {held: kept.count(held) for held in (True, False)}
    for number in range(24, 2000):
        examples.add(reading({f"r{number}": list(range(8))}, **{f"r{number}": flood}))
        examples.forget([f"r{number}"])
    for held, before in of_rare.items():
        found = [kept.read(slot) for slot in kept.sample(held, 99, np.random.default_rng(0))]
        own = [window for window in found if window and window.tenant == hash(b"rare")]
        assert before > 1 and len(own) >= len(found) // 2 == before // 2


def test_a_window_that_changes_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: half of one request's states and half of another's."""
    kept = windows()
    slot = kept.open(True, 0, 0.0)
    assert slot is not None and kept.read(slot) is None, "not finished"
    kept.close(slot, 5)
    assert kept.read(slot) is not None
    original = torch.from_numpy

    def meanwhile(array: Any) -> torch.Tensor:
        kept._is_free[slot] = True
        assert kept.open(True, 1, 0.0) == slot
        kept.close(slot, 5)
        return original(array)

    monkeypatch.setattr(torch, "from_numpy", meanwhile)
    assert kept.read(slot) is None


@pytest.mark.parametrize(("busy", "share"), [(True, 0.1), (False, 0.5), (False, 1.0)])
def test_pace(busy: bool, share: float) -> None:
    """Kills: a rest that is too short, or the idle share while there are steps."""
    now, waited = 0.0, 0.0

    def wait(seconds: float) -> bool:
        nonlocal now, waited
        now, waited = now + seconds, waited + seconds
        if busy:
            pace.stepped_at = now
        return False

    pace = Pace(0.1, 1.0 if share == 1 else 0.5, lambda: now, wait)
    pace.stepped_at = 0.0 if busy else -10.0
    for _ in range(5):
        now += 0.3
        pace.stepped_at = now if busy else pace.stepped_at
        pace.rest()
    assert pace.worked_s == pytest.approx(1.5)
    assert 1.5 / (1.5 + waited) == pytest.approx(share, rel=0.02)
    stopped = Pace(0.1, 0.5)
    stopped.stop()
    with pytest.raises(Stopped):
        stopped.pause(9.0)


def test_comparison() -> None:
    """Kills: a mean without its error, a tenant that loses, too few windows, numbers that are none."""
    random = np.random.default_rng(0)
    nobody = np.zeros(64, np.int64)
    assert not Comparison(random.normal(0.02, 0.3, 64), nobody).is_better
    assert Comparison(random.normal(0.2, 0.3, 64), nobody).is_better
    assert Comparison(random.normal(-0.2, 0.3, 64), nobody).is_worse
    tenants = np.repeat([5, 7], (52, 12))
    flooded = Comparison(np.where(tenants == 5, 0.5, -0.2) + random.normal(0, 0.05, 64), tenants)
    assert flooded.differences.mean() > 0.3 and not flooded.is_better and flooded.is_worse
    assert not Comparison(np.full(64, np.nan), nobody).is_better and Comparison(np.full(64, np.nan), nobody).is_worse
    assert not Comparison(np.full(3, 9.0), nobody[:3]).is_better


# A target of a text in which each token says the next one: t -> 5 t + 1, as long as `shift` is 1.


def served_end() -> ServedEnd:
    torch.manual_seed(0)
    table, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    return ServedEnd(lambda ids: table[ids], torch.ones(HIDDEN), 1e-5, head, 1.0, None, 2)


def jump_head(scale: float = 0.0) -> JumpHead:
    config = JumpHeadConfig(
        early_layers=0, late_layer=2, num_layers=2, hidden_size=HIDDEN, inner_size=32, rms_norm_eps=1e-5
    )
    torch.manual_seed(1)
    weights = {name: scale * torch.randn(like.shape) for name, like in JumpHead(config).state_dict().items()}
    weights["norm.weight"], weights["up.weight"] = torch.ones(HIDDEN), torch.randn(32, 2 * HIDDEN) / 6
    return JumpHead(config, weights)


def traffic(end: ServedEnd, examples: Examples, requests: range, tenant: bytes = b"", shift: int = 1) -> None:
    """Requests whose states say the next token, which follows from the last one."""
    for number in requests:
        token_ids = [number % VOCAB]
        for _ in range(40):
            token_ids.append((5 * token_ids[-1] + shift) % VOCAB)
        ids = np.array(token_ids, np.int32)
        states = 3 * torch.nn.functional.normalize(end.head_weight[ids[1:]], dim=-1)
        own = {"tenant": tenant} if tenant else {}
        examples.add(Reading([f"r{number}"], [own], [0.0], [40], list(range(40)), ids[:-1], ids[1:], states))
        examples.forget([f"r{number}"])


class Taught:
    """A trainer that never rests, and what it promotes."""

    def __init__(self, loaded: JumpHead, serving: JumpHead | None = None):
        self.end, kept = served_end(), windows(1 << 20)
        self.examples, self.served = Examples(kept, K + 2), [loaded]
        own = self.end, jump_guesser, kept, K, Pace(1, 1)
        self.trainer = Trainer(loaded, serving or loaded, *own, self.served.append)


def test_learns() -> None:
    """Kills: no step taken, a candidate that is never served, states or tokens one place off."""
    taught = Taught(jump_head())
    traffic(taught.end, taught.examples, range(200))
    for _ in range(8):
        taught.trainer.round()
    results = taught.trainer.results
    assert results.promotions > 0 and results.rollbacks == 0 and len(taught.served) == 1 + results.promotions
    assert results.lengths["loaded"] < 2 and results.lengths["serving"] > 3.5, "of at most 4"


def test_waits_for_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a test on a few windows, training again and again on what was learned by heart."""
    taught = Taught(jump_head())
    pauses: list[float] = []
    monkeypatch.setattr(trainer, "PASSES", 1)
    taught.trainer._pace.pause = pauses.append  # type: ignore[method-assign]
    traffic(taught.end, taught.examples, range(12))
    taught.trainer.round()
    assert len(pauses) == 1 and taught.trainer.results.steps == 0
    traffic(taught.end, taught.examples, range(12, 100))
    while len(pauses) < 2:
        taught.trainer.round()
    assert taught.trainer.results.steps <= 100 // trainer.STEP_WINDOWS + trainer.ROUND_STEPS


@pytest.mark.parametrize("value", [0.3, float("nan")])
def test_garbage_is_dropped(value: float) -> None:
    """A candidate of noise serves nobody, and training goes on from what serves. Kills: promotion without a test, NaN
    that passes for better, or that stays."""
    taught = Taught(jump_head())
    traffic(taught.end, taught.examples, range(200))
    for _ in range(6):
        taught.trainer.round()
    good, before = taught.trainer.results.lengths["serving"], len(taught.served)
    for part in (taught.trainer.candidate, taught.trainer._trained):
        for tensor in part.parameters():
            tensor.data += value * torch.randn(tensor.shape)
    taught.trainer.test()
    assert len(taught.served) == before
    assert taught.trainer.results.lengths["serving"] == pytest.approx(good, abs=0.2)
    assert all(map(torch.equal, taught.trainer._trained.parameters(), taught.trainer.serving.parameters()))


def test_garbage_that_serves_is_rolled_back() -> None:
    """To the weights that were loaded. Kills: a test against what serves alone."""
    good = Taught(jump_head())
    traffic(good.end, good.examples, range(200))
    for _ in range(8):
        good.trainer.round()
    loaded = good.trainer.serving
    taught = Taught(loaded, jump_head(0.5))
    traffic(taught.end, taught.examples, range(200))
    taught.trainer.test()
    assert taught.trainer.results.rollbacks == 1
    assert all(map(torch.equal, taught.served[-1].parameters(), loaded.parameters()))


def test_a_flood_does_not_cost_others() -> None:
    """A tenant whose text contradicts another's: its weights serve only where the other loses nothing by them. Kills:
    promotion by the mean of all."""
    good = Taught(jump_head())
    traffic(good.end, good.examples, range(200))
    for _ in range(8):
        good.trainer.round()
    taught = Taught(good.trainer.serving)
    traffic(taught.end, taught.examples, range(120), b"rare")
    traffic(taught.end, taught.examples, range(120, 1000), b"flood", shift=3)
    for _ in range(4):
        taught.trainer.round()
    own, _ = taught.trainer._lengths({"loaded": taught.trainer._loaded, "serving": taught.trainer.serving})
    tenants = np.array(_)
    of_rare = np.array(own)[tenants == hash(b"rare")]
    assert len(of_rare) >= 8 and of_rare[:, 1].mean() >= of_rare[:, 0].mean() - 0.05


CONTEXT = ProposerContext(VOCAB, 64, 8, K, lambda text: [])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Learner]:
    """A learner of a jump in a folder, and the thread that would train does not begin."""
    jump_head().save(tmp_path / "head")

    def made(**config: Any) -> Learner:
        part = JumpHead.load(tmp_path / "head")
        learner = Learner(part, LearnConfig(**config), CONTEXT, str(tmp_path / "head"), jump_guesser)
        learner._thread = threading.Thread(target=lambda: None)
        learner.begin(served_end())
        return learner

    return made


def promote(learner: Learner, scale: float) -> JumpHead:
    assert learner.trainer is not None
    part = jump_head(scale)
    learner.trainer._serve(part, np.array([2.0]), np.array([1.0]))
    return part


def test_weights_change_between_steps(make: Callable[..., Learner]) -> None:
    """In place, when the engine sees a step. Kills: another tensor than the one that a graph reads; a swap within a
    step."""
    learner = make()
    tensors = [(tensor, tensor.data_ptr()) for tensor in learner._part.parameters()]
    part = promote(learner, 0.7)
    assert not torch.equal(learner._part.mix.weight, part.mix.weight)
    with torch.inference_mode():
        learner.see(reading({"r1": [3]}))
    assert all(map(torch.equal, learner._part.parameters(), part.parameters()))
    assert [tensor.data_ptr() for tensor in learner._part.parameters()] == [address for _, address in tensors]
    assert learner.counts()["examples"] == 1


def test_saved_and_gone_on_from(make: Callable[..., Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a card; a save that is cut short leaves the last one whole. Kills: a file written in place; an engine that
    begins again with what it was given first; the weights of a roll back that are not saved."""
    folder = tmp_path / "learned"
    learner = make(path=str(folder))
    learner.close()
    assert not folder.exists(), "nothing was learned"
    first = promote(learner, 0.5)
    learner.close()
    assert "1.000 as it was, 2.000 now" in (folder / "README.md").read_text()
    promote(learner, 0.6)

    def killed(self: JumpHead, folder: Path, dtype: Any) -> None:
        (folder / JumpHead.file).write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(JumpHead, "save", killed)
        learner._save()
    again = make(path=str(folder))
    assert all(map(torch.equal, again._part.parameters(), first.parameters()))
    assert again.trainer is not None
    assert not torch.equal(again.trainer._loaded.mix.weight, first.mix.weight), "which a roll back goes to"


def test_a_folder_that_cannot_be_used(
    make: Callable[..., Learner], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, and it goes on. Kills: an engine that dies of a full disk or of a damaged file."""
    monkeypatch.setattr(learner_module.logger, "propagate", True)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / JumpHead.file).write_bytes(b"no tensors")
    make(path=str(tmp_path / "bad"))
    assert "learn: path is begun anew: jump: head must be a folder with a readable config.json" in caplog.text
    (tmp_path / "file").write_text("")
    learner = make(path=str(tmp_path / "file" / "below"))
    promote(learner, 0.5)
    learner.close()
    learner.close()
    assert caplog.text.count("cannot be written") == 1


def test_what_fails_ends_the_learning_alone(
    make: Callable[..., Learner], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: an exception of ours in the engine's thread, or in every round of the other."""
    monkeypatch.setattr(learner_module.logger, "propagate", True)
    learner = make()
    assert learner.trainer is not None
    monkeypatch.setattr(learner.trainer, "round", lambda: 1 / 0)
    learner._run()
    assert "Learning ends (ZeroDivisionError" in caplog.text
    learner.see(reading({"r1": [3]}))
    learner.forget(["r1"])
    assert learner.counts()["examples"] == 0


def test_configuration() -> None:
    """One sentence each. Kills: a wrong field that is passed over; false that learns."""
    assert JumpConfig(head="x").learn is None and JumpConfig(head="x", learn=False).learn is None
    assert JumpConfig(head="x", learn={"busy_share": 0.2}).learn == LearnConfig(busy_share=0.2)
    raw = {"method": "jump", "head": "x"}
    assert learns(parse_config({**raw, "learn": True})) and not learns(parse_config(raw))
    with pytest.raises(ConfigError, match=r"^jump: learn must be true, false or a dictionary, not 'yes'\.$"):
        parse_config({**raw, "learn": "yes"})
    with pytest.raises(ConfigError, match=r"^jump: learn: busy_share must be a number from 0.001 to 1, not 2\.$"):
        parse_config({**raw, "learn": {"busy_share": 2}})
    with pytest.raises(ConfigError, match=r"^jump: learn: 'share' is not a field; the fields are busy_share, "):
        parse_config({**raw, "learn": {"share": 2}})
