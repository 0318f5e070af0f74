"""Every private or experimental torch name that spmd uses, each with why, and the torch versions it was seen in.

Imports come first, then accessors of private attributes, then private flags and functions behind a public shape. Code
outside of this file uses these names only; ``tests/test_structure.py`` checks that.
"""

import abc
import functools
import inspect
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributions import Distribution

from passes.runtime.transport_threads import behind_compute

# isort: off

# The type of torch.ops.aten.mm.default; ops are keys of tables here. 2.11 to 2.15.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# The decomposition table that ships with torch, for ops without a rule. 2.11 to 2.15.
from torch._decomp import core_aten_decompositions, get_decompositions

# Tensors without storage, to trace and to type-check graphs. 2.11 to 2.15.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

# Live hyper-parameters are backed symbolic floats. 2.11 to 2.15.
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv as _ShapeEnv

# Where in the code a condition on symbols was met. 2.11 to 2.15.
from torch._guards import SLoc

# The functions in conditions on symbolic numbers, to evaluate them. 2.11 to 2.15.
from torch.utils._sympy import functions as _sympy_functions

# The tracer, from where torch makes it public. Its modules are torch's own, which tracing imports anyway. 2.11 to 2.15.
from functorch import make_fx as _make_fx  # type: ignore[import-untyped]

# From a traced tensor to the node that made it. 2.11 to 2.15.
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)

# A GraphModule that writes its Python code when it is first needed: of most that a compile makes, it never is.
# 2.11 to 2.15.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module

# Hooks on every module call while tracing, for the module of a node; and the user's hooks, for guards. 2.11 to 2.15.
from torch.nn.modules import module as _module
from torch.nn.modules import transformer as _transformer
from torch.optim import optimizer as _optimizer
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# The functions that ``flex_attention`` calls, to trace it. 2.11 to 2.15.
from torch.nn.attention import flex_attention as _flex_attention

# Run ops in the dtypes of their operands: a traced graph contains all casts. 2.11 to 2.15.
from torch._C import _DisableAutocast as DisableAutocast

# Operations on tensors without the ``__torch_function__`` of their classes. Seen in 2.11 to 2.15.
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass

# The same without function modes, too. 2.11 to 2.15.
from torch._C import DisableTorchFunction as DisableTorchFunction

# The base of all batch norms, SyncBatchNorm included. 2.11 to 2.15.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# The running autograd node, and the number of the newest one: from a backward op to its forward op. 2.11 to 2.15.
from torch._C import _current_autograd_node as current_autograd_node
from torch.autograd import _get_sequence_nr as next_sequence_number  # type: ignore[attr-defined]

# The bindings of ops that torch.nn.functional calls, such as gelu. 2.11 to 2.15.
from torch._C import _nn as nn_bindings

# Modes that see every op below autograd. 2.11 to 2.15.
from torch.utils._python_dispatch import TorchDispatchMode

# The one that sees an op first. 2.11 to 2.15.
from torch.utils._python_dispatch import _get_current_dispatch_mode as innermost_dispatch_mode

# Compute with real tensors within a trace. 2.11 to 2.15.
from torch.utils._python_dispatch import _disable_current_modes as disable_modes

# How DCP's safetensors reader finds where the part of a tensor in a file begins. 2.11 to 2.15.
from torch.distributed.checkpoint import _hf_utils

# Modes that see every call of a torch function, above autograd. 2.11 to 2.15.
from torch.overrides import TorchFunctionMode

# Those around a call, for guards, without the one that sets the default device. 2.11 to 2.15.
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

# The store of the default process group, for agreement without collectives. 2.11 to 2.15.
from torch.distributed.distributed_c10d import _get_default_store as default_store

# Groups that are made without all ranks of the world, under a name that we choose. 2.11 to 2.15.
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _update_default_pg, _world

# The process groups by the names that collectives have for them, to set them aside for a while. 2.11 to 2.15.
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups

# The handle of a collective that is done, for those of a step, which run on one device. 2.11 to 2.15.
from torch._C._distributed_c10d import FakeWork, Work

# A store that stores nothing, for a world of one; the import registers the backend "fake". 2.11 to 2.15.
from torch.testing._internal.distributed.fake_pg import FakeStore

