"""``spmd.replicate`` and ``spmd.fully_shard``: annotate modules, for steps that are compiled later."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..interpreter.keywords import checks_keywords
from ..ranks.world import as_mesh
from .contract import Annotation, Api, note, parameter_names
from .policies import MixedPrecisionPolicy, OffloadPolicy

Annotated = TypeVar("Annotated", bound=nn.Module | Sequence[nn.Module])


@checks_keywords("spmd.replicate")
def replicate(
    module: Annotated,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    device_id: int | torch.device | None = None,
) -> Annotated:
    """Annotate ``module``: every rank has all of its parameters, and their gradients are all-reduced (as in DDP).

    A step compiled with ``DataParallel``, or without a mode, follows annotations. Nothing is changed before it is
    called. Annotations nest: one of a submodule takes its whole subtree from that of the module. A module or parameter
    that several share belongs to the annotation that was applied first.

    - ``module``: a module or several; returned as given.
    - ``mesh``: of one axis, or of shape (N, 1); by default of all ranks. All annotations of a model have one mesh.
    - ``mp_policy``: the dtypes to compute and communicate in.
    - ``offload_policy``: parameters, gradients and optimizer state are in host memory.
    - ``ignored_params``: parameters that are neither placed nor made equal on all ranks; the step cannot train them.
    - ``device_id``: the device that the parameters are on, checked only: an index of CUDA devices, or a device.

    Raises ``TypeError`` or ``ValueError`` for arguments that do not fit, and ``ContractError`` for a module that has
    an annotation.
    """
    modules, mesh = _check_modules("replicate", module), _check_mesh("replicate", mesh)
    if mesh is not None and mesh.ndim == 2 and mesh.size(1) > 1:
        raise ValueError(
            f"expected a mesh of one axis, or of shape (N, 1), to replicate over, got {tuple(mesh.shape)}: split "
            "parameters over the second axis with spmd.fully_shard"
        )
    _check_device(device_id, modules, mesh)
    names, ignored = _names(modules), _ignored(modules, ignored_params)
    note(
        modules,
        Annotation(
            "replicate",
            mesh,
            check_policy(mp_policy),
            names=names,
            ignored=ignored,
            offload_policy=check_offload_policy(offload_policy),
        ),
    )
    return module


@checks_keywords("spmd.fully_shard")
def fully_shard(
    module: Annotated,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Annotated:
    """Annotate ``module``: its parameters are split over the ranks, and gathered together when it runs (as in FSDP2).

    A step compiled with ``DataParallel``, or without a mode, follows annotations. The parameters of ``module``, without
    those of annotated submodules, form one unit: they are gathered by one collective, and their gradients reduced by
    one. Annotations nest as those of ``replicate`` do.

    - ``module``: a module, or several that form one unit; returned as given.
    - ``mesh``: by default of all ranks. On two axes, parameters are split over the second and replicated over the
      first, and the batch is split over both.
    - ``reshard_after_forward``: True gathers again for backward, False keeps what forward gathered; None, the default,
      keeps it for the root alone: the outermost annotated module. A number, which divides that of the ranks: groups of
      that many consecutive ranks keep it together, and gather it again among themselves.
    - ``shard_placement_fn``: the ``Shard(dim)`` of a parameter, called when a step is compiled; None for the first dim.
    - ``mp_policy``, ``offload_policy``, ``ignored_params``: as for ``replicate``.

    Raises ``TypeError`` or ``ValueError`` for arguments that do not fit, and ``ContractError`` for a module that has
    an annotation.
    """
    modules, mesh = _check_modules("fully_shard", module), _check_mesh("fully_shard", mesh)
    check_reshard(reshard_after_forward)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"expected shard_placement_fn to be callable or None, got {shard_placement_fn!r}")
    names, ignored = _names(modules), _ignored(modules, ignored_params)
    note(
        modules,
        Annotation(
            "fully_shard",
            mesh,
            check_policy(mp_policy),
            reshard_after_forward,
            shard_placement_fn,
            names,
            ignored,
            offload_policy=check_offload_policy(offload_policy),
        ),
    )
    return module


def _check_modules(api: Api, given: Any) -> list[nn.Module]:
    modules = [given] if isinstance(given, nn.Module) else given
    if not isinstance(modules, Sequence) or not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise TypeError(f"expected a torch.nn.Module or a list of them to apply {api} to, got {given!r}")
    for module in modules:
        if inspect.getattr_static(module, "forward") is nn.Module.forward:
            raise ValueError(
                f"{api} cannot be applied to a {type(module).__name__}, which has no forward and so never runs: apply "
                "it to each of its children, or to the module that runs them"
            )
    inside = [each for module in modules for each in module.modules()]
    twice = next((module for module in modules if inside.count(module) > 1), None)
    if twice is not None:
        raise ValueError(f"{api} was given a {type(twice).__name__} that is a part of another module of the same list")
    return list(modules)


def _check_mesh(api: Api, given: Any) -> DeviceMesh | None:
    mesh = as_mesh(given)
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(
            f"expected a mesh of one or two axes to apply {api} over, got {tuple(mesh.shape)}: take a part of it, such "
            'as mesh["dp"]'
        )
    return mesh


def check_policy(given: Any) -> MixedPrecisionPolicy | None:
    """Raise ``TypeError`` unless ``given`` is a policy or None; returns it."""
    if given is not None and not isinstance(given, MixedPrecisionPolicy):
        raise TypeError(f"expected mp_policy to be a spmd.MixedPrecisionPolicy or None, got {given!r}")
    return given


def check_reshard(given: Any) -> bool | int | None:
    """Raise ``TypeError`` or ``ValueError`` unless ``given`` is None, a bool or a number of ranks; returns it."""
    if given is not None and not isinstance(given, int):
        raise TypeError(f"expected reshard_after_forward to be None, True, False or a number of ranks, got {given!r}")
    if not isinstance(given, bool) and given is not None and given < 2:
        raise ValueError(
            f"expected reshard_after_forward to be 2 ranks or more, got {given}: False keeps all on each rank"
        )
    return given


def check_offload_policy(given: Any) -> OffloadPolicy | None:
    """Raise ``TypeError`` unless ``given`` is a policy or None; returns it."""
    if given is not None and not isinstance(given, OffloadPolicy):
        raise TypeError(f"expected offload_policy to be a spmd.OffloadPolicy or None, got {given!r}")
    return given


def _check_device(given: int | torch.device | None, modules: list[nn.Module], mesh: DeviceMesh | None) -> None:
    """Raise ``ValueError`` unless the mesh and all parameters are on this device."""
    if given is None:
        return
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    if device == torch.device("cuda") and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())  # as torch takes it wherever it stands
    if mesh is not None and mesh.device_type != device.type:
        raise ValueError(f"device_id is {device}, but the mesh is of {mesh.device_type} devices: name one of these")
    elsewhere = [
        f"{name} is on {where}"
        for module in modules
        for name, parameter in module.named_parameters()
        if (where := parameter.device).type != "meta"
        and (where.type, where.index or 0) != (device.type, device.index or 0)
    ]
    if elsewhere:
        raise ValueError(f"device_id is {device}, but {', '.join(elsewhere)}: move the module there first")


def _names(modules: list[nn.Module]) -> weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]]:
    return weakref.WeakKeyDictionary({module: parameter_names(module) for module in modules})


def _ignored(modules: list[nn.Module], given: Any) -> weakref.WeakKeyDictionary[nn.Module, frozenset[str]]:
    """By name, since only the model holds its tensors."""
    ids = set(map(id, check_parameters("ignored_params", given)))
    named = {module: module.named_parameters(remove_duplicate=False) for module in modules}
    found = {module: frozenset(name for name, each in pairs if id(each) in ids) for module, pairs in named.items()}
    return weakref.WeakKeyDictionary(found)


def check_parameters(name: str, given: Any) -> tuple[nn.Parameter, ...]:
    """Raise ``TypeError`` unless ``given`` is None or parameters; returns them."""
    listed = () if given is None else given
    if not isinstance(listed, Iterable) or isinstance(listed, torch.Tensor):
        raise TypeError(f"expected {name} to be a collection of parameters, got {given!r}")
    listed = tuple(listed)
    if not all(isinstance(each, nn.Parameter) for each in listed):
        wrong = next(each for each in listed if not isinstance(each, nn.Parameter))
        raise TypeError(f"expected {name} to hold parameters, got {wrong!r}")
    return listed
