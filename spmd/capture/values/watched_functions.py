"""Functions that ask for more of a tensor than a trace knows: strides, its address, its graph, its values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..._torch import FakeTensor, TorchFunctionMode, disable_modes
from ...call.inputs import BatchInput, is_apart, is_index
from ...call.refusals import answer, passes, refuse
from ...python_state.reads import Reads, is_array
from ..tensor_attributes import is_real
from ..unsupported import Refused
from .known_values import known_value

_STRIDES = {Tensor.is_contiguous, Tensor.stride, Tensor.as_strided, torch.as_strided}
_TO_HOST = ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__")
_TAKES_VALUES = {getattr(Tensor, name) for name in _TO_HOST}
_STAND_INS: dict[Any, Callable[[Tensor], Any]] = {  # of a check, for values that no trace has
    Tensor.numpy: Tensor.numpy,
    Tensor.__array__: Tensor.numpy,
    Tensor.tolist: lambda tensor: tensor.tolist(),
}
_JOINED: tuple[Any, ...] = (Tensor.grad, Tensor.is_leaf, Tensor.grad_fn)  # what an argument has of its graph


class WatchedFunctions(TorchFunctionMode):
    """Notes in ``reads`` that the step asks for strides. Raises ``Refused`` if an argument is not contiguous then.

    Or if it asks for the gradient or the graph of one of the ``arguments``, fakes of ``inputs``, that came with one.
    What takes the values of a tensor that is no input, such as an attribute, gets them, and ``reads`` the tensor.
    Gradients have the strides of their ``parameters``, as these have their own; and what is made of indices, such as
    rows of an embedding, has none of theirs.
    """

    def __init__(
        self,
        inputs: Sequence[BatchInput],
        arguments: Sequence[Tensor],
        parameters: Collection[Tensor],
        reads: Reads,
    ) -> None:
        super().__init__()
        pairs = zip(inputs, arguments, strict=True)
        self.joined = {id(fake): each.name for each, fake in pairs if not is_apart(each.value)}
        self._reads, self._strided = reads, [x for x in inputs if not x.value.is_contiguous()]
        self._parameters = parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        if func in _STRIDES and not self._is_of_parameter(given[0]):
            self._note_strides(is_index(given[0]))
        if func is Tensor.data_ptr:
            error = (
                "it asks for the address of a tensor, and a compiled step has its own. Ask whether two are one by `is`."
            )
            return answer(Refused(error), 0)
        if self.joined and func.__name__ == "__get__" and func.__self__ in _JOINED and id(args[0]) in self.joined:
            name = self.joined[id(args[0])]
            raise Refused(
                f"it asks for the gradient or the graph of its argument {name}, which has one from before the step. "
                f"Pass {name}.detach()."
            )
        if func in _TAKES_VALUES and is_real(args[0]) and args[0].layout is torch.strided and not args[0].is_meta:
            return self._take(func, args, kwargs or {})
        classes = (kwargs or {}).get("num_classes", args[1] if len(args) > 1 else -1)
        if func is F.one_hot and classes == -1 and known_value(given[0]) is None:
            raise Refused("it asks for the largest class. Say how many there are: F.one_hot(x, num_classes).")
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if func not in _STAND_INS or not isinstance(given[0], FakeTensor) or not passes(error):
                raise
            with disable_modes():
                return _STAND_INS[func](torch.zeros(tuple(given[0].shape), dtype=given[0].dtype))

    def _take(self, func: Any, args: Any, kwargs: Any) -> Any:
        with disable_modes():
            self._reads.take(args[0])
            values = func(*args, **kwargs)
        if is_array(values):  # it has the tensor's own memory
            name = self._reads.name_of(args[0]) or "an array of a tensor"
            self._reads.compared.note(values, name, name.rpartition(".")[2])
        return values

    def _is_of_parameter(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or any(tensor is each.grad for each in self._parameters)

    def _note_strides(self, of_index: bool) -> None:
        self._reads.layouts_read.add(of_index)
        for each in (x for x in self._strided if is_index(x.value) == of_index):
            name, strides = each.name, each.value.stride()
            refuse(
                Refused,
                f"it asks for the strides of a tensor, and its argument {name} has strides {strides}, where a compiled "
                f"step takes contiguous arguments. Pass {name}.contiguous().",
            )
