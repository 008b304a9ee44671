"""Which tensors are the device's: all are the CPU's to PyTorch. What counts is the storage.

Device memory is what was made with `device=` a torch.device, as vLLM always names it (the host is the string "cpu"),
and whatever an operation on such memory made. Memory that both see (vLLM's UVA buffers) is nobody's.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_PURGE_AT = 20_000


class Memory:
    """Storages by identity; a weak reference keeps an identity from being used again."""

    def __init__(self) -> None:
        self._device: dict[int, StorageWeakRef] = {}
        self._shared: dict[int, StorageWeakRef] = {}

    def claim(self, tensor: torch.Tensor) -> None:
        """This tensor is the device's from now on, with all that share its storage."""
        if len(self._device) > _PURGE_AT:
            self._device = {key: ref for key, ref in self._device.items() if not ref.expired()}
        storage = tensor.untyped_storage()
        if storage._cdata not in self._device and storage._cdata not in self._shared:
            self._device[storage._cdata] = StorageWeakRef(storage)

    def share(self, tensor: torch.Tensor) -> None:
        """This tensor's memory is the host's and the device's."""
        storage = tensor.untyped_storage()
        self._device.pop(storage._cdata, None)
        self._shared[storage._cdata] = StorageWeakRef(storage)

    def is_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._device

    def is_host(self, tensor: torch.Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return key not in self._device and key not in self._shared
