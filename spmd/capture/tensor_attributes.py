"""Tensors in plain attributes of modules and other objects, in closures and globals: constants of the program.

A table of positions, say, or one in a list or dict. They are no parameters or buffers, so no fake replaces them while
tracing. The first op that reads one lifts it into the graph. Guards compare what holds it by identity. What the step
itself replaces is no constant, but state (``effects/carried.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.ops import Trait, has
from passes.ir.schemas import schema

from .._torch import BUFFERS, CHILDREN, PARAMETERS, TorchDispatchMode, storage_id, tree_flatten, tree_map
from ..call.refusals import refuse
from ..python_state.effects.lost_graph import has_lost_graph
from ..python_state.reads import CONTAINERS, Reads
from .unsupported import FROM_OUTSIDE, OutsideTensor, Refused

aten = torch.ops.aten
_PUT = ("item", "attribute", "cell")  # kinds of sites whose tensors may be inputs, and are written in place
NO_CONSTANTS = {PARAMETERS, BUFFERS, CHILDREN}
_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default)  # of tensors that the step makes


@contextmanager
def constant_attributes(
    submodules: Iterable[tuple[str, nn.Module]], reads: Reads, anywhere: bool
) -> Iterator[frozenset[int] | None]:
    """Lift the plain tensors of these modules into the graph where an op reads them; yields their ids.

    With ``anywhere`` also tensors at all other sites that the step read; yields None then. Few steps have any, and
    finding them takes time.
    """
    constants = {
        id(leaf): (f"{name}.{key}", leaf)
        for name, module in submodules
        for key, value in vars(module).items()
        if isinstance(value, (torch.Tensor, *CONTAINERS)) and key not in NO_CONSTANTS
        for leaf in tree_flatten(value)[0]
        if is_constant(leaf)
    }
    if not constants and not anywhere:
        yield frozenset()
        return
    with _LiftConstants(constants, reads if anywhere else None) as lifting:
        _active.append(lifting)
        try:
            yield None if anywhere else frozenset(constants)
        finally:
            _active.pop()


def is_users(constant: Tensor) -> bool:
    """Whether a constant of the trace is a tensor of the user's, whose elements may be others in a later call."""
    return any(id(constant) in each.constants for each in _active)


def check_outside(func: Any, args: Sequence[Any], constants: frozenset[int]) -> None:
    """Raise ``OutsideTensor`` if an op has a tensor that is neither traced nor among the ``constants``."""
    for arg in args:
        for value in arg if isinstance(arg, (list, tuple)) else (arg,):
            if is_real(value) and id(value) not in constants and func not in _LIFTS:
                raise OutsideTensor


def is_real(value: Any) -> bool:
    """Whether a value is a tensor with data: none that is traced is of these very classes."""
    return type(value) is Tensor or type(value) is nn.Parameter


def zeros_like_real(value: Tensor) -> Tensor:
    """Traced zeros in the place of a tensor with data."""
    return torch.zeros(tuple(value.shape), dtype=value.dtype, device=value.device)


def is_constant(value: Any) -> bool:
    """Whether a value is a tensor that may be a constant."""
    return type(value) is Tensor and not value.requires_grad


class _LiftConstants(TorchDispatchMode):
    """Replaces constants, given as (name, tensor) by id, by their lifted form in the arguments of every op.

    With ``reads``, tensors that are found at sites of it become constants, too.
    """

    def __init__(self, constants: dict[int, tuple[str, Tensor]], reads: Reads | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants, self.reads = constants, reads
        self.of_modules = frozenset(constants)
        self.lifted: dict[int, Tensor] = {}
        self.memory: dict[Any, int] = {}  # that of the lifted forms, with the id of the constant

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.memory and has(func, Trait.MUTABLE):
            self._check_written(func, args, kwargs or {})

        def replace(value: Any) -> Any:
            return self._lift(func, value) if is_real(value) and self._is_one(func, value) else value

        args, kwargs = tree_map(replace, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _is_one(self, func: Any, value: Tensor) -> bool:
        if id(value) in self.constants or self.reads is None or func in _LIFTS:
            return id(value) in self.constants
        name = self.reads.name_of(value) if is_constant(value) else ""
        if not name and id(value) in self.reads.cached:
            refuse(
                Refused,
                f"it uses {self.reads.cached[id(value)][0]}, whose cache holds a tensor that requires grad: that is no "
                "constant. Let the function compute it anew, or keep it as a parameter of a module.",
            )
        if not name and value.requires_grad:
            raise Refused(FROM_OUTSIDE)  # it would get a gradient of the trace
        if not name and has(func, Trait.MUTABLE):
            refuse(Refused, FROM_OUTSIDE)  # it would be computed for real, while the step is traced
            self.constants[id(value)] = ("a tensor from outside", value)
            return True
        if name:
            self.constants[id(value)] = (name, value)
            self.reads.note_constant(value)
        return bool(name)

    def _lift(self, func: Any, value: Tensor) -> Tensor:
        if has_lost_graph(value):
            refuse(
                Refused,
                f"it computes with a tensor in {self.constants[id(value)][0]} that a call before left there with its "
                "graph, which a compiled step does not keep. Keep tensor.detach() there.",
            )
        if has(func, Trait.MUTABLE):
            self._refuse_write(func, id(value))
        if id(value) not in self.lifted:
            self.lifted[id(value)] = aten.lift_fresh.default(value)
            self.memory[storage_id(self.lifted[id(value)])] = id(value)
        return self.lifted[id(value)]

    def _check_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a write into a view of a constant."""
        given = {**kwargs, **dict(zip(schema(func).names, args, strict=False))}
        written = [given.get(each.name) for each in schema(func).arguments if each.written]
        for value in tree_flatten(written)[0]:
            constant = self.memory.get(storage_id(value)) if isinstance(value, Tensor) else None
            if constant is not None:
                self._refuse_write(func, constant)

    def _refuse_write(self, func: Any, constant: int) -> None:
        name = self.constants[constant][0]
        if constant in self.of_modules:
            refuse(
                Refused,
                f"it may write into {name} ({func}), a plain attribute of a module. Make that a buffer, with "
                "register_buffer.",
            )
            return
        sites = self.reads.sites_of(self.constants[constant][1]) if self.reads is not None else []
        sites = [site for site in sites if not str(site.key).startswith("_tensor_constant")]  # of the tracer itself
        if self.reads is not None and len(sites) == 1 and sites[0].kind in _PUT:
            self.reads.journals.carry(sites)  # raises: in another trace it is an input
        refuse(
            Refused,
            f"it may write into {name} ({func}), which is no buffer of a module. Put a new tensor there instead, "
            "or register a buffer in a module.",
        )


_active: list[_LiftConstants] = []
