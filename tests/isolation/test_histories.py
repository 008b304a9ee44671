"""A custom class has separate memory: no write through a read-only array by NumPy, torch, numba or the buffer protocol
reaches the engine or another stage of a cascade."""

import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
import torch

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.exchange import frozen
from vllm_specplugins.isolation.histories import Histories
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.structures.arrays import Views, view

K, VOCAB_SIZE, NUM_TOKENS = 3, 100, 8
TEXT = list(range(1, 13))  # with nothing to copy, so that the last stage is asked
CONTEXT = ProposerContext(VOCAB_SIZE, 64, 8, K, lambda text: [])
LOOKUPS = [{"method": "suffix_lookup", "store_bytes": 1 << 20}]
Write = Callable[[Any], Any]


def by_array_interface(array: Any) -> Any:
    """The same memory, as writable."""
    interface = dict(array.__array_interface__)
    interface["data"] = interface["data"][0], False
    return type("Claims", (), {"__array_interface__": interface})()


def by_owner(array: Any) -> Any:
    """Named in the docs as what nothing stops; it reaches no memory of the engine either."""
    while not isinstance(array, memoryview):
        array = array.base
    return np.asarray(array.obj)


@numba.njit
def of_pointer(pointer: Any, size: int) -> None:
    numba.carray(pointer, size)[:] = 9


def by_numba(array: Any) -> None:
    import ctypes

    of_pointer(array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(array))


def by_iteration(array: Any) -> None:
    for cell in np.nditer(array, op_flags=["readwrite"]):
        cell[...] = 9


def by_broadcast(array: Any) -> None:
    wide = np.broadcast_to(array, (2, len(array)))
    wide.flags.writeable = True
    wide[:] = 9


def of_dtype(array: Any) -> None:
    array.dtype = np.int16


def of_shape(array: Any) -> None:
    array.shape = (-1, 2)


def of_strides(array: Any) -> None:
    array.strides = (0,)


UFUNCS = [ufunc for ufunc in vars(np).values() if isinstance(ufunc, np.ufunc) and ufunc.nin == 2 and ufunc.nout == 1]
OTHER_WAYS: dict[str, Write] = {
    "torch.from_numpy": lambda array: torch.from_numpy(array).clamp_(min=9),
    "torch.as_tensor": lambda array: torch.as_tensor(array).add_(1),
    "torch.asarray": lambda array: torch.asarray(array).fill_(9),
    "torch.frombuffer": lambda array: torch.frombuffer(array, dtype=torch.int32).fill_(9),
    "torch.from_dlpack": lambda array: torch.from_dlpack(array).fill_(9),
    "torch of an interface": lambda array: torch.as_tensor(by_array_interface(array)).fill_(9),
    "torch of the buffer's owner": lambda array: torch.from_numpy(by_owner(array)).fill_(9),
    "np.from_dlpack": lambda array: np.from_dlpack(array).fill(9),
    "np of an interface": lambda array: np.asarray(by_array_interface(array)).fill(9),
    "np of the buffer's owner": lambda array: by_owner(array).fill(9),
    "memoryview": lambda array: memoryview(array).cast("B").__setitem__(0, 9),
    "as_strided": lambda array: np.lib.stride_tricks.as_strided(array, writeable=True).fill(9),
    "einsum": lambda array: np.einsum("i->i", array).fill(9),
    "nditer": by_iteration,
    "broadcast_to": by_broadcast,
    "broadcast_arrays": lambda array: np.broadcast_arrays(array, array)[0].fill(9),
    "numba": by_numba,
    "sort": lambda array: array.sort(),
    "byteswap": lambda array: array.byteswap(inplace=True),
    "resize": lambda array: array.resize((3,), refcheck=False),
    "setflags": lambda array: array.setflags(write=True),
    "dtype": of_dtype,
    "shape": of_shape,
    "strides": of_strides,
    "state": lambda array: array.__setstate__((1, (2,), np.dtype(np.int32), False, b"\x09\0\0\0\x09\0\0\0")),
}
OF_UFUNCS: dict[str, Write] = {
    **{f"{ufunc.__name__}.at": lambda array, ufunc=ufunc: ufunc.at(array, 0, 5) for ufunc in UFUNCS},
    **{f"{ufunc.__name__} to out": lambda array, ufunc=ufunc: ufunc(array, 5, out=array) for ufunc in UFUNCS},
}


def arrays_of(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, DraftBatch):
        yield from arrays_of([value.token_ids, value.max_num_draft, value.options])
    elif hasattr(value, "values"):
        yield from arrays_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_of(item)


