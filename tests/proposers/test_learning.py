"""Parts that learn while they serve: what is kept, how much time that takes, which weights serve, and what is saved."""

import dataclasses
import os
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplugins.config import ConfigError
from vllm_specplugins.config.learn import LearnConfig
from vllm_specplugins.methods import has_tenants
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
from vllm_specplugins.proposers.heads.medusa_heads import MedusaHeads
from vllm_specplugins.proposers.learning import learner as learner_module
from vllm_specplugins.proposers.learning import trainer
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.proposers.learning.pace import Pace, Stopped
from vllm_specplugins.proposers.learning.promotion import Comparison
from vllm_specplugins.proposers.learning.served import ServedEnd
from vllm_specplugins.proposers.learning.trainer import Trainer
from vllm_specplugins.proposers.learning.windows import LENGTH, ExitStates, Window, Windows
from vllm_specplugins.target import Reading

HIDDEN, VOCAB, K = 16, 12, 3
SMALL = 16 * LENGTH * HIDDEN * 4  # bytes of 16 windows


def windows(max_bytes: int = SMALL, min_length: int = 2) -> Windows:
    return Windows(max_bytes, HIDDEN, "cpu", torch.float32, min_length)


def sampled(kept: Windows) -> dict[bool, list[Window]]:
    """All windows, by whether they are held out."""
    return {held: kept.sample(held, 999, np.random.default_rng(0)) for held in (True, False)}


def reading(places: dict[str, list[int]], gone: Sequence[str] = (), **options: dict[str, Any]) -> Reading:
    """Of requests at these positions; a state, a token and the next one are told by request and position."""
    flat = [(name, position) for name, own in places.items() for position in own]
    positions = [position for _, position in flat]
    values = np.array([1000 * int(name[1:]) + position for name, position in flat], np.int32)
    return Reading(
        list(places), [options.get(name, {}) for name in places], [0.0] * len(places), list(map(len, places.values())),
        positions, values, values + 1, torch.from_numpy(values).float()[:, None].expand(-1, HIDDEN), gone,
    )  # fmt: skip


