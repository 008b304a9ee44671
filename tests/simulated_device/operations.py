"""What is asked of an operation that PyTorch dispatches: what it reads, writes, makes, and whether it must wait."""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor
_aten = torch.ops.aten

ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten._unique2.default,
    _aten.bincount.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim.default,
}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
HOST_READS = {
    Tensor.__array__,
    Tensor.__bool__,
    Tensor.__complex__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__int__,
    Tensor.item,
    Tensor.numpy,
    Tensor.tolist,
}


def tensors(tree: Any) -> list[Tensor]:
    """Those in tuples, lists and dictionaries; PyTorch's walk through a tree takes a sixth of an engine's time."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    found: list[Tensor] = []
    for item in tree:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            found += tensors(item)
    return found


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def poison(tensor: Tensor) -> None:
    """Fills unwritten memory with invalid values, never zeros."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


class Kernels(TorchDispatchMode):
    """Sees what the device runs: an operation that is made of others is taken apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = _made_of_others(func)
        if key is None:
            return self.run(func, args, kwargs)
        with self:
            return func._op_dk(key, *args, **kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


@cache
def _made_of_others(func: Any) -> Any:
    """The key of an operation's implementation if what that calls is the device's work; None for a kernel. vLLM's own
    operations are Python, and look into the forward context. Its kernels (_C) are whole.
    """
    if func.namespace == "vllm":
        return torch._C.DispatchKey.CPU
    if func.namespace != "aten":
        return None
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return composite if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite) else None


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """An operation whose result's shape, or use, the host has to know."""
    if func in _WAITS:
        return True
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in _INDEXED:
        is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in tensors(args[1]))
        is_masked_fill = func is not _aten.index.Tensor and args[2].numel() == 1
        return is_mask and not is_masked_fill
    return False


def indexes(func: Any, args: Any) -> list[Tensor]:
    """Tensors that may be the host's: PyTorch copies indexes to the device."""
    return tensors(args[1]) if func in _INDEXED else []


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """What an operation writes to: some of vLLM's do not say so, and return nothing."""
    schema = func._schema
    if not schema.returns and not schema.is_mutable:
        return tensors((args, kwargs))
    given = {**{argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}, **kwargs}
    return tensors(
        [
            given.get(argument.name)
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


def fresh(args: Any, kwargs: Any, results: Any) -> list[bool]:
    """Returns, for each tensor of the results, whether it has separate memory."""
    inputs = {address(tensor) for tensor in tensors((args, kwargs))}
    return [address(tensor) not in inputs for tensor in tensors(results)]