# Private: what a DTensor is made of, to make one over a tensor that is on another device than its mesh. Seen in 2.11 to
# 2.15.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Type, dtype, device, requires_grad, shape and strides of many tensors compared in one call. 2.11 to 2.15.
from torch._C._dynamo.guards import TensorGuards as _TensorGuards

# Nested arguments with the path of each leaf, and the registration of a class of our own as a node. 2.11 to 2.15.
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

# isort: on

# Names of private attributes, and accessors of their values. The accessors are attrgetters, since guards map some of
# them over all state at every call, where a function's own frame would count.

# The dicts in which a module keeps what it holds itself, None included. Programs are bound to these dicts, and guards
# compare them in bulk; ``named_parameters`` and its like skip None and walk the tree. 2.11 to 2.15.
PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
own_parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter(PARAMETERS)
own_buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter(BUFFERS)
own_children: Callable[[nn.Module], dict[str, Any]] = attrgetter(CHILDREN)

# Hooks can be registered in public but not listed: forward hooks of a module; hooks of a tensor on its gradient, and
# on the gradient that was accumulated (each a dict, or None). 2.11 to 2.15.
forward_pre_hooks: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
forward_hooks: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
GRADIENT_HOOKS, ACCUMULATION_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"
gradient_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter(GRADIENT_HOOKS)
accumulation_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter(ACCUMULATION_HOOKS)

# Attributes of every module that are no settings of the user's: the dicts of hooks, which torch never rebinds, and
# notes on state and hooks. Guards on Python reads look into the former and skip the latter. 2.11 to 2.15.
HOOK_DICTS = frozenset(key for key in vars(nn.Module()) if key.endswith("_hooks"))
OPTIMIZER_HOOK_DICTS = frozenset(key for key in torch.optim.Optimizer.__annotations__ if key.endswith("_hooks"))
MODULE_NOTES = frozenset(
    (
        "_non_persistent_buffers_set",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
    )
)

# Attributes in which a recurrent layer keeps its parameters in order; it makes them anew where a trace swaps those.
# 2.11 to 2.15.
RNN_NOTES = frozenset(("_flat_weights", "_flat_weight_refs"))

make_fx: Callable[..., Callable[..., fx.GraphModule]] = _make_fx


class ShapeEnv(_ShapeEnv):
    """The symbols of a trace, and the conditions on them, without the stack of each for messages of torch's own.

    To know which frames to leave out of it, torch imports Inductor and its exporter: 400 modules and 20 MB, which stay.
    2.11 to 2.15.
    """

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: Any = None) -> tuple[SLoc, str]:
        return SLoc(framework_loc, None), ""


def constant_source(name: str) -> Any:
    """The named source that a backed symbolic number needs.

    It is in Dynamo, which is 40 MB of modules: imported where the first trace needs it. 2.11 to 2.15.
    """
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def renew_notes(module: nn.Module) -> None:
    """Let a recurrent layer refer to the parameters that it has now; it would do so in its next forward."""
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


# The number of in-place writes to a tensor, to detect those of an optimizer or the step. 2.11 to 2.15.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# The number of an autograd node: leads from a backward op to the forward op that made it. 2.11 to 2.15.
sequence_number_of: Callable[[Any], int] = methodcaller("_sequence_nr")

# Namespaces of ops that communicate; a step that calls one itself is refused. 2.11 to 2.15.
COLLECTIVE_NAMESPACES = frozenset(("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"))

# A GradScaler: the attributes of its state, the method that makes this state lazily, the notes on each optimizer until
# its update, and the method that branches on them. Then the flag of a fused optimizer that handles scaling itself. None
# of them has a public accessor. 2.11 to 2.15.
SCALER_STATE = {"scale": "_scale", "growth_tracker": "_growth_tracker"}
SCALER_LAZY_START = "_lazy_init_scale_growth_tracker"
SCALER_OPTIMIZERS = "_per_optimizer_states"
SCALER_STEP = "_maybe_opt_step"
STEP_HANDLES_SCALING = "_step_supports_amp_scaling"

symbolic_functions: dict[str, object] = vars(_sympy_functions)

