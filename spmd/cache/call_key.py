"""The facts of a call by which its entry is found: arguments, state, optimizers, mesh and options, as JSON.

Values that the trace may not depend on (numbers among the arguments, attributes) are no part of it: the entry has those
that it read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from passes import Pass
from passes.default_passes import table_of

from .._torch import (
    HOOK_DICTS,
    MODULE_NOTES,
    accumulation_hooks,
    count_dispatch_modes,
    gradient_hooks,
    own_buffers,
    own_children,
    own_parameters,
    saved_tensors_hooks,
)
from ..annotations.chosen_units import ChosenUnits
from ..annotations.resolve import Ignored
from ..answers.answer import values_of
from ..call.call import Call
from ..call.inputs import is_apart
from ..call.state import SCHEDULER_NOTES, StateRef, attached_to, is_live, submodules_of
from ..guards.guards import torch_settings
from ..guards.leaves import firsts_of
from ..modes.auto import Auto
from ..modes.data_parallel import DataParallel
from ..modes.dtensor_expand import DTensorExpand
from ..options import Options
from ..rules import user_rules
from .described import Describer
from .not_cached import NotCachedError

_PLAIN = (bool, int, float, complex, str, bytes)


def names_of(call: Call) -> dict[int, str]:
    """The names of the state, modules and optimizers of a call, by id: what stands for them in descriptions."""
    given = call.given
    names = {id(module): name for name, module in submodules_of(given.modules)}
    names |= {id(optimizer): name for name, optimizer in given.optimizers.items()}
    return names | {id(slot.get()): slot.input.name for slot in call.slots}


def facts_of_call(
    name: str, function: Callable[..., Any], call: Call, options: Options, live: tuple[str, ...], describer: Describer
) -> dict[str, Any]:
    """The facts of a call of ``function``; ``live``: the numbers among its arguments that are to be inputs.

    Raises ``NotCachedError`` where one of them cannot be compared across processes.
    """
    given = call.given
    return {
        "name": name,
        "function": describer.of(function),
        "structure": repr(given.spec),
        "leaves": [[leaf.name, *_leaf(leaf.value, describer)] for leaf in call.arguments.leaves],
        "found": [each.name for each in given.found],
        "modules": [_module(*each, describer) for each in submodules_of(given.modules)],
        "optimizers": [_optimizer(*each, describer) for each in given.optimizers.items()],
        "state": [_slot(slot, call, describer) for slot in call.slots],
        "numbers": [[each.name, type(each.get()).__name__] for each in call.hyper_parameters],
        "one tensor": firsts_of(given),
        "inputs": [[x.name, str(x.role), x.shape, str(x.dtype), repr(x.placement)] for x in call.inputs],
        "annotations": _option(call.annotations.facts(), describer),
        "without gradient": sorted(call.without_gradient),
        "watched": list(map(astuple, call.watched)),
        "answers": [values_of(call.answers), values_of(call.likely)],
        "live": live,
        "settings": _settings(),
        "mesh": _mesh(call),
        "options": list(_options(options, describer)),
    }


def _leaf(value: Any, describer: Describer) -> Iterator[Any]:
    """The kind of an argument; the value of a plain one is the entry's to compare."""
    if isinstance(value, StateRef):
        yield from ("state", value.name)
    elif isinstance(value, torch.Tensor):
        cls, attached = describer.of_class(type(value)), _attached(value, describer)
        yield from (
            "tensor",
            cls,
            str(value.dtype),
            list(value.shape),
            str(value.device),
            value.requires_grad,
            is_apart(value),
            attached,
        )
    elif isinstance(value, _PLAIN) or value is None:
        yield type(value).__qualname__
    else:
        yield describer.of(value)


def _attached(tensor: torch.Tensor, describer: Describer) -> list[Any]:
    return [[name, describer.of(value)] for name, value in attached_to(tensor).items()]


def _module(name: str, module: torch.nn.Module, describer: Describer) -> list[Any]:
    held = [
        [[key, describer.names.get(id(each))] for key, each in holder.items()]
        for holder in (own_children(module), own_parameters(module), own_buffers(module))
    ]
    noted = [*(number for key in sorted(HOOK_DICTS) for number in vars(module).get(key, ())), *own_buffers(module)]
    notes = [[each in vars(module).get(key, ()) for each in noted] for key in sorted(MODULE_NOTES)]
    return [name, describer.of_class(type(module)), vars(module).get("training"), held, notes]