def test_windows_hold_what_was_read() -> None:
    """Kills: a place that is written over, a request's window that goes on after a gap, one of the next request's."""
    kept = windows(1 << 20, min_length=5)
    for start in range(0, 90, 3):
        kept.add(reading({"r1": [start, start + 1, start + 2], "r2": [start // 3]}))
    kept.add(reading({"r1": [200]}))  # it was preempted, and came back with more
    kept.add(reading({"r1": list(range(201, 207))}))
    kept.add(reading({}, gone=["r1", "r2", "r9"]))
    found = [window for own in sampled(kept).values() for window in own]
    assert sorted(len(window.token_ids) for window in found) == [7, 26, 30, 64]
    for window in found:
        first = int(window.token_ids[0])
        assert window.token_ids.tolist() == list(range(first, first + len(window.token_ids)))
        assert torch.equal(window.next_ids, window.token_ids + 1)
        assert torch.equal(window.states[:, 0].long(), window.token_ids)
    assert kept.num_tokens == 90 + 30 + 7


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
def test_states_that_nobody_can_train_on(value: float) -> None:
    """A state with one such number ends its window. Fails if a number that makes the weights NaN gets into a window."""
    kept, read = windows(min_length=1), reading({"r1": list(range(9))})
    states = read.states.clone()
    states[4, 7] = value
    kept.add(dataclasses.replace(read, states=states))
    kept.add(reading({}, gone=["r1"]))
    found = [own for side in sampled(kept).values() for own in side]
    assert sorted(len(own.states) for own in found) == [4, 4] and all(own.states.isfinite().all() for own in found)


def test_a_request_that_does_not_want_it_leaves_nothing() -> None:
    """Kills: `learn` false that is not looked at."""
    kept = windows()
    for start in range(0, 300, 10):
        kept.add(reading({"r1": list(range(start, start + 10))}, r1={"learn": False}))
    kept.add(reading({}, gone=["r1"]))
    assert kept.num_tokens == kept.num_closed == 0


def test_a_flood_takes_its_part() -> None:
    """In bounded memory. Kills: the oldest window of all that goes, windows without end, a limit in tokens."""
    kept = windows()
    assert kept.num_bytes <= SMALL
    for number in range(2000):
        own = {f"r{number}": {"tenant": b"rare" if number < 24 else b"flood"}}
        kept.add(reading({f"r{number}": list(range(8))}, gone=[f"r{number - 1}"], **own))
        if number == 24:
            of_rare = {held: kept.count(held) for held in (True, False)}
    for held, found in sampled(kept).items():
        own_windows = [window for window in found if window.tenant == hash(b"rare")]
        assert of_rare[held] > 1 and len(own_windows) >= len(found) // 2 >= of_rare[held] // 2 - 1


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
        stopped.pause()


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


def exit_head() -> ExitHead:
    torch.manual_seed(1)
    config = ExitHeadConfig(exit_layer=1, hidden_size=HIDDEN, vocab_size=VOCAB, rms_norm_eps=1e-5)
    return ExitHead(config, {"norm.weight": torch.ones(HIDDEN), "head.weight": torch.randn(VOCAB, HIDDEN) / 9})


def medusa_heads() -> MedusaHeads:
    """That say each token again."""
    torch.manual_seed(1)
    return MedusaHeads([(torch.zeros(K, HIDDEN, HIDDEN), torch.zeros(K, 1, HIDDEN))], None, None, VOCAB)


def traffic(end: ServedEnd, kept: Windows, requests: range, tenant: bytes = b"", shift: int | None = 1) -> None:
    """Requests whose states say the next token, which follows from the last one; random ones without a shift."""
    random = np.random.default_rng(requests.start)
    for number in requests:
        token_ids = [number % VOCAB]
        for _ in range(40):
            follows = int(random.integers(VOCAB)) if shift is None else 5 * token_ids[-1] + shift
            token_ids.append(follows % VOCAB)
        ids = np.array(token_ids, np.int32)
        states = 3 * torch.nn.functional.normalize(end.head_weight[ids[1:]], dim=-1)
        own = {"tenant": tenant} if tenant else {}
        if kept._states.shape[-1] > HIDDEN:  # an exit's layer
            states = torch.cat((end.embed(ids[:-1]), states), dim=-1)
        kept.add(Reading([f"r{number}"], [own], [0.0], [40], list(range(40)), ids[:-1], ids[1:], states))
        kept.add(reading({}, gone=[f"r{number}"]))


class Taught:
    """A trainer that never rests, and what it promotes."""

    def __init__(self, loaded: Any, serving: Any = None):
        self.end, self.served = served_end(), [loaded]
        size = (1 + isinstance(loaded, ExitHead)) * HIDDEN
        self.windows = Windows(1 << 21, size, "cpu", torch.float32, K + 2)
        own = self.end, self.windows, K, Pace(1, 1)
        self.trainer = Trainer(loaded, serving or loaded, *own, self.served.append)


@cache
def learned(make: Callable[[], Any], rounds: int) -> Taught:
    """After as many rounds, in which it has learned this text."""
    taught = Taught(make())
    traffic(taught.end, taught.windows, range(200))
    for _ in range(rounds):
        taught.trainer.round()
    counts, lengths = taught.trainer.counts, taught.trainer.lengths
    assert counts["promotions"] > 0 == counts["rollbacks"] and len(taught.served) == 1 + counts["promotions"]
    assert lengths["loaded"] < 2 and lengths["serving"] > 3.5, "of at most 4"
    return taught


def good_head() -> JumpHead:
    """That knows this text."""
    return learned(jump_head, 8).trainer.serving


@pytest.mark.parametrize(("make", "rounds"), [(jump_head, 8), (exit_head, 8), (medusa_heads, 20)])
def test_learns(make: Callable[[], Any], rounds: int) -> None:
    """Each kind. Kills: no step taken, a candidate that is never served, states or tokens one place off."""
    learned(make, rounds)


@pytest.mark.parametrize("make", [jump_head, exit_head, medusa_heads])
def test_a_rehearsal(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the memory of a step: gradients, moments, logits of whole windows. Fails if one of these is not made, or
    if anything of it is served, counted or trained on."""
    taught, steps = Taught(make()), list[Any]()
    optimize, own = torch.optim.AdamW.step, taught.trainer
    before = [tensor.clone() for part in (own._trained, own.candidate, own.serving) for tensor in part.parameters()]

    def step(optimizer: Any) -> None:
        optimize(optimizer)
        steps.append([len(optimizer.state[tensor]) for tensor in own._trained.parameters() if tensor.grad is not None])

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    logits, lengths = ServedEnd.logits, []
    monkeypatch.setattr(ServedEnd, "logits", lambda *given: lengths.append(len(given[1])) or logits(*given))
    own.rehearse()
    after = [tensor for part in (own._trained, own.candidate, own.serving) for tensor in part.parameters()]
    assert len(steps) == 1 and steps[0] and min(steps[0]) >= 2 and lengths.count(64) >= trainer.STEP_WINDOWS
    assert all(map(torch.equal, before, after)) and set(own.counts.values()) == {0} and len(taught.served) == 1
    assert not own._optimizer.state and own._num_trained == 0 == taught.windows.num_tokens


def test_waits_for_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a test on a few windows, training again and again on what was learned by heart."""
    taught = Taught(jump_head())
    pauses: list[None] = []
    monkeypatch.setattr(trainer, "PASSES", 1)
    taught.trainer._pace.pause = lambda: pauses.append(None)  # type: ignore[method-assign]
    traffic(taught.end, taught.windows, range(12))
    taught.trainer.round()
    assert len(pauses) == 1 and taught.trainer.counts["steps"] == 0
    traffic(taught.end, taught.windows, range(12, 100))
    while len(pauses) < 2:
        taught.trainer.round()
    assert taught.trainer.counts["steps"] <= 100 // trainer.STEP_WINDOWS + trainer.ROUND_STEPS


@pytest.mark.parametrize("value", [0.3, float("nan")])
def test_garbage_is_dropped(value: float) -> None:
    """A candidate of noise is not promoted, and training continues from the served weights. Fails if promotion needs no
    test, if NaN counts as better, or if NaN stays."""
    taught = learned(jump_head, 8)
    good, before = taught.trainer.lengths["serving"], len(taught.served)
    for part in (taught.trainer.candidate, taught.trainer._trained):
        for tensor in part.parameters():
            tensor.data += value * torch.randn(tensor.shape)
    taught.trainer.test()
    assert len(taught.served) == before
    assert taught.trainer.lengths["serving"] == pytest.approx(good, abs=0.2)
    assert all(map(torch.equal, taught.trainer._trained.parameters(), taught.trainer.serving.parameters()))


def test_garbage_that_serves_is_rolled_back() -> None:
    """Bad served weights are rolled back to the loaded ones. Fails if a test compares only with the served weights."""
    loaded = good_head()
    taught = Taught(loaded, jump_head(0.5))
    traffic(taught.end, taught.windows, range(200))
    taught.trainer.test()
    assert taught.trainer.counts["rollbacks"] == 1
    assert all(map(torch.equal, taught.served[-1].parameters(), loaded.parameters()))


@pytest.mark.parametrize(("shift", "tenant"), [(3, b"rare"), (None, b"rare"), (None, b"")])
def test_a_flood_does_not_cost_others(shift: int | None, tenant: bytes) -> None:
    """Of a tenant whose text contradicts another's, or of random tokens, by another tenant or by nobody in particular:
    on fresh text the other is drafted for as well as by the weights that were loaded. Kills: promotion by the mean of
    all, or of whatever was trained; a tenant that pushes out the others' windows.
    """
    taught = Taught(good_head())
    traffic(taught.end, taught.windows, range(120), tenant)
    traffic(taught.end, taught.windows, range(120, 1200), tenant and b"flood", shift)
    for _ in range(6):
        taught.trainer.round()
    fresh = Taught(good_head())
    traffic(fresh.end, fresh.windows, range(5000, 5200), b"rare")
    lengths, _ = fresh.trainer._lengths({"loaded": taught.trainer._loaded, "serving": taught.trainer.serving})
    loaded, serving = (own.mean() for own in lengths.values())
    assert taught.trainer.counts["candidates"] == 6 and serving >= loaded - 0.05


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Learner]:
    """A learner of a jump in a folder, and the thread that would train does not begin."""
    jump_head().save(tmp_path / "head")

    def made(**config: Any) -> Learner:
        part = JumpHead.load(tmp_path / "head")
        learner = Learner(part, LearnConfig(**config), served_end(), K)
        learner._thread = threading.Thread(target=lambda: None)
        learner.begin(tuple)
        return learner

    return made


def promote(learner: Learner, scale: float) -> JumpHead:
    part, learner.trainer.lengths = jump_head(scale), {"loaded": 1.0, "serving": 2.0}
    learner.trainer.serving = part
    learner._promote(part)
    return part


def test_weights_change_between_steps(make: Callable[..., Learner]) -> None:
    """In place, when the engine sees a step. Kills: another tensor than the one that a graph reads; a swap within a
    step."""
    learner = make()
    tensors = [(tensor, tensor.data_ptr()) for tensor in learner._part.parameters()]
    part = promote(learner, 0.7)
    assert not torch.equal(learner._part.mix.weight, part.mix.weight)
    with torch.inference_mode():
        learner.step()
    assert all(map(torch.equal, learner._part.parameters(), part.parameters()))
    assert [tensor.data_ptr() for tensor in learner._part.parameters()] == [address for _, address in tensors]


def test_saved_and_gone_on_from(make: Callable[..., Learner], tmp_path: Path) -> None:
    """Kills: an engine that begins again with what it was given first, or rolls back to what was learned;
    the weights of a roll back that are not saved."""
    folder = tmp_path / "learned"
    learner = make(path=str(folder))
    learner.close()
    assert not folder.exists(), "nothing was learned"
    promote(learner, 0.6)
    learner.close()
    first = promote(learner, 0.5)
    learner.close()
    again = make(path=str(folder))
    assert all(map(torch.equal, again._part.parameters(), first.parameters()))
    assert not torch.equal(again.trainer._loaded.mix.weight, first.mix.weight), "which a roll back goes to"


# Bytes of a file after which the system stops the process, or files that are moved to their place before SIGKILL does.
STOPS = [(100, 9), (3000, 9), (1 << 20, 0), (1 << 20, 1)]


@pytest.mark.parametrize(("max_bytes", "most_moved"), STOPS)
def test_killed_while_it_saves(make: Callable[..., Learner], tmp_path: Path, max_bytes: int, most_moved: int) -> None:
    """At a chosen place: what was saved before is there and whole. Kills: files that are written in place, or moved
    before all are written; a damaged one that is loaded."""
    learner, replace = make(path=str(tmp_path / "learned")), os.replace
    first = promote(learner, 0.5)
    learner._save()
    assert 3000 < (tmp_path / "learned" / JumpHead.file).stat().st_size < 1 << 20

    def moved(*paths: Any) -> None:
        nonlocal most_moved
        if not most_moved:
            os.kill(os.getpid(), signal.SIGKILL)
        most_moved -= 1
        replace(*paths)

    def stopped() -> None:
        torch.set_num_threads(1)  # those of the process before are not there
        promote(learner, 0.6)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
        os.replace = moved
        learner._save()

    process = get_context("fork").Process(target=stopped)
    process.start()
    process.join(60)
    assert process.exitcode in (-signal.SIGXFSZ, -signal.SIGKILL)
    assert all(map(torch.equal, make(path=str(tmp_path / "learned"))._part.parameters(), first.parameters()))


def test_two_that_save_to_one_folder(
    make: Callable[..., Learner], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one saves, the second one says so and saves when the first has ended; links and files of others that
    lie there stay as they are, and what a killed process left there goes.

    Fails if both save, if names that somebody can guess are written to or moved, or if the lock outlives its holder.
    """
    monkeypatch.setattr(learner_module.logger, "propagate", True)
    folder, precious = tmp_path / "learned", tmp_path / "precious"
    for path in (folder, precious, folder / ".files.killed.partial", folder / "mine"):
        path.mkdir()
    (precious / "file").write_text("mine")
    for name in (".partial", ".files.link.partial"):
        (folder / name).symlink_to(precious)
    first, second = make(path=str(folder)), make(path=str(folder))
    part = promote(first, 0.5)
    first._save()
    promote(second, 0.6)
    for _ in range(2):
        second._save()
    assert all(map(torch.equal, make(path=str(folder))._part.parameters(), part.parameters()))
    assert caplog.text.count("another process writes to it") == 1
    first.close()
    second._save()
    assert not torch.equal(make(path=str(folder))._part.mix.weight, part.mix.weight)
    names = {".partial", ".files.link.partial", "mine", JumpHead.file, "config.json"}
    assert {path.name for path in folder.iterdir()} == names and (precious / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_used(
    make: Callable[..., Learner], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has one sentence, and the engine continues. Fails if a full disk or a damaged file ends the engine."""
    monkeypatch.setattr(learner_module.logger, "propagate", True)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / JumpHead.file).write_bytes(b"no tensors")
    make(path=str(tmp_path / "bad"))
    assert "do not fit: jump: head must be a folder with the config.json of a head" in caplog.text
    (tmp_path / "file").write_text("")
    learner = make(path=str(tmp_path / "file" / "below"))
    promote(learner, 0.5)
    learner.close()
    learner.close()
    assert caplog.text.count("weights cannot be saved") == 1


def test_what_fails_ends_the_learning_alone(
    make: Callable[..., Learner], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: an exception of ours in the engine's thread, or in every round of the other."""
    monkeypatch.setattr(learner_module.logger, "propagate", True)
    learner = make()
    monkeypatch.setattr(learner.trainer, "round", lambda: 1 / 0)
    learner._run()
    assert "training stops (ZeroDivisionError" in caplog.text
    learner.step()
    assert not learner.is_on


def test_configuration() -> None:
    """One sentence each. Kills: a wrong field that is passed over; false that learns."""
    raw = {"method": "jump", "head": "x"}
    assert parse_config({**raw, "learn": {"busy_share": 0.2}}).method_config.learn == LearnConfig(busy_share=0.2)
    assert not has_tenants(parse_config({**raw, "learn": False})) and not has_tenants(parse_config(raw))
    for own in (raw, {"method": "medusa", "heads": "x"}, {"method": "early_exit", "exit_layer": 1}):
        stages = [{"method": "prompt_lookup"}, {**own, "learn": True}]
        assert has_tenants(parse_config({**own, "learn": True}))
        assert has_tenants(parse_config({"method": "cascade", "num_speculative_tokens": 2, "stages": stages}))
    with pytest.raises(ConfigError, match=r"^jump: learn must be true, false or a dictionary, not 'yes'\.$"):
        parse_config({**raw, "learn": "yes"})
    with pytest.raises(ConfigError, match=r"^jump: learn: busy_share must be a number from 0.001 to 1, not 2\.$"):
        parse_config({**raw, "learn": {"busy_share": 2}})
    with pytest.raises(ConfigError, match=r"^jump: learn: 'share' is not a field; the fields are busy_share, "):
        parse_config({**raw, "learn": {"share": 2}})


def test_exit_states() -> None:
    """Kills: a state after other tokens, of another request, of the draft before, or where nothing was read."""
    exits, nobody = ExitStates(4, 3, 2, "cpu", torch.float32), torch.full((3, 2), torch.nan)
    drafts, firsts = torch.tensor([[5, 6, 7], [8, 9, 4]]), torch.tensor([10, 20])
    for step in range(3):
        exits.put(step, drafts[:, step], firsts + step, drafts[:, step, None].float().expand(-1, 2))
    read = torch.tensor([[8, 9, 9], [5, 6, 7], [5, 6, 7], [8, 9, 4]])
    rows, places = torch.tensor([1, 0, -1, 1]), torch.tensor([[-1, 0, 1, 2, 3]])
    found = exits.after(rows, read, torch.tensor([20, 10, 10, 21]), places)[..., 0]
    nan = torch.nan
    expected = torch.tensor([[nan, 8, 9, nan, nan], [nan, 5, 6, 7, nan], [nan] * 5, [nan] * 5])
    assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))
    exits.put(0, drafts[:1, 0], firsts[:1], nobody[:1])
    assert exits.after(rows[:2], read[:2], firsts.flip(0), places).isnan().all()
