"""Runs the reference of each of our operations as a single launch, in place of its kernel, which takes up to a second a
step in Triton's interpreter. Other tests compare each kernel with its reference (tests/kernels, test_simulated_*)."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from simulated_device import tape
from simulated_device.operations import tensors

PACKAGES = "acceptance", "budget", "history_match", "rejection.adjust", "rounds.siblings", "steps", "trees"


def patch_kernels(patches: Any, note: Callable[..., None]) -> None:
    """Replaces our operations' kernels by their references.

    Args:
        patches: pytest's MonkeyPatch.
        note: called as note(fused, *arguments) with each kernel that a reference replaces, except those that verify.
    """
    patch_verification(patches)
    for name in PACKAGES:
        package = import_module(f"vllm_specplugins.kernels.{name}")
        patches.setattr(package, "module_of", partial(_module_of, package.module_of, note))


def patch_verification(patches: Any) -> None:
    """Replaces only the kernels that verify."""
    from vllm_specplugins.kernels import rejection
    from vllm_specplugins.kernels.rejection import reference

    from vllm_specplugins.engine.v2.verification import verify

    def sample_step(*arguments: Any, operation: Any) -> tuple[torch.Tensor, ...]:
        run = (
            rejection.sample_step
            if operation
            else as_launch(partial(rejection.sample_step, implementation="reference"))
        )
        result: tuple[torch.Tensor, ...] = run(*arguments, operation=operation)
        return result

    kernel = SimpleNamespace(rejection_sample=as_launch(reference.rejection_sample))
    patches.setattr(rejection, "module_of", lambda *_: kernel)
    patches.setattr(verify, "sample_step", sample_step)


def as_launch(operation: Callable[..., Any], name: str = "reference") -> Callable[..., Any]:
    """Wraps an operation so that an open tape records it as one step."""

    def run(*arguments: Any, **named: Any) -> Any:
        results: list[Any] = []

        def launch() -> None:
            made = operation(*arguments, **named)
            if results:
                for old, new in zip(tensors(results), tensors(made), strict=True):
                    old.copy_(new)
            else:
                results.append(made)

        tape.launch(name, launch, writes=tensors((arguments, named)))
        device = torch.device("cpu")
        results[0] = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), results[0])
        return results[0]

    return run


def _module_of(original: Any, note: Any, package: str, *choice: Any) -> Any:
    module = original(package, *choice)
    return _References(import_module(f"{package}.reference"), module, note) if "fused" in module.__name__ else module


class _References:
    def __init__(self, reference: Any, fused: Any, note: Any):
        self._reference, self._fused, self._note = reference, fused, note

    def __getattr__(self, name: str) -> Any:
        kernel, reference = getattr(self._fused, name), as_launch(getattr(self._reference, name))

        def run(*arguments: Any, **named: Any) -> Any:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self._note(kernel, *arguments, **named)
            return reference(*arguments, **named)

        return run
