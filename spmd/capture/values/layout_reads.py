"""Reads of a tensor's strides while a step is traced, which takes every argument as contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch import TorchFunctionMode
from ...call.inputs import BatchInput
from ...python_state.reads import Reads
from ..unsupported import Refused

_READS = {Tensor.is_contiguous, Tensor.stride, Tensor.as_strided, torch.as_strided}


class LayoutReads(TorchFunctionMode):
    """Notes in ``reads`` that the step asks for strides. Raises ``Refused`` if an argument is not contiguous then."""

    def __init__(self, inputs: Sequence[BatchInput], reads: Reads) -> None:
        super().__init__()
        self._reads, self._strided = reads, [x for x in inputs if not x.value.is_contiguous()]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not isinstance(args[0], nn.Parameter):
            self._reads.reads_layout = True
            if self._strided:
                name, strides = self._strided[0].name, self._strided[0].value.stride()
                raise Refused(
                    f"it asks for the strides of a tensor, and its argument {name} has strides {strides}, where a "
                    f"compiled step takes contiguous arguments. Pass {name}.contiguous()."
                )
        return func(*args, **(kwargs or {}))
