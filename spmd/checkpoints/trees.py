"""Trees of state: nested dicts, lists and tuples, with tensors and plain values as leaves.

In a checkpoint a tree is divided: tensors go to safetensors files under the name of their path, such as
``model.blocks.0.up.weight``; the rest, with an empty tensor on the meta device in place of each of these, is a file of
plain values, which ``torch.load(weights_only=True)`` reads.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._torch import local_tensor
from ..ranks.equal_values import bytes_of
from .direct import DTYPES

# What safetensors files hold. Other tensors stay among the values, and so do plain tensors without dims, such as the
# step counters of an optimizer: a file has one entry for all of them.
IN_FILES = frozenset(DTYPES)
_CONTAINERS = (dict, OrderedDict, list, tuple)


def map_leaves(tree: Any, change: Callable[[str, Any], Any], name: str) -> Any:
    """The tree with ``change(name, leaf)`` in place of each leaf; the tree itself has the name ``name``."""
    if type(tree) not in _CONTAINERS:
        return change(name, tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(each, change, f"{name}.{k}") for k, each in enumerate(tree))
    return type(tree)((key, map_leaves(each, change, f"{name}.{key}")) for key, each in tree.items())


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree by name."""
    found: list[tuple[str, Any]] = []
    map_leaves(tree, lambda path, leaf: found.append((path, leaf)), name)
    return iter(found)


def is_meta(leaf: Any) -> bool:
    """Whether a leaf of a tree is a tensor without values."""
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, which nothing can be read into."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def goes_to_file(leaf: Any) -> bool:
    """Whether a leaf of a tree is a tensor that is stored in safetensors files."""
    if isinstance(leaf, DTensor):
        return True
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.layout is torch.strided and leaf.dtype in IN_FILES


def divide(tree: Any, name: str, aliases: dict[str, str]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The values of a tree, with meta tensors in place of those for files, and these by name.

    ``aliases``: names of tied tensors, which are stored once, under another name. Raises ``ValueError`` for a tensor
    that has no values, or cannot be stored, and for two tensors of one name.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take(path: str, leaf: Any) -> Any:
        if is_meta(leaf):
            raise ValueError(f"{path} is on the meta device and has no values to save: call spmd.materialize first")
        if not goes_to_file(leaf):
            return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
        if leaf.dtype not in IN_FILES:
            raise ValueError(
                f"{path} is split and of {leaf.dtype}, which safetensors files do not hold: view it as real"
            )
        if path in tensors:
            raise ValueError(f"two tensors have the name {path}: rename one of the keys")
        if path not in aliases:
            tensors[path] = leaf.detach()
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    return map_leaves(tree, take, name), tensors


def describe_leaf(leaf: Any) -> str:
    """The text of a leaf by which ranks compare it: a plain tensor by its bytes, a DTensor by its shape alone."""
    if not isinstance(leaf, torch.Tensor):
        return repr(sorted(leaf, key=repr)) if isinstance(leaf, (set, frozenset)) else repr(leaf)
    shape = f"{leaf.dtype}{list(leaf.shape)}"
    return shape if isinstance(leaf, DTensor) or leaf.is_meta else f"{shape} {checksum(leaf):08x}"


def are_equal(one: Any, other: Any) -> bool:
    """Whether two trees have the same leaves, tensors bit by bit. Of a tensor without values that is not known."""
    ours, theirs = list(leaves(one, "")), list(leaves(other, ""))
    return len(ours) == len(theirs) and all(
        name == key and not is_meta(a) and not is_meta(b) and describe_leaf(a) == describe_leaf(b)
        for (name, a), (key, b) in zip(ours, theirs, strict=True)
    )


def checksum(tensor: torch.Tensor) -> int:
    """A CRC of the values of this rank's part of a tensor, in order."""
    local = local_tensor(tensor.detach())
    if local.layout is not torch.strided:
        return zlib.crc32(repr(local).encode())
    values: Any = bytes_of(local.cpu()).numpy()
    return zlib.crc32(values)
