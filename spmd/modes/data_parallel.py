"""Data parallelism: the batch is split, parameters are replicated or split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from passes import Input, Memory, OutputKind, Pass, Program, Role
from passes.analysis.repeated_blocks import blocks_of
from passes.ir.program import replicated

from ..annotations.apply import check_offload_policy, check_parameters, check_policy, check_reshard
from ..annotations.chosen_units import Choice, chosen_units
from ..annotations.policies import MixedPrecisionPolicy, OffloadPolicy
from ..annotations.resolve import Annotations, Ignored, Mark
from ..partitioner.plan import Plan
from .base import PlannedMode, check_callable, check_flag
from .named_placements import check_placements, named_over, parameter_placements, state_placements
from .shares import Share, Style, check_gather_dtype, check_untrained

Reduce = Literal["once", "each"]
_STYLES, _REDUCE = get_args(Style), get_args(Reduce)
_HYBRID = ("replicate", "shard")  # axes over which the batch is split; parameters are split over the second
_WIRE = (torch.bfloat16, torch.float16, torch.float32)


class DataParallel(PlannedMode):
    """Split the batch over the first axis of the mesh, and parameters over the same axis by ``parallel_style``.

    - ``"replicate"``: every rank has all parameters; gradients are all-reduced (as in DDP).
    - ``"fully_shard"``: every rank has a part of each parameter, split on dim 0, unevenly if necessary; parameters are
      gathered before their first use and gradients are reduce-scattered (as in FSDP). 0-dim parameters are replicated.
    - ``"default"``: split what divides evenly on dim 0, replicate the rest.

    On a mesh whose axes are called ``("replicate", "shard", ...)`` the batch is split over both of these, and
    parameters over ``"shard"`` alone: gradients are reduce-scattered there, and their parts all-reduced over
    ``"replicate"``.

    ``reduce_gradients`` is for the gradients of micro-batches, where parameters are split: ``"once"`` accumulates them
    whole and reduces the sum, one reduce_scatter per parameter and step; ``"each"`` reduces each one and accumulates
    shards, for less memory and more traffic. Gradients of replicated parameters are always reduced once.

    ``params``: placements by fnmatch pattern over parameter names (``{"*.up.weight": {"tp": Shard(0)}}``), for a mesh
    with more axes than the batch's: tensor parallel, composed with a style. A parameter that is split over another axis
    stays split in forward and backward; the style splits the first dim that no other axis splits, but nothing that is
    named over its own axis (``{"norm.*": {"dp": Replicate()}}``).

    ``shard_optimizer``, with ``"replicate"``: each rank updates its part of every parameter with its part of the
    optimizer state, and parameters are gathered afterwards (ZeRO, stage 1: Rajbhandari et al. 2020). The numbers are
    the same, with the same traffic and less memory; the state becomes DTensors, split as in ``"fully_shard"``. A
    gradient that the step leaves in ``.grad`` is reduced whole, since all ranks keep it.

    ``reduce_dtype``: reduce gradients in this dtype, and cast the sums back; a wider one than theirs sums exactly.
    ``gather_dtype``: gather parameters in this dtype, which must be narrower than that of some parameter. None by
    default, because a narrower dtype rounds: each rank's share of a gradient, and the sums; and the gathered parameters
    that forward and backward read, while updates use exact parts. With ``shard_optimizer`` a rank's own part is exact
    in ``state_dict``, too, and the other parts are rounded.

    ``reshard_after_forward``, where parameters are split: True gathers each for forward, and again for backward, so
    that few units are whole at once. False gathers once and keeps parameters whole in between: less traffic, and the
    memory of the whole model. None, the default, gathers again what lies in a unit of ``units``, else in repeated
    blocks (a transformer's layers), and keeps the rest. A number, which divides that of the ranks: after forward so
    many ranks that follow each other, such as those of one host, keep each parameter together, and gather it for
    backward among themselves.
    ``prefetch``: how many units ahead of their use such gathers may start, in forward and backward. Unless the first
    number is 0, ranks of several hosts start those that forward reads first at the end of the call before.
    ``limit_gathers``: how many units may be gathered at once, the one that is read next included; it caps ``prefetch``,
    and None, the default, lets the gathers of what stays whole start when they can.

    ``units``: submodules whose parameters are gathered together, and their gradients reduced together: a module class,
    an fnmatch pattern over names of modules (``"*.blocks.?"``), a function from a module to a bool, or a list of these.
    Units inside of a unit keep their own parameters. None, the default, forms units of repeated blocks by their size.

    ``ignored_params``, ``ignored_modules``: parameters, and all that these modules hold but for annotated submodules,
    that are neither placed nor made equal on all ranks; a step cannot train them.

    ``mp_policy``: the dtypes that modules without an annotation compute and communicate in. ``offload_policy``: their
    parameters, gradients and optimizer state are in host memory, and parameters are copied to the device to be read.

    ``param_init_fn``: initializes the own parameters and buffers of a module that is on the meta device, instead of its
    ``reset_parameters``. ``sync``: False leaves what ranks bring along as it is, instead of making it equal to rank
    0's; it must be equal already.

    ``defer_updates``: True lets a call return while its last gradients are still being reduced; the next call waits for
    them where forward reads their parameters, and updates these there. The numbers are the same. Whatever else looks at
    state (a state dict, a save, a forward or a step outside of this one) finishes the update first, on all ranks
    together; before you read or write a parameter itself, call ``flush()`` of the step.

    The style is that of modules without an annotation (``spmd.replicate``, ``spmd.fully_shard``): all others are
    treated as theirs asks.

    ``input_batch_dim``: the batch dim of every tensor argument that ``inputs`` does not name. ``inputs``: placements of
    the other arguments, by name. Raises ``ValueError`` for an unknown style, reduction or dtype, and for options that
    exclude each other.
    """

    follows_annotations = True

    def __init__(
        self,
        parallel_style: Style = "replicate",
        *,
        mesh: DeviceMesh | ProcessGroup | None = None,
        input_batch_dim: int = 0,
        inputs: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        custom_passes: Sequence[Pass] | None = None,
        reduce_gradients: Reduce = "once",
        shard_optimizer: bool = False,
        reduce_dtype: torch.dtype | None = None,
        gather_dtype: torch.dtype | None = None,
        reshard_after_forward: bool | int | None = None,
        prefetch: tuple[int, int] = (1, 1),
        limit_gathers: int | None = None,
        units: Choice | Iterable[Choice] | None = None,
        ignored_params: Iterable[nn.Parameter] | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        sync: bool = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        defer_updates: bool = False,
    ) -> None:
        _check_one_of("parallel_style", parallel_style, _STYLES)
        _check_one_of("reduce_gradients", reduce_gradients, _REDUCE)
        super().__init__(mesh=mesh, inputs=inputs, input_batch_dim=input_batch_dim, custom_passes=custom_passes)
        check_placements("params", "name patterns", params)
        self.params = dict(params or {})
        self.parallel_style, self.reduce_gradients = parallel_style, reduce_gradients
        self.shard_optimizer = _check_sharding(shard_optimizer, parallel_style)
        self.reduce_dtype = _check_dtype("reduce_dtype", reduce_dtype)
        self.gather_dtype = _check_dtype("gather_dtype", gather_dtype)
        _check_gathers(gather_dtype, parallel_style, shard_optimizer)
        self.batch_axes = self.batch_axes_on(self.mesh)
        self.reshard_after_forward = _check_reshard(reshard_after_forward, parallel_style, offload_policy)
        self.prefetch, self.limit_gathers = _check_prefetch(prefetch), _check_limit(limit_gathers)
        self.units = chosen_units(units)
        self.param_init_fn, self.sync = check_callable("param_init_fn", param_init_fn), check_flag("sync", sync)
        self.defer_updates = check_flag("defer_updates", defer_updates)
        self.mp_policy, self.offload_policy = check_policy(mp_policy), check_offload_policy(offload_policy)
        self.ignored = Ignored(check_parameters("ignored_params", ignored_params), _check_modules(ignored_modules))

    @staticmethod
    def batch_axes_on(mesh: DeviceMesh | None) -> int:
        """How many axes of ``mesh`` split the batch."""
        names = () if mesh is None else (mesh.mesh_dim_names or ())
        return 2 if names[:2] == _HYBRID else 1

    def plan(self, program: Program) -> Plan:
        """Parameters by annotation or style; optimizer state as its parameter is updated; buffers replicated."""
        annotations: Annotations = program.annotations or Annotations()
        check_untrained(program, annotations)
        check_gather_dtype(program, self.gather_dtype)
        named, mesh = parameter_placements(program, self.params), program.mesh
        declared = [i for i in program.inputs if i.role is Role.PARAMETER]
        given = {i.name: i.placement or named.get(i.name) or replicated(mesh) for i in declared}
        over = (annotations.batch_axes or self.batch_axes) - 1  # the axis that styles split parameters over
        kept = named_over(program, self.params, mesh.axes[over].name if mesh.axes else "") | annotations.ignored
        shares = {i.name: self._share(annotations.marks.get(i.name)) for i in declared}
        free = [i for i in declared if i.name not in kept]
        parameters = given | {i.name: shares[i.name].placement(i, given[i.name], mesh, over) for i in free}
        updated = {output.name for output in program.outputs if output.kind is OutputKind.UPDATE}
        own = updated if self.shard_optimizer else set()  # a step outside of the program finds state as it made it
        whole = [i for i in free if i.name in own and parameters[i.name] == given[i.name]]
        updates = {i.name: Share("fully_shard").placement(i, given[i.name], mesh, over) for i in whole}
        updates = {name: placement for name, placement in updates.items() if placement != parameters[name]}
        split = [unit for unit in annotations.units if unit.annotation.api == "fully_shard"]
        units = [[name for name in annotations.members(unit) if name in shares] for unit in split]
        units += [[name for name in unit if name not in annotations.marks] for unit in annotations.chosen or ()]
        options = {
            "gather_parameters": True,
            "reduce_gradients": self.reduce_gradients,
            "reduce_dtype": self.reduce_dtype,
            "gather_dtype": self.gather_dtype,
        }
        return Plan(
            self.mesh,
            state_placements(program, parameters, updates),
            units=tuple(tuple(unit) for unit in reversed(units) if unit),  # as their gradients come about
            options=options,
            updates=updates,
            reduce_dtypes={name: share.reduce_dtype for name, share in shares.items()},
            reshard=_reshard(declared, shares, annotations.chosen),
            kept_by=_kept_by(shares, mesh.axes[over].size if mesh.axes else 1),
            prefetch=self.prefetch,
            limit_gathers=self.limit_gathers,
            memory={
                name: share.memory
                for name, share in shares.items()
                if share.memory is not Memory.DEVICE and name not in annotations.ignored
            },
        )

    def _share(self, mark: Mark | None) -> Share:
        """The treatment of a parameter: by its annotation, else by the options of the mode."""
        if mark is not None and mark.unit is not None:
            return Share.of_unit(mark.unit, mark.shard)
        policy_dtype = self.mp_policy.wire_dtype if self.mp_policy is not None else None
        memory = self.offload_policy.memory if self.offload_policy is not None else Memory.DEVICE
        wire = self.reduce_dtype or policy_dtype
        return Share(self.parallel_style, None, self.reshard_after_forward, wire, memory=memory)

    def __repr__(self) -> str:
        usual = {"shard_optimizer": False, "reduce_dtype": None, "gather_dtype": None, "reshard_after_forward": None}
        usual |= {"defer_updates": False}
        options = {name: getattr(self, name) for name in usual}
        given = "".join(f", {name}={value}" for name, value in options.items() if value is not usual[name])
        return f"DataParallel({self.parallel_style!r}{given})"


def _reshard(
    parameters: Sequence[Input], shares: Mapping[str, Share], chosen: Sequence[Sequence[str]] | None
) -> frozenset[str]:
    """The parameters that are gathered again for backward, or copied to the device again."""
    if chosen is None:
        blocks = blocks_of({each.name: each.shape for each in parameters})
        in_units = {name for name in blocks if blocks[name]}
    else:
        in_units = {name for unit in chosen for name in unit}
    found = set[str]()
    for name, share in shares.items():
        reshards = name in in_units if share.reshards is None else share.reshards
        gathers = share.style != "replicate" or share.memory is not Memory.DEVICE
        if gathers and reshards:
            found.add(name)
    return frozenset(found)


def _kept_by(shares: Mapping[str, Share], ranks: int) -> dict[str, int]:
    """How many of the ranks keep a parameter together after forward, where these are neither one nor all."""
    asked = {name: share.reshards for name, share in shares.items() if share.style != "replicate"}
    sizes = {name: size for name, size in asked.items() if size is not None and not isinstance(size, bool)}
    return {name: size for name, size in sizes.items() if size < ranks}


def _check_one_of(name: str, given: Any, allowed: Sequence[str]) -> None:
    if given not in allowed:
        listed = ", ".join(f'"{each}"' for each in allowed)
        raise ValueError(f"expected {name} to be one of {listed}, got {given!r}")


def _check_sharding(given: Any, style: Style) -> bool:
    check_flag("shard_optimizer", given)
    if given and style != "replicate":
        raise ValueError(
            f'expected shard_optimizer=True with parallel_style="replicate", got "{style}", which '
            "splits the optimizer's state together with its parameters"
        )
    return bool(given)


def _check_gathers(dtype: torch.dtype | None, style: Style, shard_optimizer: bool) -> None:
    if dtype is not None and style == "replicate" and not shard_optimizer:
        raise ValueError(
            f'expected no gather_dtype, got {dtype}: "replicate" gathers no parameters, unless it has '
            "shard_optimizer=True"
        )


def _check_reshard(given: Any, style: Style, offload_policy: OffloadPolicy | None) -> bool | int | None:
    kept_together = given is not None and not isinstance(given, bool)
    if check_reshard(given) and style == "replicate" and (offload_policy is None or kept_together):
        raise ValueError(f'expected no reshard_after_forward={given}: "replicate" gathers no parameters')
    return check_reshard(given)


def _check_prefetch(given: Any) -> tuple[int, int]:
    match given:
        case (int(forward), int(backward)) if min(given) >= 0:
            return forward, backward
    raise ValueError(f"expected prefetch to be two numbers of units, for forward and for backward, got {given!r}")


def _check_limit(given: Any) -> int | None:
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise ValueError(f"expected limit_gathers to be None or a number of units, 1 or more, got {given!r}")
    return given


def _check_modules(given: Any) -> tuple[nn.Module, ...]:
    listed = () if given is None else given
    if not isinstance(listed, Iterable) or isinstance(listed, nn.Module):
        raise TypeError(f"expected ignored_modules to be a collection of modules, got {given!r}")
    listed = tuple(listed)
    if not all(isinstance(each, nn.Module) for each in listed):
        raise TypeError(f"expected ignored_modules to hold modules, got {listed!r}")
    return listed


def _check_dtype(name: str, given: Any) -> torch.dtype | None:
    if given is not None and given not in _WIRE:
        listed = ", ".join(map(str, _WIRE))
        raise ValueError(f"expected {name} to be one of {listed} or None, got {given!r}")
    return given  # type: ignore[no-any-return]
