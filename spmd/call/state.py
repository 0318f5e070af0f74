"""Split a call's arguments into live state and values.

In: the arguments of one call. Out: the modules and optimizers found anywhere in them, a ``Slot`` for each state tensor
(parameter, buffer, optimizer state, kept gradient) that says where it lives, the live hyper-parameters, and the leaves
that are plain values. Only this file knows where torch keeps state.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from passes import CaptureError, Input, Role

from .._torch import FIELDS_OF_TENSORS, TreeSpec, own_buffers, own_parameters
from ..ranks.world import extend_placement
from .argument_logs import Log, LogPath, with_logs
from .grad_scaler import start
from .nested_state import Path, item_at, leaves_of, with_item
from .paths import Found
from .tree import flatten, flatten_with_path
from .unsupported import check_argument

# Functions and what wraps them: an equal one may be made for each call.
NO_INSTANCES = (types.FunctionType, types.MethodType, types.ModuleType, partial)
# What schedulers note in a parameter group for themselves; no optimizer reads it.
SCHEDULER_NOTES = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
# The attribute by which a parameter leads to the one in its place: optimizers of other steps may hold it.
SUCCESSOR = "_spmd_successor"
_NOT_ATTACHED = {SUCCESSOR, *FIELDS_OF_TENSORS}


@dataclass(frozen=True, eq=False)
class Slot:
    """One state tensor: the program input that it becomes, and ``holder[key]``, which holds it, at ``nested``."""

    input: Input
    holder: Any  # a dict, or a ``GradientOf``
    key: Any
    nested: Path = ()

    def get(self) -> torch.Tensor:
        """The live tensor, a DTensor where it is split."""
        tensor: torch.Tensor = item_at(self.holder[self.key], self.nested) if self.nested else self.holder[self.key]
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Hold another tensor there."""
        self.holder[self.key] = with_item(self.holder[self.key], self.nested, tensor) if self.nested else tensor

    def local(self) -> torch.Tensor:
        """The storage of this rank that the program reads and writes."""
        return local_of(self.get())


class GradientOf:
    """``parameter.grad`` as a holder, wherever the module keeps the parameter now."""

    def __init__(self, holder: Any, key: Any) -> None:
        self.holder, self.key = holder, key

    def __getitem__(self, key: Any) -> torch.Tensor:
        gradient = self.holder[self.key].grad
        assert gradient is not None
        return gradient  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, gradient: torch.Tensor | None) -> None:
        self.holder[self.key].grad = gradient


@dataclass(frozen=True, eq=False)
class HyperParameter:
    """A live number: ``group[key]``, or ``group[key][item]``, of a parameter group or of a parameter's state."""

    name: str
    group: dict[str, Any]
    key: str
    item: int | None = None

    def get(self) -> Any:
        """The value now."""
        value = self.group[self.key]
        return value if self.item is None else value[self.item]

    def put(self, value: Any) -> None:
        """Write another."""
        if self.item is not None:
            held = list(self.group[self.key])
            held[self.item] = value
            value = type(self.group[self.key])(held)
        self.group[self.key] = value


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter with each ``(holder, key)`` that holds it (more than one when tied)."""

    name: str
    tensor: torch.Tensor
    holders: tuple[tuple[dict[str, Any], str], ...]


@dataclass(frozen=True, eq=False)
class Leaf:
    """One leaf of the arguments, with its path in the user's words."""

    name: str
    value: Any


@dataclass(frozen=True)
class StateRef:
    """Stands for an argument that is itself state (``list(model.parameters())``), by the name of that state."""

    name: str