# Functions of ``math`` for symbols, each a node; of plain numbers they are those of ``math``. ``torch`` has no other
# names for them but ``sym_sqrt``. 2.11 to 2.15.
SYMBOLIC_MATH: dict[str, Callable[..., Any]] = {"sqrt": torch.sym_sqrt} | {
    name: getattr(torch, f"_sym_{name}")
    for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan", "log2")
}


def set_proxy_of_tensor(tensor: torch.Tensor, proxy: fx.Proxy, tracer: Any) -> None:
    """Let the tracer take ``tensor`` for the value of ``proxy``."""
    set_proxy_slot(tensor, tracer, _ProxyTensor(proxy, None))


def rename_placeholder(node: fx.Node, name: str) -> None:
    """Give a placeholder another name; FX makes it unique. ``Node._rename`` is private; seen in 2.11 to 2.15."""
    node._rename(name)
    node.target = node.name


@contextmanager
def compiling(flag: bool = True) -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` be true: optimizers then stay free of ``.item()``.

    The flag behind it is private; seen in 2.11 to 2.15.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = flag
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def eager_selective_checkpoint() -> Iterator[None]:
    """Let selective checkpoint save and recompute as in eager, instead of leaving that to a compiler's partitioner.

    The flag behind it is private; seen in 2.13 to 2.15. In 2.11, which has none, nothing that was saved is recomputed.
    """
    before = getattr(torch.compiler, "_is_non_strict_tracing_flag", None)
    if before is not None:
        torch.compiler._is_non_strict_tracing_flag = True
    try:
        yield
    finally:
        if before is not None:
            torch.compiler._is_non_strict_tracing_flag = before


@functools.cache
def foreach_kernels() -> dict[OpOverload, Callable[..., Any]]:
    """For every op on lists of tensors, torch's own kernel that calls the op of each tensor.

    Neither the names of all ops nor the kernel of a dispatch key are public; seen in 2.11 to 2.15.
    """
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    found: dict[OpOverload, Callable[..., Any]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.partition(".")
        if not packet.startswith("aten::_foreach_") or "out" in overload:
            continue
        op = getattr(getattr(torch.ops.aten, packet.removeprefix("aten::")), overload or "default")
        if op.has_kernel_for_dispatch_key(key):
            found[op] = functools.partial(op._op_dk, key)
    return found


def has_meta_kernel(op: OpOverload) -> bool:
    """Whether the shapes of the results of ``op`` come from a kernel of its own. 2.11 to 2.15."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta)


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Let ``torch.distributions`` not validate the values of their arguments, except with ``validate_args=True``.

    The default can be set in public, but read only as ``_validate_args``; seen in 2.11 to 2.15.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def tensor_checks() -> list[Callable[..., None]]:
    """The functions that raise where a tensor has a False. They are private; seen in 2.11 to 2.15."""
    return [torch._assert_async, torch._check_tensor_all, torch._check_tensor_all_with]


@contextmanager
def patched_tensor_checks(function: Callable[..., None]) -> Iterator[None]:
    """Let ``function`` take (error type, condition, function that writes the message) where those would read a value.

    ``_check_tensor_all_with`` is private; seen in 2.11 to 2.15.
    """
    before = torch._check_tensor_all_with
    torch._check_tensor_all_with = function
    try:
        yield
    finally:
        torch._check_tensor_all_with = before


@contextmanager
def no_causal_mask_detection() -> Iterator[None]:
    """Let ``nn.Transformer`` not read a mask's values to find out whether it is causal, which is a hint for speed only.

    ``_detect_is_causal_mask`` is private; seen in 2.11 to 2.15.
    """
    before = _transformer._detect_is_causal_mask
    _transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        _transformer._detect_is_causal_mask = before


# The size of the blocks of a mask that ``flex_attention`` makes where it gets none. 2.11 to 2.15.
NO_BLOCKS: int = _flex_attention._LARGE_SPARSE_BLOCK_SIZE


@contextmanager
def patched_flex_attention(attention: Callable[..., tuple[torch.Tensor, ...]]) -> Iterator[None]:
    """Let ``flex_attention`` call ``attention`` for its operator, as it is and also with gradients on the CPU.

    The names that it looks up are private; seen in 2.11 to 2.15.
    """
    of_trace = {
        "flex_attention_hop": attention,
        "_validate_device": lambda query, key, value: None,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    before = {name: getattr(_flex_attention, name) for name in of_trace}
    vars(_flex_attention).update(of_trace)
    try:
        yield
    finally:
        vars(_flex_attention).update(before)


def is_noop_mask(mask_mod: Any) -> bool:
    """Whether a mask's function is the one that ``flex_attention`` has for none."""
    return mask_mod is _flex_attention.noop_mask


def function_modes() -> tuple[Any, ...]:
    """The function modes around a call, but for the default device."""
    return tuple(mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext))


def saved_tensors_hooks() -> Any:
    """The hooks on saved tensors that a context around the call has set, or None. 2.11 to 2.15."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def count_dispatch_modes() -> int:
    """The number of modes around the call that take ops from torch's dispatcher. 2.11 to 2.15."""
    return int(torch._C._len_torch_dispatch_stack())


def global_hooks() -> list[dict[int, Any]]:
    """The hooks on all modules and on all optimizers. ``_global_*`` are private; seen in 2.11 to 2.15."""
    return [
        _module._global_forward_pre_hooks,
        _module._global_forward_hooks,
        _module._global_backward_pre_hooks,
        _module._global_backward_hooks,
        _optimizer._global_optimizer_pre_hooks,
        _optimizer._global_optimizer_post_hooks,
    ]


def users_global_hooks() -> list[list[Any]]:
    """The user's global hooks: a save in the background has one of ours on all optimizers as long as it reads."""
    return [
        [x for x in [*each.values()] if not f"{getattr(x, '__module__', '')}".startswith("spmd.")]
        for each in global_hooks()
    ]


def begin_optimizer_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Let one of torch's optimizers make the state of those parameters of a group that have gradients and no state.

    ``_init_group`` is private. It takes the group and empty lists, which it fills; how many, signatures say. Seen in
    2.11 to 2.15.
    """
    initialize: Any = optimizer._init_group  # type: ignore[attr-defined]
    initialize(group, *([] for _ in range(len(inspect.signature(initialize).parameters) - 1)))


def single_tensor_functions(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str]]:
    """The functions by which one of torch's optimizers updates parameter after parameter: (globals, name) of each.

    ``_single_tensor_*`` are private. They take a list of parameters, and lists of what belongs to each. 2.11 to 2.15.
    """
    for module in dict.fromkeys(kind.__module__ for kind in type(optimizer).__mro__):
        if module.startswith("torch.optim."):
            variables = vars(sys.modules[module])
            yield from ((variables, name) for name in variables if name.startswith("_single_tensor_"))


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks on the steps of an optimizer, its own and those of all. The dicts are private; seen in 2.11 to 2.15."""
    own: list[dict[int, Any]] = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    every: list[Any] = [_optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks]
    return [hook for hooks in (*own, *every) for hook in hooks.values()]


class TensorGuards:
    """The types, dtypes, devices, shapes and strides of a list of tensors; holds none of them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        shapes: Any = [list(t.shape) for t in tensors]
        strides: Any = [list(t.stride()) for t in tensors]
        self._guards = _TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)

    def check(self, tensors: list[torch.Tensor]) -> bool:
        """Whether ``tensors`` match."""
        return bool(self._guards.check(*tensors))


def check_batch_norm_input(norm: nn.Module, x: torch.Tensor) -> None:
    """Raise ``ValueError`` for an input of a number of dims that this batch norm does not take.

    ``_check_input_dim`` is private; seen in 2.11 to 2.15.
    """
    norm._check_input_dim(x)  # type: ignore[operator]


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let ``new`` have the very dicts of hooks of ``old``, so that handles which the user holds still remove hooks."""
    for name in (GRADIENT_HOOKS, ACCUMULATION_HOOKS):
        if hooks := getattr(old, name):
            setattr(new, name, hooks)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's storage; for a DTensor that is ``_local_tensor``, without the view that ``to_local`` makes.

    Seen in 2.11 to 2.15.
    """
    return getattr(tensor, "_local_tensor", tensor)


# What torch itself has in the ``__dict__`` of a DTensor, and of a parameter of another class than Tensor; all else the
# user has attached. 2.11 to 2.15.
FIELDS_OF_TENSORS = frozenset(("_local_tensor", "_spec", "_is_param"))


def dtensor_spec(
    mesh: DeviceMesh, placement: Sequence[Any], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Any:
    """The spec of a DTensor, without this rank's part; ``shape`` and ``stride`` are those of the whole tensor.

    ``DTensorSpec`` and ``TensorMeta`` are private; seen in 2.11 to 2.15.
    """
    return DTensorSpec(mesh, tuple(placement), TensorMeta(torch.Size(shape), tuple(stride), dtype))


def dtensor_of(local: torch.Tensor, spec: Any, kind: type[DTensor] = DTensor) -> DTensor:
    """A DTensor of ``kind`` over ``local`` itself, which may be on another device than the mesh.

    ``DTensor.from_local`` would move it there, and make a view of it, whose data cannot move; that takes twenty times
    as long. The constructor is private; seen in 2.11 to 2.15.
    """
    return kind.__new__(kind, local, spec, requires_grad=False)


def dtensor_over(
    local: torch.Tensor, mesh: DeviceMesh, placement: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """A DTensor over ``local``, without communication."""
    return dtensor_of(local, dtensor_spec(mesh, placement, shape, stride, local.dtype))


def accept_unequal_to_shard(kind: type) -> None:
    """Let specs of DTensors hold placements of a kind of ``Shard`` that are not equal to ``Shard(dim)``.

    A spec refuses such ones when it is made. Were they equal, specs of both would be, and torch would take what it
    remembers of an op on one for an op on the other. ``_verify_shard_order`` is private; seen in 2.11 to 2.15.
    """
    verify = DTensorSpec._verify_shard_order

    def verified(self: DTensorSpec, shard_order: Any) -> None:
        if not any(isinstance(placement, kind) for placement in self.placements):
            verify(self, shard_order)

    DTensorSpec._verify_shard_order = verified  # type: ignore[method-assign]


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` is a submesh of, or itself. ``_get_root_mesh`` is private; seen in 2.11 to 2.15."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def merged_axes(mesh: DeviceMesh, names: tuple[str, ...], name: str) -> DeviceMesh:
    """``mesh`` with the axes ``names``, which follow each other in it, as one; all ranks of the root mesh call it.

    ``_flatten`` and ``_concatenate`` are private; seen in 2.11 and 2.13.
    """
    every = mesh.mesh_dim_names or ()
    at, one = every.index(names[0]), mesh[names]._flatten(name)
    parts = [mesh[each] for each in every[:at]] + [one] + [mesh[each] for each in every[at + len(names) :]]
    return DeviceMesh._concatenate(parts) if len(parts) > 1 else one


