"""Fake tensors whose ops replace symbolic numbers by their present values, so that torch can cache the results.

Hyper-parameters are symbolic while a step is traced, and stay so in the graph. But shapes and dtypes of an op's result
on fakes are the same for any number. Torch caches results on fakes by their arguments, except for calls with symbols,
which are most calls of an optimizer.

What it has not cached, it computes by a decomposition in Python, if it has one: 4 ms for an ``addmm``, 8 ms for the
gradient of a GELU. Where sizes are known, the op's own function for shapes gives the same in less than half of that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.ir.infer_shapes import present_value

from .._torch import FakeTensor, FakeTensorMode, get_decompositions, has_meta_kernel, tree_map
from .sizes.size_symbols import NumberEnv, SizeEnv

aten = torch.ops.aten
_ZERO_TENSOR = aten._efficientzerotensor.default

# Their functions for shapes take numbers only: the first fixes all sizes, the second raises (torch 2.13).
_BY_DECOMPOSITION = get_decompositions([aten.constant_pad_nd.default, aten.baddbmm.default])

# Not batch norms: for them the decomposition knows more, such as that nothing is saved in evaluation.
_BY_META_KERNEL = frozenset(
    (
        aten.addmm.default,
        aten.addmv.default,
        aten.mv.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten._softmax_backward_data.default,
        aten.elu_backward.default,
        aten.gelu_backward.default,
        aten.glu_backward.default,
        aten.hardtanh_backward.default,
        aten.leaky_relu_backward.default,
        aten.sigmoid_backward.default,
        aten.silu_backward.default,
        aten.softplus_backward.default,
        aten.tanh_backward.default,
        aten.threshold_backward.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_backward.default,
        aten.mse_loss.default,
        aten.mse_loss_backward.default,
        aten.nll_loss_forward.default,
        aten.nll_loss_backward.default,
        aten.smooth_l1_loss.default,
        aten.smooth_l1_loss_backward.default,
        aten.native_layer_norm_backward.default,
        aten.select_backward.default,
        aten.slice_backward.default,
        aten.sum.default,
    )
)
BY_META_KERNEL = frozenset(op for op in _BY_META_KERNEL if has_meta_kernel(op))


class ShapesOnly(FakeTensorMode):
    """A fake mode that passes ops the present value of each symbolic float."""

    _is_traced = False

    def end_trace(self, graph: fx.Graph) -> None:
        """Take no condition on numbers any more, and forget where a view begins that a number places.

        Of values in ``graph`` and of all results from now on: they are there for shapes and strides.
        """
        self._is_traced = True
        if isinstance(self.shape_env, NumberEnv):
            self.shape_env.has_ended = True
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(_placed_anywhere, node.meta["val"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ZERO_TENSOR:
            # Torch's cache takes a zero tensor for any tensor of its shape, so what forward-mode differentiation traces
            # would depend on what this process has traced before, and differ from rank to rank (torch 2.11 to 2.15).
            self.cache_enabled = False
        values = tuple(map(present_value, args)), {name: present_value(value) for name, value in kwargs.items()}
        if func in _BY_DECOMPOSITION and isinstance(self.shape_env, SizeEnv):
            with self:
                return _BY_DECOMPOSITION[func](*values[0], **values[1])
        result = super().__torch_dispatch__(func, types, *values)
        if any(isinstance(value, torch.SymFloat) for value in (*args, *kwargs.values())):
            # Torch computes the value of an op on constants alone, but it would be that of this call only.
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, FakeTensor):
                    tensor.constant = None
        return tree_map(_placed_anywhere, result) if self._is_traced else result

    def cpp_meta_supports_symint(self, func: Any) -> bool:
        """Whether an op's C++ meta kernel takes symbolic sizes; torch asks before it takes a decomposition."""
        known = not isinstance(self.shape_env, SizeEnv) and func in BY_META_KERNEL
        return known or super().cpp_meta_supports_symint(func)


def _placed_anywhere(value: Any) -> Any:
    """``value``, or for a tensor of known sizes whose offset in its memory is a symbol, one of offset 0."""
    if not isinstance(value, FakeTensor) or type(value.storage_offset()) is int:
        return value
    if not all(type(size) is int for size in (*value.shape, *value.stride())):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
