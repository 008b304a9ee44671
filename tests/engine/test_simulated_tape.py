"""The simulated device alone: tapes, streams and late copies, without an engine."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl
from simulated_device.device import Device, simulated_device
from simulated_device.guard import DeviceError
from simulated_device.tape import CaptureError, TapeGraph

HERE = torch.device("cpu")  # what vLLM calls the device


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    with simulated_device() as device, device.guard.active(), torch.inference_mode():
        yield device


@triton.jit
def _add_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + 1, mask=mask)


def on_device(*values: float) -> torch.Tensor:
    return torch.tensor(values, device=HERE)


def on_host(tensor: torch.Tensor) -> list[Any]:
    return tensor.cpu().tolist()


def record(function: Callable[[], Any]) -> tuple[TapeGraph, Any]:
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def test_replay_reads_new_inputs_and_writes_old_outputs() -> None:
    """Kills: a replay into new memory."""
    x = on_device(0.0, 1.0, 2.0, 3.0)
    graph, y = record(lambda: (x.view(2, 2).t() @ x.view(2, 2)).relu() + x[0])
    address = y.data_ptr()
    for _ in range(3):
        x.copy_(torch.randn(4), non_blocking=True)
        graph.replay()
        assert on_host(y) == on_host((x.view(2, 2).t() @ x.view(2, 2)).relu() + x[0]) and y.data_ptr() == address
    assert graph.num_replays == 3


def test_a_capture_leaves_no_trace() -> None:
    """Kills: a total that a capture changes; results that are there before the first replay."""
    x, total, out = on_device(1, 1, 1), on_device(0, 0, 0), on_device(0, 0, 0)

    def step() -> torch.Tensor:
        total.add_(x)
        torch.mul(total, 2, out=out)
        out[1:].clamp_(max=5)
        return total + 1

    graph, made = record(step)
    assert on_host(total) == [0, 0, 0] and 1 not in on_host(made)
    for _ in range(3):
        graph.replay()
    assert on_host(total) == [3, 3, 3] and on_host(out) == [6, 5, 5] and on_host(made) == [4, 4, 4]


def test_launches() -> None:
    x, y = on_device(0.0, 1.0, 2.0, 3.0), torch.zeros(4, device=HERE)
    graph, _ = record(lambda: _add_kernel[(1,)](x, y, 4, BLOCK=4))
    assert on_host(y) == [0, 0, 0, 0]
    x.mul_(10)
    graph.replay()
    assert on_host(y) == [1, 11, 21, 31] and graph.contents == {"triton._add_kernel": 1}


def test_python_does_not_run_again() -> None:
    """A host value is baked into a graph, and a branch is taken once."""
    x, calls = torch.ones(2, device=HERE), []

    def step() -> torch.Tensor:
        calls.append(1)
        return x * len(calls)

    graph, y = record(step)
    graph.replay()
    graph.replay()
    assert calls == [1] and on_host(y) == [1, 1]


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu", non_blocking=True),
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: torch.nonzero(x),
    "numbers": lambda x: torch.tensor([1.0, 2.0]) + x[0],
    "bool": lambda x: bool(x[0] > 1),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "index": lambda x: [0] * x.long()[0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_capture(name: str) -> None:
    """Kills: any of the ways to the host, let through."""
    x = torch.ones(2, device=HERE)
    with pytest.raises(CaptureError):
        record(lambda: REFUSED[name](x))
    assert not torch.cuda.is_current_stream_capturing()


def test_a_wait_ends_a_capture() -> None:
    """Fails if a capture continues after a wait whose exception was caught, which no GPU allows."""
    x = torch.ones(2, device=HERE)

    def step(uses: bool) -> None:
        with contextlib.suppress(CaptureError):
            x[0].item()
        if uses:
            x.add_(1)

    for uses in (True, False):
        with pytest.raises(CaptureError, match="since a wait"):
            record(lambda uses=uses: step(uses))
    assert not torch.cuda.is_current_stream_capturing()
    graph, _ = record(lambda: x.add_(1))
    graph.replay()
    assert on_host(x) == [2, 2]


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda x: x.to("cpu", non_blocking=True),
    "copy": lambda x: torch.zeros(3, dtype=x.dtype).copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_late(name: str) -> None:
    """Kills: a copy that is there before the host has waited for it."""
    x, event = on_device(0, 1, 2), torch.cuda.Event()
    host = COPIES[name](x)
    event.record()
    x.add_(1)
    assert host.tolist() != [0, 1, 2]
    event.synchronize()
    assert host.tolist() == [0, 1, 2], "the copy came before the addition on its stream"


def test_a_side_stream_reads_late() -> None:
    """Kills: a source that is overwritten before a copy on another stream has read it, and is not seen."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = on_device(0, 1, 2)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        host, safe = x.to("cpu", non_blocking=True), x.clone().to("cpu", non_blocking=True)
        event = side.record_event()
    x.add_(1)  # nothing makes the main stream wait
    event.synchronize()
    assert host.tolist() == [1, 2, 3] and safe.tolist() == [0, 1, 2]
    with torch.cuda.stream(side):
        host = x.to("cpu", non_blocking=True)
    main.wait_stream(side)
    x.add_(1)
    side.synchronize()
    assert host.tolist() == [1, 2, 3]


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: REFUSED[name] for name in ("item", "tolist", "cpu", "mask", "nonzero", "bool", "index", "repeats")},
    "int": lambda x: int(x[0] * 2),
    "derived": lambda x: (x.view(1, 2).t() + 1).sum().item(),
    "copy": lambda x: torch.zeros(2).copy_(x),
    "to the device": lambda x: x.copy_(torch.from_numpy(x.cpu().numpy())),
    "assert": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_step_that_waits(device: Device, name: str) -> None:
    """Kills: a way to read the device that the guard does not see; the line is this file's."""
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    x = torch.ones(2, device=HERE)
    with device.waits_forbidden():
        WAITS[name](x)  # not in a step: engines may wait while they start
        with device.ledger.step():
            with gpu_sync_allowed():
                WAITS[name](x)
            before = device.ledger.places.total()
            with pytest.raises(DeviceError, match=r"test_simulated_tape.py:\d+ .* waits for the device"):
                WAITS[name](x)
    assert before >= 1 and device.ledger.places.total() == before + 1


