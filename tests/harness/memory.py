"""Which tensors are alive: bytes of real storages, each counted once, and whether a certain storage is gone."""

from __future__ import annotations

import gc

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


def live_bytes() -> int:
    """The bytes of every storage that a tensor in this process holds; gradients included."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    tensors += [value.grad for value in tensors if value.is_leaf and value.grad is not None]
    storages = {}
    for value in tensors:
        wrapper = isinstance(value, (FakeTensor, DTensor)) or is_functorch_wrapped_tensor(value)
        if not wrapper and value.device.type != "meta":  # what is wrapped is listed, too
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def storages_of(module: torch.nn.Module) -> dict[str, StorageWeakRef]:
    """A weak reference to the storage of each parameter."""
    return {name: StorageWeakRef(parameter.untyped_storage()) for name, parameter in module.named_parameters()}


def still_alive(storages: dict[str, StorageWeakRef]) -> list[str]:
    """The names of those that something still holds."""
    gc.collect()
    return [name for name, storage in storages.items() if not storage.expired()]
