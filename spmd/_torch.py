"""Every private or experimental torch name that spmd uses, each with why, and the torch versions it was seen in."""

# The type of torch.ops.aten.mm.default; ops are keys of tables here. 2.11 to 2.15.
from torch._ops import OpOverload, OpOverloadPacket

# The decomposition table that ships with torch, for ops without a rule. 2.11 to 2.15.
from torch._decomp import core_aten_decompositions, get_decompositions

# Tensors without storage, to trace and to type-check graphs. 2.11 to 2.15.
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

# Live hyper-parameters are backed symbolic floats, and a name for each is asked for. 2.11 to 2.15.
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

# The tracer, and from a traced tensor to the node that made it. 2.11 to 2.15.
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx

# Hooks on every module call while tracing, to know the module of a node. 2.11 to 2.15.
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# The store behind the default process group, for agreement without collectives. 2.11 to 2.15.
from torch.distributed.distributed_c10d import _get_default_store as default_store

# A store that keeps nothing, for a world of one; the import registers the backend "fake". 2.11 to 2.15.
from torch.testing._internal.distributed.fake_pg import FakeStore

# See every op below autograd. 2.11 to 2.15.
from torch.utils._python_dispatch import TorchDispatchMode

# Nested arguments with the path of each leaf. 2.11 to 2.15.
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

__all__ = [
    "ConstantSource",
    "DataDependentOutputException",
    "DimDynamic",
    "DynamicOutputShapeException",
    "FakeStore",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "OpOverload",
    "OpOverloadPacket",
    "ShapeEnv",
    "TorchDispatchMode",
    "TreeSpec",
    "core_aten_decompositions",
    "default_store",
    "get_decompositions",
    "get_proxy_mode",
    "get_proxy_slot",
    "keystr",
    "make_fx",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map",
    "tree_unflatten",
]