def test_the_host_may_read_what_is_its_own(device: Device) -> None:
    """Kills: a guard that takes every tensor for the device's."""
    with device.waits_forbidden(), device.ledger.step():
        host = torch.tensor([1.0, 2.0])
        on = host.to(HERE, non_blocking=True)
        assert host.tolist() == [1, 2] and host.numpy().sum() == 3 and int(host[1]) == 2
        on.add_(1)
        assert host.tolist() == [1, 2], "a copy to the device is a copy"
        with pytest.raises(DeviceError, match="on the host and on the device"):
            _ = on + host
    assert not device.ledger.places


def test_an_event_of_an_earlier_step_is_no_wait(device: Device) -> None:
    event = torch.cuda.Event()
    with device.ledger.step():
        event.record()
    with device.waits_forbidden(), device.ledger.step():
        event.synchronize()
        event.record()
        with pytest.raises(DeviceError):
            event.synchronize()


def test_a_new_request_of_lookahead(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: tokens that a step waits for until they are on the device."""
    from vllm_specplugins.config import LookaheadConfig
    from vllm_specplugins.draft import ProposerContext
    from vllm_specplugins.engine.v2.trees.lookahead import LookaheadSpeculator, TreeSpeculator
    from vllm_specplugins.proposers.lookahead import Lookahead

    monkeypatch.setattr(TreeSpeculator, "add", lambda *_: None)
    speculator = object.__new__(LookaheadSpeculator)
    speculator.device = HERE
    context = ProposerContext(100, 64, 2, 29, tokenize=lambda text: [], device=HERE)
    speculator._proposer = Lookahead(LookaheadConfig(), context)
    with device.waits_forbidden(), device.ledger.step():
        speculator.add([SimpleNamespace(slot=0, token_ids=np.arange(20, dtype=np.int32))])
    assert on_host(speculator._proposer._pool[0, -3:-1]) == [[15, 16, 17, 18], [16, 17, 18, 19]]


@pytest.mark.parametrize("waits", [True, False])
def test_a_proposer_is_tried_in_a_capture(waits: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Kills: a class that waits in the capture of a graph of drafting, which ends the start; one that is told of it
    twice, or that does not wait and is stopped."""
    from vllm_specplugins.draft import Draft
    from vllm_specplugins.engine.v2.speculators.custom import CustomDrafts

    def draft(texts: Any, rows: torch.Tensor, most: torch.Tensor) -> Draft:
        newest = texts.token_ids[rows, 0]
        if waits:
            newest[0].item()
        return Draft(newest[:, None].repeat(1, 3), most)

    tokens, lengths = torch.ones(4, 8, dtype=torch.int32, device=HERE), torch.ones(4, dtype=torch.int32, device=HERE)
    states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=tokens), total_len=SimpleNamespace(gpu=lengths))
    drafts, stopped = CustomDrafts(states, 3, 100), list[int]()
    drafts.proposer, drafts.stop = SimpleNamespace(draft=draft), lambda: stopped.append(1)
    drafts.probe()
    assert stopped == [1] * waits and ("it drafts again after a restart" in caplog.text) == waits
    rows, most = torch.arange(2, device=HERE), torch.full((2,), 3, dtype=torch.int32, device=HERE)
    graph, match = record(lambda: drafts.match(rows, most, None))
    graph.replay()
    assert on_host(match[1]) == [0 if waits else 3] * 2 and stopped == [1] * waits
