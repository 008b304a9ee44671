"""The simulated device, switched on and off."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from simulated_device.guard import Guard
from simulated_device.interpreter import patch_interpreter, patch_launches
from simulated_device.ledger import Ledger
from simulated_device.patches import Patches
from simulated_device.streams import TORCH_CUDA, Event, Stream, synchronize
from simulated_device.tape import memory_info


@dataclass(frozen=True)
class Device:
    """What a test asks of the device."""

    guard: Guard

    @property
    def ledger(self) -> Ledger:
        return self.guard.ledger

    @contextmanager
    def waits_forbidden(self) -> Iterator[None]:
        """A step that waits for the device, outside of `gpu_sync_allowed()`, raises DeviceError."""
        self.guard.forbids_waits = True
        try:
            yield
        finally:
            self.guard.forbids_waits = False


@contextmanager
def interpreted() -> Iterator[None]:
    """V2 on a CPU, without a device: what its interpreter and its platform lack."""
    from simulated_device.vllm_cpu import patch_asynchronous

    with Patches() as patches:
        patch_interpreter(patches)
        patch_asynchronous(patches)
        yield


@contextmanager
def simulated_device(is_cuda: bool = False, warm_up: bool = False) -> Iterator[Device]:
    """The device for vLLM's Model Runner V2, inside of `interpreted`; engines must start, and end, inside of it.

    Args:
        is_cuda: what the device's tensors answer to `is_cuda`: with True kernels in Triton are chosen.
        warm_up: run vLLM's warm-up of its kernels, as its worker does on a GPU.
    """
    import vllm.v1.worker.cpu_worker  # noqa: F401  # puts placeholders into torch.cuda; ours come after
    from vllm.utils import gpu_sync_debug

    from simulated_device import vllm_cpu

    guard = Guard(Ledger(), is_cuda)
    with Patches() as patches:
        for name, value in TORCH_CUDA.items():
            patches.set(torch.cuda, name, value)
        patches.set(torch.accelerator, "synchronize", synchronize)
        patches.set(torch.accelerator, "get_memory_info", memory_info)
        patches.set(gpu_sync_debug, "_SYNC_CHECK_MODE", "error")  # gpu_sync_allowed() then says where waits are meant
        patches.set(Stream, "waited", staticmethod(lambda: guard.wait("synchronize")))
        patches.set(Event, "waited", staticmethod(lambda event: guard.wait_for(event)))
        patch_launches(patches)
        vllm_cpu.patch_platform(patches)
        vllm_cpu.patch_attention(patches, guard)
        vllm_cpu.patch_copies(patches, guard)
        vllm_cpu.patch_worker(patches, guard, warm_up)
        yield Device(guard)