def takes_state_hooks(owner: Any) -> bool:
    """Whether a module or an optimizer takes hooks on its state dict, by a private dict; seen in 2.11 to 2.15.

    An optimizer that wraps another one and has not called ``Optimizer.__init__`` has a state dict of its own.
    """
    return isinstance(owner, torch.nn.Module) or hasattr(owner, "_optimizer_state_dict_pre_hooks")


# The method of a module by which all conversions go (``to``, ``double``, ``cuda``); seen in 2.11 to 2.15.
CONVERSION = "_apply"


def has_own_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory to compare: sparse ones and those in ``torch.func`` have none. 2.11 to 2.15."""
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones too. ``_cdata`` is private; seen in 2.11 to 2.15."""
    return int(tensor.untyped_storage()._cdata)


def storage_use_count(tensor: torch.Tensor) -> int:
    """Count what shares the memory of ``tensor``: tensors, Python's or not, itself included, and Python's storages.

    Of these, there is one object for each memory. ``_storage_Use_Count`` is private; seen in 2.11 to 2.15. It counts
    the object that is asked for here, too.
    """
    storage = tensor.untyped_storage()
    held = sys.getrefcount(storage) - _references_of_unheld_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + held


@functools.cache
def _references_of_unheld_storage() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def copy_each(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others, all in one call, which torch has no public name for. Seen in 2.11 to 2.15."""
    with torch.no_grad():
        torch._foreach_copy_(list(into), list(values))


def newest_sequence_number() -> int:
    """The sequence number of the autograd node that was made last."""
    return int(next_sequence_number()) - 1


def timeout_of(group: Any) -> float:
    """Seconds until a collective of a group times out. In public it can only be set. 2.11 to 2.15."""
    kinds = [pair.partition(":")[0] for pair in distributed.get_backend_config(group).split(",")]
    device = torch.device("cpu" if "cpu" in kinds else kinds[0])
    seconds: float = group._get_backend(device).options._timeout.total_seconds()
    return seconds


def new_gloo_group(name: str, rank: int, ranks: list[int], store: Any, timeout: float) -> Any:
    """A gloo group of the ``ranks`` of the world, of which this one is the ``rank``-th; all of them call it.

    Once all have written their addresses to ``store``, they get ``timeout`` seconds to connect.

    The public ``new_group`` numbers groups by how many each rank has made, and so waits for ever where one rank has
    failed to make another; here the caller names the group. 2.11 to 2.15.
    """
    seconds = timedelta(seconds=timeout)
    with gloo_of_one_worker():
        group, _ = _new_process_group_helper(len(ranks), rank, ranks, "gloo", store, GroupName(name), timeout=seconds)
    _world.pg_group_ranks[group] = {each: k for k, each in enumerate(ranks)}
    return group


def unregistered_gloo_group(name: str, rank: int, size: int, store: Any, timeout: float) -> Any:
    """A gloo group that ``destroy_process_group`` does not end; all ranks call it. Its constructor is not documented.

    As of ``new_gloo_group``, ranks connect within ``timeout`` seconds. 2.11 to 2.15.
    """
    prefixed = distributed.PrefixStore(name, store)  # type: ignore[attr-defined]
    return _GlooOfOneWorker(prefixed, rank, size, timedelta(seconds=timeout))


@contextmanager
def gloo_of_one_worker() -> Iterator[None]:
    """Let one thread run the collectives of each gloo group that torch opens in the body, in any thread.

    torch has no public name for it: a global name, which is the class of the group, is another one meanwhile. 2.11 to
    2.15.
    """
    with _bodies_change:
        _bodies.append(None)
        distributed_c10d.ProcessGroupGloo = _GlooOfOneWorker  # type: ignore[misc]
    try:
        yield
    finally:
        with _bodies_change:
            _bodies.pop()
            if not _bodies:
                distributed_c10d.ProcessGroupGloo = distributed.ProcessGroupGloo  # type: ignore[misc]


_bodies, _bodies_change = list[None](), threading.Lock()  # of ``gloo_of_one_worker``, which run now


@contextmanager
def place_in_world(size: Callable[[int], int], rank: Callable[[int], int]) -> Iterator[None]:
    """Let torch take ``size(real)`` for the size of each group, and ``rank(real)`` for the process's rank in the world.

    ``get_world_size`` and ``get_rank`` ask for them, under whatever names a module has imported these. 2.11 to 2.15.
    """
    group_size, default_group = distributed_c10d._get_group_size, distributed_c10d._get_default_group

    class OfRank:
        """The default group, as far as ``get_rank`` asks it."""

        def __init__(self, group: Any) -> None:
            self._group = group

        def rank(self) -> int:
            return rank(self._group.rank())

    def group() -> Any:
        asks = sys._getframe(1).f_code is distributed.get_rank.__code__
        return OfRank(default_group()) if asks else default_group()

    distributed_c10d._get_group_size = lambda group: size(group_size(group))
    distributed_c10d._get_default_group = group
    try:
        yield
    finally:
        distributed_c10d._get_group_size, distributed_c10d._get_default_group = group_size, default_group


def is_whole_world(group: Any) -> bool:
    """Whether a group, as a function or an op of torch's has it, is of all ranks. 2.11 to 2.15."""
    found = distributed.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group
    return found is None or bool(found.size() == distributed.get_world_size())


def kind_of_reduction(op: Any) -> str:
    """The name of a ``ReduceOp``, as a function or an op of torch's has it: ``"SUM"``. 2.11 to 2.15."""
    found = op.op() if isinstance(op, torch.ScriptObject) else op  # type: ignore[attr-defined]
    known = distributed.ReduceOp.RedOpType.__members__
    return next((name for name, each in known.items() if found == each), "another")


def finished_work() -> Any:
    """The handle of a collective that is done, as ops of torch's return it. 2.11 to 2.15."""
    return Work.boxed(FakeWork())


def _in_this_thread(body: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """``body`` in the thread that runs now, and ``other`` in all others."""
    thread = threading.get_ident()
    return lambda *args, **kwargs: (body if threading.get_ident() == thread else other)(*args, **kwargs)


@contextmanager
def object_collectives(body: Callable[..., Any]) -> Iterator[None]:
    """Call ``body`` where torch begins to send a Python object to other ranks. 2.11 to 2.15."""
    before = distributed_c10d._object_to_tensor
    distributed_c10d._object_to_tensor = _in_this_thread(body, before)
    try:
        yield
    finally:
        distributed_c10d._object_to_tensor = before


@contextmanager
def autograd_collectives(bodies: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let the functions of ``torch.distributed.nn`` run these in place of their autograd functions, by their names.

    While torch traces they raise, and with gloo some of them are made of collectives that differ from rank to rank.
    2.11 to 2.15; they raise from 2.13 on.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    if module is None:  # nobody has imported them
        yield
        return
    new: dict[str, Any] = {
        name: SimpleNamespace(apply=_in_this_thread(body, getattr(module, name).apply)) for name, body in bodies.items()
    }
    new |= {name: lambda *_, **__: None for name in ("_not_supported_under_compile",) if hasattr(module, name)}
    before = {name: getattr(module, name) for name in new}
    vars(module).update(new)
    try:
        yield
    finally:
        vars(module).update(before)


class _GlooOfOneWorker(distributed.ProcessGroupGloo):
    """A gloo group in which one thread runs the collectives, in the order in which they began.

    Of torch's two threads each writes the name of what it has run into a string of the group, without a lock: where
    both end a collective at once, its memory is freed twice (a segmentation fault after some thousand calls). No public
    name gives a group its number of threads. 2.11 to 2.15.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]  # as torch reads it
        options = self._Options()  # type: ignore[attr-defined]
        with behind_compute():  # a device starts the thread that moves its data
            options._devices = [self.create_device(interface=name) for name in named] or [self.create_default_device()]
        options._timeout, options._threads = timeout, 1
        super().__init__(store, rank, size, options)


def set_timeout(group: Any, timeout: float) -> None:
    """Set after how many seconds a collective of a gloo group times out. In public from 2.13 on only."""
    backend = group if isinstance(group, distributed.ProcessGroupGloo) else group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=min(timeout, 1e8)))


DCP_PARTS, DCP_OFFSETS = _hf_utils.CUSTOM_METADATA_KEY, _hf_utils.SAVED_OFFSETS_KEY
DCP_VERSION = {_hf_utils.DCP_VERSION_KEY: str(_hf_utils.HF_DCP_VERSION)}


_GROUP_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


@contextmanager
def process_groups_set_aside() -> Iterator[None]:
    """Let there be no process group in the body, whose own ones are destroyed at its end.

    To make one puts a prefix before what uncaught errors print (``sys.excepthook``), which is undone, too.

    torch has one world a process, in tables by group and a registry by name; both are emptied and restored. 2.11 to
    2.15.
    """
    tables = [getattr(_world, name) for name in _GROUP_TABLES]
    kept, default, count = [dict(table) for table in tables], _world.default_pg, _world.group_count
    hook = sys.excepthook
    for table in tables:
        table.clear()
    _unregister_all_process_groups()
    _world.default_pg, _world.group_count = None, 0
    try:
        yield
    finally:
        if _world.default_pg is not None:
            distributed.destroy_process_group()
        for table, rows in zip(tables, kept, strict=True):
            table.update(rows)
        _update_default_pg(default)
        _world.group_count, sys.excepthook = count, hook
        for group, name in _world.pg_names.items():
            _register_process_group(name, group)


def inductor_graph(module: nn.Module, examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    """``module`` in the ops that Inductor has loops for, without what it returns. For fake tensors. 2.11 to 2.15.

    Importing Inductor takes two seconds, which only those pay who use it.
    """
    from torch._inductor.decomposition import select_decomp_table

    traced: fx.GraphModule = _make_fx(
        lambda *args: module(*args), decomposition_table=select_decomp_table(), tracing_mode="fake"
    )(*examples)
    traced.graph.output_node().args = ((),)
    traced.recompile()
    return traced


def inductor_code(graph: fx.GraphModule, examples: Sequence[torch.Tensor], mode: FakeTensorMode) -> str:
    """The Python module that Inductor writes for a graph, with its kernels; nothing is compiled. 2.11 to 2.15.

    The text says how kernels of a GPU are tuned: not by what this rank measures, or another one might sum otherwise.
    Casts of the graph round, also to bf16 and back, which Inductor would leave out.
    """
    from torch._inductor import config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    lowering = GraphLowering(graph, example_inputs=list(examples), shape_env=mode.shape_env, is_inference=True)
    options = {"triton.autotune_pointwise": False, "max_autotune": False, "emulate_precision_casts": True}
    with config.patch(options), V.set_fake_mode(mode), DebugContext(), V.set_graph_handler(lowering):
        lowering.run(*examples)
        code = lowering.codegen()[0]
    return str(getattr(code, "value", code))


def python_module(text: str) -> Any:
    """The module that Inductor wrote, with its kernels compiled, from its cache on disk. 2.11 to 2.15."""
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.load(text)


def cpp_library(text: str) -> tuple[Any, str]:
    """The library of C++ kernels that Inductor wrote, as ``ctypes`` loads it, and its file, in Inductor's own cache.

    Raises whatever the compiler does. 2.11 to 2.15.
    """
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache

    load = staticmethod(CppCodeCache._load_library_inner)  # instead of as a module of Python
    kernels: Any = type("Kernels", (CppPythonBindingsCodeCache,), {"cache": {}, "_load_library_inner": load})
    library = kernels.load(text, device_type="cpu")
    return library, str(library._name)


def inductor_settings() -> list[str]:
    """Inductor's settings that are not as it sets them itself; none while nothing has imported them. 2.11 to 2.15.

    Torch's own list of changed ones has those, too, that a context changed and set back.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    found = {} if config is None else config.save_config_portable()
    return sorted(f"{name} = {value!r}" for name, value in found.items() if value != config._config[name].default)


def inductor_passes() -> dict[str, Any]:
    """Users' passes in Inductor, by the names of their settings, which are not among those above. 2.11 to 2.13."""
    config: Any = sys.modules.get("torch._inductor.config")
    names = [] if config is None else [name for name in config._config if "custom" in name and "pass" in name]
    found = {name: getattr(config, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def has_registered_classes(cls: type) -> bool:
    """Whether others were registered with an abstract class: Python's, not torch's, and seen in 3.11 to 3.13.

    ``isinstance`` asks a table in C, which this method for debugging prints.
    """
    if not isinstance(cls, abc.ABCMeta):
        return False
    text = io.StringIO()
    cls._dump_registry(text)
    return "_abc_registry: set()" not in text.getvalue()


def joined_hosts(timed_out: BaseException) -> tuple[list[str], int, float] | None:
    """Of a rendezvous of torchrun's that timed out: the hosts that have joined, how many it needs, and the seconds.

    None if the error is another one. The state of a rendezvous is private; seen in 2.11 to 2.13.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    traceback = timed_out.__traceback__ if isinstance(timed_out, RendezvousTimeoutError) else None
    while traceback is not None:
        handler = traceback.tb_frame.f_locals.get("self")
        if isinstance(handler, DynamicRendezvousHandler):
            joined = {handler._this_node, *handler._state_holder.state.participants}  # this one has left again
            settings = handler.settings
            return sorted(each.addr for each in joined), settings.min_nodes, settings.timeout.join.total_seconds()
        traceback = traceback.tb_next
    return None


# Names of torch's that other files import from here; what is defined above needs no list.
__all__ = [
    "BatchNorm",
    "DataDependentOutputException",
    "DimDynamic",
    "DisableAutocast",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "GetAttrKey",
    "GuardOnDataDependentSymNode",
    "HigherOrderOperator",
    "LazyGraphModule",
    "MappingKey",
    "OpOverload",
    "OpOverloadPacket",
    "ShapeEnv",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "TreeSpec",
    "UnsupportedOperatorException",
    "core_aten_decompositions",
    "current_autograd_node",
    "default_store",
    "disable_modes",
    "disable_proxy_modes_tracing",
    "get_decompositions",
    "get_proxy_mode",
    "get_proxy_slot",
    "innermost_dispatch_mode",
    "nn_bindings",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map",
    "tree_unflatten",
    "use_lazy_graph_module",
]