def _optimizer(name: str, optimizer: torch.optim.Optimizer, describer: Describer) -> list[Any]:
    def number_or_value(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *map(number_or_value, value)]
        return type(value).__name__ if is_live(value) else describer.of(value)

    groups = [
        [
            [describer.names.get(id(p)) for p in group["params"]],
            [[k, number_or_value(v)] for k, v in group.items() if k != "params" and k not in SCHEDULER_NOTES],
        ]
        for group in optimizer.param_groups
    ]
    values = [
        [
            describer.names.get(id(p), p if isinstance(p, str) else None),
            [[k, _value_of_state(v, describer)] for k, v in (held if isinstance(held, dict) else {None: held}).items()],
        ]
        for p, held in optimizer.state.items()
    ]
    defaults = [[k, number_or_value(v)] for k, v in optimizer.defaults.items()]
    step = describer.of(vars(optimizer)["step"]) if "step" in vars(optimizer) else None
    return [name, describer.of_class(type(optimizer)), groups, values, defaults, step]


def _value_of_state(value: Any, describer: Describer) -> Any:
    if isinstance(value, torch.Tensor) or type(value) in (int, float):
        return type(value).__name__
    return describer.of(value)


def _slot(slot: Any, call: Call, describer: Describer) -> list[Any]:
    live = slot.get()
    if gradient_hooks(live) or accumulation_hooks(live):
        raise NotCachedError(f"{slot.input.name} has hooks")
    placed = [repr(live.placements), repr(live.device_mesh.mesh_dim_names)] if isinstance(live, DTensor) else None
    properties = (str(live.dtype), list(live.shape), list(live.stride()), str(live.device), str(live.layout))
    bits = (live.requires_grad, live.is_leaf, live.is_conj(), live.is_neg(), call.initial.holds(slot))
    return [
        slot.input.name,
        str(slot.input.role),
        describer.of_class(type(live)),
        *properties,
        *bits,
        placed,
        _attached(live, describer),
    ]


def _settings() -> list[str]:
    """Torch's settings of now. Raises ``NotCachedError`` for what has code of the user's in it."""
    found = []
    for name, *values in torch_settings():
        if name in ("global hooks", "function modes") and any(values):
            raise NotCachedError(f"there are {name}")
        found.append(f"{name} {values}")
    if saved_tensors_hooks() is not None:
        raise NotCachedError("there are hooks on saved tensors")
    if count_dispatch_modes():
        raise NotCachedError("a dispatch mode is on")
    if user_rules.registered:
        raise NotCachedError(f"the user has rules for {user_rules.registered[0]}")
    return found


def _mesh(call: Call) -> dict[str, Any]:
    """The mesh as this rank sees it."""
    coordinates = [axis.coordinate for axis in (*call.mesh.axes, *call.mesh.subgroups)]
    return {**facts_of_mesh(call), "own": [dist.get_rank() if dist.is_initialized() else 0, coordinates]}


def facts_of_mesh(call: Call) -> dict[str, Any]:
    """The mesh as all ranks see it, without the names of process groups, which differ from process to process."""
    axes = (*call.mesh.axes, *call.mesh.subgroups)
    shown = [asdict(replace(axis, group="", gathers=str(bool(axis.gathers)), coordinate=0)) for axis in axes]
    world = [dist.get_world_size(), str(dist.get_backend())] if dist.is_initialized() else []
    ranks = call.device_mesh.mesh.tolist()
    return {"axes": shown, "ranks": ranks, "device": call.device_mesh.device_type, "world": world}


def _options(options: Options, describer: Describer) -> Iterator[Any]:
    """The parallel mode and the passes. Raises ``NotCachedError`` for those of the user's own."""
    if type(options.mode) not in (DataParallel, DTensorExpand):
        is_auto = isinstance(options.mode, Auto)
        what = "chooses a style in each process" if is_auto else "is a parallel mode of the user's"
        raise NotCachedError(f"{type(options.mode).__qualname__} {what}")
    yield type(options.mode).__qualname__
    yield _option(vars(options.mode), describer)
    for each in options.pipeline:
        yield _option(each, describer)
    yield table_of(options.pipeline).digest
    yield _option(options.dynamic, describer)


def _option(value: Any, describer: Describer) -> Any:
    if isinstance(value, Pass) and type(value).__module__.partition(".")[0] != "passes":
        raise NotCachedError(f"{type(value).__qualname__} is a pass of the user's")
    if isinstance(value, DeviceMesh):
        return "a mesh"  # the call's
    if isinstance(value, Placement):
        return repr(value)
    if isinstance(value, Ignored):
        if value.parameters() or value.modules:
            raise NotCachedError("ignored_params and ignored_modules name objects")
        return "none ignored"
    if isinstance(value, ChosenUnits):
        if any(callable(each) and not isinstance(each, type) for each in value.choices):
            raise NotCachedError("a function of the user's chooses units")
        return [_option(each, describer) for each in value.choices]
    if is_dataclass(value) and not isinstance(value, type):
        return [
            type(value).__qualname__,
            [[each.name, _option(getattr(value, each.name), describer)] for each in fields(value)],
        ]
    if isinstance(value, Mapping):
        return [[_option(k, describer), _option(v, describer)] for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [type(value).__name__, *(_option(each, describer) for each in value)]
    if isinstance(value, Pass):  # one without options
        return type(value).__qualname__
    return describer.of(value)