@dataclass(eq=False)
class Arguments:
    """The arguments of one call, flattened; modules and optimizers are leaves.

    ``modules``, ``optimizers`` and ``scalers`` are those among the arguments, and those ``found`` besides them.
    """

    leaves: list[Leaf]
    spec: TreeSpec
    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    scalers: dict[str, GradScaler]
    given: tuple[Any, ...] = ()  # (args, kwargs) as the caller passed them
    found: tuple[Found, ...] = ()
    has_instance: bool = False  # whether the first leaf is the object whose method the step is

    @property
    def identified(self) -> set[int]:
        """The leaves that are compared by identity: objects that hold what was found, besides modules and optimizers.

        What else they hold is compared where the step reads it.
        """
        leaves = {each.path.leaf for each in self.found if each.path.leaf is not None}
        leaves = {k for k in leaves if not isinstance(self.leaves[k].value, NO_INSTANCES)}
        return leaves | {0} if self.has_instance else leaves

    def has(self, owner: Any) -> bool:
        """Whether this is one of the modules, optimizers and objects that are compared by identity."""
        values = [*self.modules.values(), *self.optimizers.values(), *(self.leaves[k].value for k in self.identified)]
        return owner is not None and any(owner is each for each in values)

    def with_found(self, found: Sequence[Found]) -> Arguments:
        """The same, with what was found besides the arguments; all names differ."""
        if not found:
            return self

        def owners(kind: type) -> dict[str, Any]:
            return {each.name: each.value for each in found if isinstance(each.value, kind)}

        return replace(
            self,
            modules=self.modules | owners(nn.Module),
            optimizers=self.optimizers | owners(Optimizer),
            scalers=self.scalers | owners(GradScaler),
            found=(*self.found, *found),
        )

    def tensors(self) -> list[Leaf]:
        """The leaves that are tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf.value, torch.Tensor)]

    def logs(self) -> dict[str, Log]:
        """The lists and dicts that the step writes to and does not read, by name."""
        return {leaf.name: leaf.value for leaf in self.leaves if isinstance(leaf.value, Log)}

    def naming_state(self, slots: Sequence[Slot]) -> Arguments:
        """The same arguments, with a ``StateRef`` instead of each leaf that is a state tensor."""
        names = {id(slot.get()): slot.input.name for slot in slots}
        leaves = [Leaf(x.name, StateRef(names[id(x.value)])) if id(x.value) in names else x for x in self.leaves]
        return replace(self, leaves=leaves)


class ArgumentReader:
    """Binds and flattens the arguments of calls to one function. Names are worked out once per structure."""

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        self._positional = kinds <= {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        self._has_instance = next(iter(signature.parameters), "") == "self"
        self.logs: set[LogPath] = set()  # containers that the step writes to and does not read
        self.no_logs: set[LogPath] = set()  # those that it reads, after all
        self._names: tuple[Any, list[str]] = (None, [])  # of the structure that was last seen

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of one call. Raises ``TypeError`` as the function itself would."""
        if kwargs or not self._positional or len(args) != len(self._signature.parameters):
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        given = (args, kwargs)
        if self._has_instance and args:
            args = (_Instance(), *args[1:])
        if self.logs:
            args, kwargs = with_logs((args, kwargs), self.logs)
        values, spec = flatten((args, kwargs))
        if self._names[0] != spec:
            self._names = (spec, _names(self._signature, self._signature.bind(*args, **kwargs)))
        if self._has_instance and args:
            values[0] = given[0][0]
        has_instance = (
            self._has_instance and bool(args) and not isinstance(values[0], (nn.Module, Optimizer, torch.Tensor))
        )
        values = [newest(each) if isinstance(each, torch.Tensor) else each for each in values]
        leaves = list(map(Leaf, self._names[1], values))
        for leaf in leaves:
            if isinstance(leaf.value, torch.Tensor):
                check_argument(leaf.name, leaf.value)

        def owners(kind: type) -> dict[str, Any]:
            return {leaf.name: leaf.value for leaf in leaves if isinstance(leaf.value, kind)}

        modules = owners(nn.Module)
        optimizers = _with_held(modules, owners(Optimizer))
        return Arguments(leaves, spec, modules, optimizers, owners(GradScaler), given, has_instance=has_instance)


class _Instance:
    """Stands for the object whose method the step is, so that it is one leaf, also if it is a dataclass or a list."""


def _with_held(modules: dict[str, nn.Module], given: dict[str, Any]) -> dict[str, Optimizer]:
    """The optimizers given, and those that they and modules have as attributes: ``model.optimizer``, ``sam.base``."""
    found = dict(given)
    pending: list[tuple[str, Any]] = [*given.items(), *modules.items()]
    while pending:
        path, owner = pending.pop()
        for key, value in vars(owner).items():
            if isinstance(value, Optimizer) and all(value is not known for known in found.values()):
                found[f"{path}.{key}"] = value
                pending.append((f"{path}.{key}", value))
                if isinstance(owner, Optimizer) and delegates(owner):
                    found.pop(path, None)
    return found


