"""Triton's interpreter, which must be chosen before Triton's import; what kernels load and store, counted in it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_specplugins.kernels.rejection.inputs import to_device

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or torch.cuda.is_available()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_triton = pytest.mark.skipif(not RUNS, reason="runs in a process with Triton's interpreter")
by_reference = pytest.mark.skipif(RUNS, reason="of the reference, which the kernels are held against")


if INTERPRETED:
    sys.path.append(str(Path(__file__).parents[1] / "simulated_device"))
    from quick_interpreter import quick_interpreter

    _quick = quick_interpreter()  # for the rest of this process
    _quick.__enter__()


def assert_equals_reference(operation: Any, *arguments: Any) -> Any:
    """A kernel's tensors are those of the reference, to the bit; returns the reference's."""
    expected = operation(*arguments, implementation="reference")
    for ours, theirs in zip(operation(*to_device(arguments, DEVICE), implementation="fused"), expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)
    return expected


@contextmanager
def bytes_moved() -> Iterator[dict[str, int]]:
    """Counts {"all": ..., "distinct": ...}: without what a launch loads again, and then finds in the cache."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    counts, addresses = {"all": 0, "distinct": 0}, []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    launch = GridExecutor.__call__

    def counting_load(self, pointers, mask, *args):
        loaded = load(self, pointers, mask, *args)
        counts["all"] += int(mask.data.sum()) * loaded.data.itemsize
        chosen = np.broadcast_to(pointers.data, mask.data.shape)[mask.data != 0]
        addresses.append(chosen.astype(np.uint64) * 16 + loaded.data.itemsize)
        return loaded

    def counting_store(self, pointers, value, mask, *args):
        num_bytes = int(mask.data.sum()) * value.data.itemsize
        counts["all"] += num_bytes
        counts["distinct"] += num_bytes
        return store(self, pointers, value, mask, *args)

    def counting_launch(self, *args, **kwargs):
        launch(self, *args, **kwargs)
        counts["distinct"] += int((np.unique(np.concatenate(addresses)) % 16).sum())
        addresses.clear()

    InterpreterBuilder.create_masked_load = counting_load
    InterpreterBuilder.create_masked_store = counting_store
    GridExecutor.__call__ = counting_launch
    try:
        yield counts
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        GridExecutor.__call__ = launch