class Writer:
    """Writes to all arrays that it is given, each in its way, and drafts what it read before."""

    ways: tuple[Write, ...] = ()
    seen: list[list[list[int]]]
    given: list[np.ndarray]

    def __init__(self, options: Any, context: Any):
        self.seen, self.given = [], []

    def propose(self, batch: DraftBatch) -> Draft:
        self.seen.append([tokens.tolist() for tokens in batch.token_ids])
        self.given += arrays_of(batch)
        num_reqs = len(batch.request_ids)
        for way in self.ways:
            for array in arrays_of(batch):
                try:
                    with np.errstate(all="ignore"):
                        way(array)
                except Exception:  # refused
                    pass
        return Draft(np.full((num_reqs, 1), 7, np.int32), np.zeros(num_reqs, np.int32))

    def observe(self, feedback: Feedback) -> None: ...
    def forget(self, request_ids: Any) -> None: ...


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = ModuleType("writers")
    module.Writer = Writer
    monkeypatch.setitem(sys.modules, "writers", module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def play(stages: list[Any], num_steps: int = 3) -> tuple[FaultBarrier, list[Any], list[np.ndarray]]:
    """Steps in which two requests grow by a token, with the engine's arrays compared after each one."""
    custom = {"method": "custom", "proposer": "writers:Writer"}
    if stages:
        config = {"method": "cascade", "gate": "off", "stages": [custom, *stages, custom]}
    else:
        config = {**custom, "gate": "off"}
    proposer: Any = build_proposer(parse_config({**config, "num_speculative_tokens": K}), CONTEXT)
    barrier = FaultBarrier(proposer, VOCAB_SIZE, K, None)
    engine, reference = np.tile(np.array(TEXT, np.int32), (2, 1)), np.arange(50, 60, dtype=np.int32)
    options = [frozen({"reference": reference}), {}]
    nothing, theirs = np.zeros(2, np.int32), [engine]
    for step in range(num_steps):
        texts = Views.of_rows(view(engine), [0, 1], [NUM_TOKENS + step] * 2)
        given = DraftBatch(["a", "b"], texts, np.full(2, K, np.int32), options)
        before = [(array.tolist(), array.dtype, array.strides) for array in arrays_of(given)]
        barrier.propose(given, Feedback(["a", "b"], nothing, nothing))
        assert [(array.tolist(), array.dtype, array.strides) for array in arrays_of(given)] == before
        theirs += arrays_of(given)
    assert engine.tolist() == [TEXT] * 2
    parts = [stage.proposer for stage in proposer.stages] if stages else [proposer]
    return barrier, parts, theirs


@pytest.mark.parametrize("stages", [[], LOOKUPS], ids=["alone", "in a cascade"])
def test_no_way_reaches_the_engine(monkeypatch: pytest.MonkeyPatch, stages: list[Any]) -> None:
    """Kills: a class of others that sees the engine's arrays, another stage's, or their memory. Then an honest
    `torch.from_numpy(tokens).clamp_()` gives a request wrong tokens, and a changed dtype switches another stage off."""
    for name, way in (OTHER_WAYS if stages else OTHER_WAYS | OF_UFUNCS).items():
        monkeypatch.setattr(Writer, "ways", (way,))
        barrier, parts, _ = play(stages)
        counters = barrier.totals()
        assert not any(stage.faults for stage in (counters, *counters.stages.values())), name
        for part in parts:
            if isinstance(part, Writer):
                assert part.seen[0] == [TEXT[:NUM_TOKENS]] * 2, name
        barrier.forget(["a", "b"])
        barrier.settle()


def test_the_memory_differs() -> None:
    """Whatever the way. Kills: an array of a batch, such as a client's reference, that is the engine's or another
    stage's."""
    _, parts, engines = play(LOOKUPS)
    first, last = (part.given for part in parts if isinstance(part, Writer))
    assert len(first) == len(last) == 3 * 4  # two texts, a reference, the limits
    for array in (*first, *last):
        assert not any(np.may_share_memory(array, other) for other in engines)
    assert not any(np.may_share_memory(array, other) for array in first for other in last)


def test_copies_follow_the_engine() -> None:
    """Texts at random that grow, shrink, change or are forgotten. Kills: a text of another length or request, or of
    tokens that the engine took back; one that keeps what a class wrote; texts of requests that are over."""
    random, histories = np.random.default_rng(0), Histories()
    texts = {name: random.integers(0, 99, 5).astype(np.int32) for name in "abc"}
    for _ in range(300):
        for name, text in texts.items():
            if random.random() < 0.05:
                texts[name] = text[: random.integers(1, len(text) + 1)]
            elif random.random() < 0.05:
                texts[name] = random.permutation(text)
            elif random.random() < 0.05:
                histories.forget([name])
                texts[name] = random.integers(0, 99, 5).astype(np.int32)
            else:
                texts[name] = np.append(text, random.integers(0, 99, random.integers(1, 9))).astype(np.int32)
        rows = [0, 1, 2]
        batch = DraftBatch(list(texts), tuple(texts.values()), np.ones(3, np.int32), [{}] * 3)
        assert [text.tolist() for text in histories.batch(batch, rows).token_ids] == list(map(list, texts.values()))
        assert [len(text) for text in histories.batch(batch, [1]).token_ids] == [0, len(texts["b"]), 0]
    histories.forget(["a", "b", "c"])
    assert not histories._texts and not histories._options
    short, long = (DraftBatch(["a"], [np.arange(size, dtype=np.int32)], (), [{}]) for size in (20, 21))
    torch.from_numpy(histories.batch(short, [0]).token_ids[0])[0] = 77
    assert histories.batch(long, [0]).token_ids[0].tolist() == [*range(21)], "as if nothing was written"