def with_own_state(optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
    """The optimizers, each state once: what wraps an optimizer may share its state."""
    names: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        names.setdefault(id(optimizer.state), name)
    return {name: optimizers[name] for name in names.values()}


def delegates(optimizer: Optimizer) -> bool:
    """Whether an optimizer has no state of its own but that of one it wraps, as those of accelerate and Fabric."""
    return "state" not in vars(optimizer)


def _names(signature: inspect.Signature, bound: inspect.BoundArguments) -> list[str]:
    """The name of each leaf of ``(args, kwargs)``, such as ``batch.mask`` or ``nets.0``."""
    positional: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [f"{name}.{k}" for k in range(len(bound.arguments.get(name, ())))]
        elif parameter.kind not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
            positional.append(name)

    def name_of(path: tuple[Any, ...]) -> str:
        which, first, *rest = [_key(entry) for entry in path]
        head = positional[int(first)] if which == "0" else first
        return ".".join([head, *rest])

    return [name_of(path) for path, _ in flatten_with_path((bound.args, bound.kwargs))[0]]


def _key(entry: Any) -> str:
    if isinstance(getattr(entry, "key", None), torch.Tensor):
        raise CaptureError(
            "an argument is a dict with tensors for keys, and a step gets others in their place. Take names for keys"
        )
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def parameters_of(modules: dict[str, nn.Module]) -> list[Parameter]:
    """Every parameter of ``modules``, once, under its first name."""
    return _collect(modules, own_parameters)


def buffers_of(modules: dict[str, nn.Module]) -> list[Parameter]:
    """Every buffer of ``modules``, once, under its first name."""
    return _collect(modules, own_buffers)


def _collect(modules: dict[str, nn.Module], held_by: Callable[[nn.Module], dict[str, Any]]) -> list[Parameter]:
    found: dict[int, tuple[str, torch.Tensor, list[tuple[dict[str, Any], str]]]] = {}
    for prefix, submodule in submodules_of(modules):
        holder = held_by(submodule)
        for key, tensor in holder.items():
            if tensor is not None:
                _, _, holders = found.setdefault(id(tensor), (f"{prefix}.{key}", tensor, []))
                holders.append((holder, key))
    return [Parameter(name, tensor, tuple(holders)) for name, tensor, holders in found.values()]


def submodules_of(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule of ``modules`` once, with its name in the user's words."""
    seen: set[nn.Module] = set()
    for path, module in modules.items():
        yield from module.named_modules(seen, path)


def slots_of(arguments: Arguments) -> list[Slot]:
    """Every state tensor of a call, in the order of the program's inputs.

    Raises ``CaptureError`` for an optimizer with a parameter that no module of the call has.
    """
    parameters = parameters_of(arguments.modules)
    names = {id(parameter.tensor): parameter.name for parameter in parameters}
    slots = [_slot(Role.PARAMETER, p.name, p) for p in parameters]
    slots += [_slot(Role.BUFFER, b.name, b) for b in buffers_of(arguments.modules)]
    for path, optimizer in with_own_state(arguments.optimizers).items():
        slots += _optimizer_slots(path, optimizer, names)
    slots += [_gradient_slot(parameter) for parameter in parameters if parameter.tensor.grad is not None]
    device = parameters[0].tensor.device if parameters else torch.device("cpu")
    for path, scaler in arguments.scalers.items():
        slots += _scaler_slots(path, scaler, device)
    return slots


def on_mesh(slots: Sequence[Slot], mesh: DeviceMesh) -> list[Slot]:
    """The slots, with the placements of DTensors on a submesh extended to all axes of ``mesh``."""

    def extended(slot: Slot) -> Input:
        live = slot.get()
        if not isinstance(live, DTensor):
            return slot.input
        return replace(slot.input, placement=extend_placement(tuple(live.placements), live.device_mesh, mesh))

    return [replace(slot, input=extended(slot)) for slot in slots]


def _slot(role: Role, name: str, parameter: Parameter) -> Slot:
    tensor = parameter.tensor
    holder, key = parameter.holders[0]
    return Slot(_described(role, name, tensor), holder, key)


def _gradient_slot(parameter: Parameter) -> Slot:
    gradient = parameter.tensor.grad
    assert gradient is not None
    described = _described(Role.GRADIENT, gradient_name(parameter.name), gradient, parameter.name)
    return Slot(described, GradientOf(*parameter.holders[0]), None)


def _scaler_slots(path: str, scaler: GradScaler, device: torch.device) -> list[Slot]:
    held = vars(scaler)
    keys = start(path, scaler, device)
    return [Slot(_described(Role.SCALER, f"{path}.{name}", held[key]), held, key) for name, key in keys.items()]


def _optimizer_slots(path: str, optimizer: Optimizer, names: dict[int, str]) -> list[Slot]:
    slots = []
    _check_other_entries(path, optimizer, names)
    updated = parameters_of_optimizer(path, optimizer, names)
    left_over = [parameter for parameter in optimizer.state if id(parameter) in names]  # taken from its group
    for parameter in {id(p): p for p in [*updated, *left_over]}.values():
        state = optimizer.state.get(parameter, {})
        slots += _slots_in(path, state, names[id(parameter)], names[id(parameter)])
    for text, entries in optimizer.state.items():
        if isinstance(text, str) and isinstance(entries, dict):
            slots += _slots_in(path, entries, text, None)
        elif isinstance(text, str):
            slots += _slots_at(path, optimizer.state, text, "", None)
    return slots


def _slots_in(path: str, entries: dict[Any, Any], owner: str, of: str | None) -> list[Slot]:
    """The tensors in the state of a parameter, or under a text, which is of no parameter."""
    return [slot for key in entries for slot in _slots_at(path, entries, key, owner, of)]


def _slots_at(path: str, entries: dict[Any, Any], key: Any, owner: str, of: str | None) -> list[Slot]:
    return [
        Slot(_described(Role.OPTIMIZER_STATE, state_name(path, key, owner, nested), leaf, of), entries, key, nested)
        for nested, leaf in leaves_of(entries[key])
        if isinstance(leaf, torch.Tensor)
    ]


def _check_other_entries(path: str, optimizer: Optimizer, names: dict[int, str]) -> None:
    """Raise ``CaptureError`` for state of no parameter, unless it is a tensor or a container under a text."""
    for key, value in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            continue
        if not isinstance(key, str) or key in names.values() or is_number(value):
            raise CaptureError(
                f"{path}.state[{key!r}] is of no parameter, and no tensor, list or dict under a text that names none: "
                "keep a number in an attribute of the optimizer (self.steps = 0)"
            )


def _described(role: Role, name: str, tensor: torch.Tensor, of: str | None = None) -> Input:
    """The input that a live tensor becomes; a DTensor has its global shape, and a placement already.

    Raises ``CaptureError`` for a parameter or buffer of a lazy module that has not seen data yet.
    """
    if nn.parameter.is_lazy(tensor):
        raise CaptureError(
            f"{name} has no shape yet: run the model once on data of the right shape before the first step, and make "
            "the optimizer after that"
        )
    placement = tuple(tensor.placements) if isinstance(tensor, DTensor) else ()
    return Input(role, name, tuple(tensor.shape), tensor.dtype, placement, of)


def parameters_of_optimizer(path: str, optimizer: Optimizer, names: dict[int, str]) -> list[torch.Tensor]:
    """The parameters of an optimizer in the order of its groups, each known by name."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(p.shape) for p in parameters if id(p) not in names]
    if strangers:
        raise CaptureError(
            f"{path} updates {len(strangers)} parameter(s) of shape {strangers[:3]} that belong to no module that "
            "the step has as an argument or reaches by name: pass the module, too, or take parameters that no module "
            "has any more out of param_groups"
        )
    return parameters


def gradient_name(parameter: str) -> str:
    """The name of a kept gradient."""
    return f"{parameter}.grad"


def state_name(optimizer: str, key: Any, owner: str, nested: Path = ()) -> str:
    """The name of optimizer state. ``owner``: the parameter, or the text, whose entry it is; empty for none."""
    name = ".".join(map(str, (optimizer, key, *nested)))
    return f"{name}[{owner}]" if owner else name


def hyper_parameters_of(
    optimizers: dict[str, Optimizer], counters: Collection[tuple[str, int, str]] = ()
) -> list[HyperParameter]:
    """The hyper-parameters that each call reads anew: floats (and float tensors) of groups, then numbers of state.

    ``counters``: the (optimizer, group, key) of ints in groups that the step writes.
    """
    found = []
    for path, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params" or key in SCHEDULER_NOTES:
                    continue
                name = f"{path}.{index}.{key}"
                if is_live(value) or (path, index, key) in counters:
                    found.append(HyperParameter(name, group, key))
                elif isinstance(value, (tuple, list)):
                    found += [HyperParameter(f"{name}.{k}", group, key, k) for k, v in enumerate(value) if is_live(v)]
    return found + [
        HyperParameter(f"{path}.{key}[{position}]", values, key)
        for path, optimizer in with_own_state(optimizers).items()
        for position, values in enumerate(optimizer.state.values())
        for key, value in (values.items() if isinstance(values, dict) else ())
        if is_number(value)
    ]


def is_number(value: Any) -> bool:
    """Whether a value of optimizer state is a plain number, such as a counter, and read anew at each call."""
    return type(value) in (int, float)


def is_live(value: Any) -> bool:
    """Whether a value of a parameter group is read anew at each call."""
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())


def attached_to(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the user has attached to a tensor, by name."""
    return {name: value for name, value in vars(tensor).items() if name not in _NOT_ATTACHED}


def is_replaced(parameter: torch.Tensor) -> bool:
    """Whether another parameter has taken the place of this one, when a step split its model."""
    return SUCCESSOR in vars(parameter)


def newest(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter that is in the place of this one now."""
    while is_replaced(parameter):
        parameter = vars(parameter)[SUCCESSOR]
    return parameter


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's storage of a tensor: a DTensor's shard, else the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # with gradients on, to_local makes a view that autograd knows of
        return tensor.to_local()
