"""Call an island as a C function of a table of addresses, which is filled once for all that never moves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes import PassError

from .island_code import IslandCode
from .island_library import IslandLibrary


class CompiledIsland:
    """An island as a C function. ``scratch``: gives memory for temporaries of these sizes."""

    def __init__(
        self, code: IslandCode, library: IslandLibrary, scratch: Callable[[Sequence[int]], list[Tensor]]
    ) -> None:
        """Raises ``AttributeError`` if the library has no such function."""
        self.code, self.library, self._scratch = code, library, scratch
        self._function: Any = getattr(library.functions, code.name)
        self._function.argtypes, self._function.restype = [ctypes.c_void_p], ctypes.c_int

    def bind(self, operands: Sequence[Tensor | None], vals: Sequence[Tensor]) -> Callable[..., None]:
        """A function that runs the island on ``operands``, and takes those that are None at each call.

        ``vals``: as what it was compiled for lies; an operand that lies otherwise is copied at each call. Raises
        ``PassError`` where memory for a result does.
        """
        held = [*operands, *self._scratch(self.code.temporaries)]
        table = (ctypes.c_void_p * len(held))(*(0 if each is None else each.data_ptr() for each in held))
        address, function, code = ctypes.addressof(table), self._function, self.code
        given = [(k, val.stride()) for k, (each, val) in enumerate(zip(operands, vals, strict=True)) if each is None]
        pairs = enumerate(zip(operands, vals, strict=True))
        turned = [(k, each) for k, (each, val) in pairs if each is not None and not lies_as(each, val)]
        outs = range(len(operands) - code.outs, len(operands))

        def run(table: Any = table, held: Any = held) -> None:  # both live as long as this does
            if function(address):
                raise RuntimeError(f"a kernel of {code.name} failed: integers were divided by zero")

        def run_on(*values: Tensor) -> None:
            copies = []  # which live until the kernels have run
            for (k, strides), value in zip(given, values, strict=True):
                if value.stride() != strides:
                    value = laid_out(value, vals[k], k in outs)
                    copies.append(value)
                table[k] = value.data_ptr()
            for k, each in turned:
                copies.append(laid_out(each, vals[k], k in outs))
                table[k] = copies[-1].data_ptr()
            run()

        return run_on if given or turned else run


def laid_out(value: Any, val: Tensor, is_out: bool) -> Tensor:
    """``value``, or a copy of it that lies as ``val``."""
    if lies_as(value, val):
        return value  # type: ignore[no-any-return]
    if is_out:
        raise PassError(f"memory for a result of an island has strides {value.stride()}, expected {val.stride()}")
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device).copy_(value)


def lies_as(value: Tensor, val: Tensor) -> bool:
    """Whether a tensor has the strides of another; that of a dim of length one says nothing."""
    if value.stride() == val.stride():
        return True
    pairs = zip(value.shape, value.stride(), val.stride(), strict=True)
    return all(one == other for size, one, other in pairs if size > 1)
