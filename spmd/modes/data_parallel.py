"""Data parallelism: the batch is split, parameters are replicated or split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from os import PathLike
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from passes import AxisRole, Input, Memory, Mesh, OutputKind, Pass, PlacementError, Program, Role
from passes.analysis.repeated_blocks import blocks_of
from passes.ir.program import Placements, replicated

from ..annotations.apply import check_offload_policy, check_parameters, check_policy
from ..annotations.chosen_units import Choice, chosen_units
from ..annotations.policies import MixedPrecisionPolicy, OffloadPolicy
from ..annotations.resolve import Annotations, Ignored, Mark
from ..interpreter.keywords import checks_keywords
from ..micro_batches.same_bits import partition_with_same_bits
from ..micro_batches.time_axis import partition_in_time
from ..partitioner.experts.axis import EXPERTS_AXIS
from ..partitioner.plan import Plan
from ..ranks.axis_roles import (
    HYBRID,
    Axes,
    Roles,
    axes_having,
    check_axes,
    roles_by_position,
    unknown_axes,
)
from ..ranks.world import axis_names, with_one_axis
from ..rules.attention import Form
from ..stages.schedules import Auto, Schedule
from ..stages.stage_axis import STAGES_AXIS, partition_in_stages
from .base import PlannedMode, check_callable, check_flag
from .experts import expert_placements, experts_on_one_axis
from .named_placements import check_placements, named_over, parameter_placements, state_placements
from .option_groups import (
    Gathers,
    Reduce,
    Split,
    Wire,
    check_accumulate_dtype,
    check_bits,
    check_gather_parameters,
    check_micro_batches,
    check_modules,
    check_pipeline,
    check_reductions,
    check_statistics,
)
from .sequence import SEQUENCE_DIM, check_attention, check_sequence_dim, sequence_cuts
from .shares import Share, Style, StyleName, check_gather_dtype, check_untrained

# What ``axes=`` may name, in the order in which an axis has several.
_ROLES = (AxisRole.BATCH, AxisRole.SHARD, AxisRole.TENSOR, AxisRole.SEQUENCE, EXPERTS_AXIS, STAGES_AXIS)


class DataParallel(PlannedMode):
    """Split the batch over the axes of its role, by default the first one, and parameters by ``parallel_style``.

    - ``"replicate"``: every rank has all parameters; gradients are all-reduced (as in DDP).
    - ``"fully_shard"``: every rank has a part of each parameter, split on dim 0, unevenly if necessary; parameters are
      gathered before their first use and gradients are reduce-scattered (as in FSDP). 0-dim parameters are replicated.
    - ``"default"``: split what divides evenly on dim 0, replicate the rest.

    Other names of these: ``"ddp"`` is ``"replicate"``, ``"fsdp"`` is ``"fully_shard"``, and ``"zero1"`` is
    ``"replicate"`` with ``shard_optimizer=True``.

    ``axes`` gives roles to axes by name, ``{"batch": "dp", "tensor": "tp"}``; a role may name several axes, and an axis
    have several roles. ``"batch"``: ranks pass other rows. ``"shard"``: styles split parameters, by default over the
    axes of ``"batch"`` and ``"sequence"`` together. ``"tensor"``: ``params`` splits them. ``"sequence"``: the program
    splits ``sequence_dim`` of each argument that ``inputs`` does not name, if it is as long as there are ranks: dim 1
    of rows x time; time x rows is ``sequence_dim=0, input_batch_dim=1``. ``"experts"``:
    ranks have other experts, whose weights are split on dim 0 and stay where they are, in every style; rows go to
    them. Several of these are one axis, called ``"dp_ep"``, and have their other roles in common; all ranks then make
    the mode together, since it opens process groups. Along an axis without the role ``"batch"`` ranks pass equal
    tensors, each whole, and results are whole.

    ``experts``: the parameters whose dim 0 is the expert: an fnmatch pattern over their names, a class of modules that
    hold them, a function from a module to a bool, or a list of these. None, the default, finds those that grouped and
    batched matrix products read.

    ``attention``: how ranks that split a sequence attend to all of it. ``"gather"``: each gathers all keys and values;
    ``"ring"``: they pass these around, and compute with those of one rank at a time; ``"heads"``: they exchange rows
    for heads, which must divide evenly. None, the default, takes what communicates least, call by call. What is masked
    by ``is_causal`` is not computed.
    ``balance``: where attention is causal, each rank has an early and a late part of a sequence, for equal work, if
    twice as many parts as ranks are of equal length (and ``attention`` is not ``"heads"``, which needs none).
    Positions, labels and results are as without.

    Without ``axes`` the first axis splits the batch and parameters. On a mesh whose axes are called ``("replicate",
    "shard", ...)`` the batch is split over both of these, and parameters over ``"shard"`` alone: gradients are
    reduce-scattered there, and their parts all-reduced over ``"replicate"``.

    ``reduce_gradients`` is for the gradients of micro-batches, those of ``micro_batches`` and of the step's own loops,
    where parameters, or their updates, are split: ``"once"`` accumulates them whole and reduces the sum, one
    reduce_scatter per parameter and step; ``"each"`` reduces each one and accumulates shards, for less memory and more
    traffic. Gradients of replicated parameters are always reduced once.

    ``gather_parameters`` is for those of micro-batches, where parameters are split: ``"each"`` gathers them in each
    one, and again for backward where ``reshard_after_forward`` says so; ``"once"`` in the first one, and keeps them
    whole for the others. None, the default, takes ``"once"`` if the step then gets faster, in proportion, than its peak
    of memory grows, as the table of costs has it. With ``memory=`` of ``spmd.compile``, what does not fit gathers in
    each one.

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
    that forward and backward read, while updates use exact parts. With ``shard_optimizer`` the model holds what was
    gathered, equal on all ranks, and each rank keeps a master copy of the parts that it updates: ``spmd.save``,
    ``spmd.export``, ``spmd.state_dict`` and ``spmd.unshard`` have the exact values, the model's own ``state_dict`` what
    it holds. A write to a parameter between calls reaches the master copy.

    ``reshard_after_forward``, where parameters are split: True gathers each for forward, and again for backward, so
    that few units are whole at once. False gathers once and keeps parameters whole in between: less traffic, and the
    memory of the whole model. None, the default, gathers again what lies in a unit of ``units``, else in repeated
    blocks (a transformer's layers), and keeps the rest. A number, which divides that of the ranks, is the size of the
    groups of consecutive ranks, such as those of one host, that keep each parameter together after forward, and gather
    it for backward among themselves.
    ``prefetch``: how many units ahead of their use such gathers may start, in forward and backward.
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

    ``micro_batches``: the step runs on this many parts of each rank's rows, one after the other, for the memory of one;
    gradients, losses and whatever else sums over rows are accumulated, in ``accumulate_dtype`` (None: their own), and
    reduced and used once, after the last part. The numbers are those of the whole batch: counts are global, and draws
    follow the rows. What needs other rows at once (batch statistics) is an error with the user's line. ``"auto"``, with
    ``memory=`` of ``spmd.compile``: the least of 1, 2, 4, ..., 64 parts with which the step fits.

    ``statistics="per_micro_batch"``, with ``micro_batches``: a sum over rows of activations that a step needs before it
    can go on, as a batch norm does, is taken over the rows of one micro-batch on all ranks, times the number of these,
    which must divide the rows. Losses, gradients and new state are means over micro-batches: a batch norm's running
    statistics move once in a step, towards the mean of those of the micro-batches, with variances corrected by the
    rows of the whole batch. The numbers are not those of the whole batch then, and ``spmd.verify`` refuses such a
    step. None: such a sum is an error.

    ``bits="same"``: after any number of steps, parameters and optimizer state have the same bits on any number of ranks
    that pass the same global batch, in every style. It is computed as ``virtual`` parts, a power of two, one after the
    other on each rank, or side by side where a part needs sums of all, such as batch statistics; sums are those of one
    balanced tree. With ``micro_batches``, which divides ``virtual``, a rank runs its parts in so many turns, and those
    of one turn side by side: the bits are the same, with fewer gathers of parameters and more memory than one part at a
    time; what needs sums of all parts is an error then, as it is without ``bits``. Bits are the same on processors of
    one kind, with one version of torch and one number of threads. More than 2 ranks along an axis gather the rows of
    all arguments and exchange sums of parts; 4 on a mesh of 2 x 2 reduce them as usual, for less traffic, with at least
    two parts on each. State that the style splits is gathered for the update, too, which is computed whole on each
    rank.

    ``stages``, with ``axes={"stages": "pp"}`` and ``micro_batches``: each rank along that axis runs a part of the
    model, and has no other parameters, gradients and optimizer state. It names the module that begins each stage but
    the first, in the order in which they run (``["blocks.4", "blocks.8"]``); None finds them, by estimated seconds, or
    by where state is already. ``schedule``: ``"gpipe"`` runs all forwards first, ``"1f1b"`` a backward as soon as it
    can, for the memory of at most as many micro-batches as stages. ``"interleaved"`` gives each rank
    ``virtual_stages``, rank r of p the stages r, r + p, ..., to wait less and send more; its number of micro-batches is
    a multiple of that of ranks. ``"zb-h1"`` is ``"1f1b"`` that computes gradients of weights while it would wait.
    ``"auto"`` takes the one that is estimated to be the fastest, of those that fit ``memory=``. A path to a .csv file
    is an order in the action text of torch's ``torch.distributed.pipelining``. Numbers are those of the whole batch,
    clipping and metrics included, and results are the same on all ranks.

    The style is that of modules without an annotation (``spmd.replicate``, ``spmd.fully_shard``): all others are
    treated as theirs asks.

    ``input_batch_dim``: the batch dim of every tensor argument that ``inputs`` does not name. ``inputs``: placements of
    the other arguments, by name. ``custom_passes``: passes instead of ``passes.default()``; those of ``passes=`` of
    ``spmd.compile``, if it is given, run instead of both.

    Raises ``ValueError`` for an unknown style, reduction, role, axis or dtype, and for options that exclude each other.
    """

    follows_annotations = True

    @checks_keywords("spmd.DataParallel")
    def __init__(
        self,
        parallel_style: StyleName = "replicate",
        *,
        mesh: DeviceMesh | ProcessGroup | None = None,
        axes: Axes | None = None,
        input_batch_dim: int = 0,
        inputs: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        custom_passes: Sequence[Pass] | None = None,
        reduce_gradients: Reduce = "once",
        gather_parameters: Reduce | None = None,
        shard_optimizer: bool = False,
        reduce_dtype: torch.dtype | None = None,
        gather_dtype: torch.dtype | None = None,
        reshard_after_forward: bool | int | None = None,
        prefetch: tuple[int, int] = (1, 1),
        limit_gathers: int | None = None,
        units: Choice | Iterable[Choice] | None = None,
        experts: Choice | Iterable[Choice] | None = None,
        ignored_params: Iterable[nn.Parameter] | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        sync: bool = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        defer_updates: bool = False,
        micro_batches: int | Literal["auto"] = 1,
        accumulate_dtype: torch.dtype | None = None,
        statistics: Literal["per_micro_batch"] | None = None,
        bits: Literal["same"] | None = None,
        virtual: int = 8,
        attention: Form | None = None,
        sequence_dim: int = SEQUENCE_DIM,
        balance: bool = True,
        stages: Iterable[str] | None = None,
        virtual_stages: int = 2,
        schedule: Schedule | Auto | str | PathLike[str] = "1f1b",
    ) -> None:
        self.split = Split.check(parallel_style, shard_optimizer)
        super().__init__(mesh=mesh, inputs=inputs, input_batch_dim=input_batch_dim, custom_passes=custom_passes)
        check_placements("params", "name patterns", params)
        self.params = dict(params or {})
        self.axes, self._roles = axes, check_axes(axes, _ROLES)
        if self._roles is not None:
            self._roles, self.one_axis = experts_on_one_axis(self._roles)
            self.mesh = None if self.mesh is None else with_one_axis(self.mesh, self.one_axis)
        self.experts = chosen_units(experts, "experts")
        self.names_axes = axes is not None
        self._check_roles()
        self.wire = Wire.check(reduce_gradients, reduce_dtype, gather_dtype, self.split)
        self.mp_policy, self.offload_policy = check_policy(mp_policy), check_offload_policy(offload_policy)
        self.gathers = Gathers.check(reshard_after_forward, prefetch, limit_gathers, self.split, offload_policy)
        self.reshard_after_forward = self.gathers.reshard
        self.units = chosen_units(units)
        self.ignored = Ignored(check_parameters("ignored_params", ignored_params), check_modules(ignored_modules))
        self.param_init_fn, self.sync = check_callable("param_init_fn", param_init_fn), check_flag("sync", sync)
        self.defer_updates = check_flag("defer_updates", defer_updates)
        self.micro_batches = check_micro_batches(micro_batches, defer_updates)
        self.runs, self.chooses_runs = self.micro_batches, micro_batches == "auto"
        self.accumulate_dtype = check_accumulate_dtype(accumulate_dtype)
        self.bits = check_bits(bits, virtual, micro_batches, self.accumulate_dtype, self.defer_updates)
        self.statistics = check_statistics(statistics, self.micro_batches, stages, bits)
        if self.bits is not None:
            for role in (AxisRole.SEQUENCE, EXPERTS_AXIS, STAGES_AXIS):
                if axes_having(role, self._roles or {}):
                    raise ValueError(f'expected no axis with the role "{role}" with bits="same"')
            self.micro_batches = self.bits
        self.attention, self.balance = check_attention(attention, self._roles), check_flag("balance", balance)
        self.sequence_dim = check_sequence_dim(sequence_dim, self.input_batch_dim, self._roles, self.micro_batches)
        self.pipeline = check_pipeline(
            stages, virtual_stages, schedule, self._roles, self.micro_batches, offload_policy
        )
        self.has_stages = self.pipeline is not None
        check_reductions(reduce_gradients, self.bits, self.has_stages)
        self.gathers_once = check_gather_parameters(gather_parameters, self.split, self.micro_batches, self.has_stages)

    def partition(self, program: Program) -> Program:
        """One rank's share; a program that runs several times in a call where there are micro-batches."""
        count = self.micro_batches
        if self.chooses_runs and program.micro_batches is not None:
            count, program = program.micro_batches.count, replace(program, micro_batches=None)
        if count == 1:
            return super().partition(program)
        rows = self._rows_without_axis(program)
        if self.pipeline is not None:
            return partition_in_stages(program, self.plan, self.pipeline, count, self.accumulate_dtype, rows)
        if self.bits is not None:
            local = partition_with_same_bits(program, self.plan(program), self.bits, self.runs)
        else:
            own = self.statistics is not None
            local = partition_in_time(program, self.plan(program), count, self.accumulate_dtype, rows, keeps_own=own)
        return local.with_facts(gathers_once=self.gathers_once)

    def _rows_without_axis(self, program: Program) -> dict[str, int]:
        """The dim of the rows of the arguments that ``inputs`` does not name, where no axis splits the batch."""
        if program.mesh.axes_with(AxisRole.BATCH):
            return {}
        named = [f"{name}." for name in self.inputs or ()]
        found = [i for i in program.inputs if i.role is Role.ARGUMENT and i.dtype is not None and i.shape]
        return {i.name: self.input_batch_dim for i in found if not any(f"{i.name}.".startswith(n) for n in named)}

    @property
    def parallel_style(self) -> Style:
        """The style by which parameters are split."""
        return self.split.style

    @property
    def shard_optimizer(self) -> bool:
        """Whether each rank updates a part of replicated parameters."""
        return self.split.shards_optimizer

    def axis_roles(self, names: Sequence[str]) -> Roles:
        """The roles that ``axes`` gives; without it those by position, of two axes on a hybrid mesh."""
        if self._roles is None:
            return roles_by_position(names, 2 if tuple(names[:2]) == HYBRID else 1)
        if unknown := unknown_axes(self._roles, names):
            is_one = self.one_axis and "_".join(self.one_axis) not in names
            advice = f". Of {', '.join(self.one_axis)} one is made in the mesh that has them: give it, with mesh="
            raise PlacementError(unknown + (advice if is_one else ""))
        return self._roles

    def for_forward(self, inputs: Mapping[str, Any]) -> Self:
        """The same, of all rows at once."""
        made = super().for_forward(inputs)
        made.micro_batches = made.runs = 1
        made.chooses_runs = False
        return made

    def _check_roles(self) -> None:
        """Raise ``ValueError`` for roles that fit neither the mesh nor the other options."""
        roles = self._roles
        if roles is None and self.experts is not None:
            raise ValueError('expected axes={..., "experts": ...} with experts=, to name the axis to split them over')
        if roles is None:
            return
        if self.mesh is not None and (unknown := unknown_axes(roles, axis_names(self.mesh))):
            raise ValueError(unknown)
        if self.split.needs_axis and not axes_having(AxisRole.SHARD, roles):
            raise ValueError(
                f'expected axes to give an axis the role "shard", over which {self.split} splits: without that entry '
                'it is the role of the axes of "batch" and "sequence", and axes names none of these'
            )
        if self.experts is not None and not axes_having(EXPERTS_AXIS, roles):
            raise ValueError('expected axes to give an axis the role "experts", over which experts= is split')

    def plan(self, program: Program) -> Plan:
        """Parameters by annotation or style; optimizer state as its parameter is updated; buffers replicated."""
        annotations: Annotations = program.annotations or Annotations()
        check_untrained(program, annotations)
        check_gather_dtype(program, self.wire.gather_dtype)
        parameters = [i for i in program.inputs if i.role is Role.PARAMETER]
        shares = {i.name: self._share(annotations.marks.get(i.name)) for i in parameters}
        named = parameter_placements(program, self.params)
        given = {i.name: i.placement or named.get(i.name) or replicated(program.mesh) for i in parameters}
        experts = expert_placements(program, annotations.experts, given)
        given |= experts
        kept = self._named_over_own_axes(program) | annotations.ignored
        free = [i for i in parameters if i.name not in kept]
        placements = given | {i.name: shares[i.name].placement(i, given[i.name], program.mesh) for i in free}
        whole = [i for i in free if placements[i.name] == given[i.name]]
        updates = self._updates(program, whole, given) if self.split.shards_optimizer else {}
        return Plan(
            self.mesh,
            state_placements(program, placements, updates),
            units=_units(annotations, shares),
            options={"gather_parameters": True, "attention": self.attention, **self.wire.options()},
            updates=updates,
            cuts=sequence_cuts(program, self.inputs, self.sequence_dim, self.balance and self.attention != "heads"),
            experts=frozenset(experts),
            reduce_dtypes={name: share.reduce_dtype for name, share in shares.items()},
            reshard=_reshard(parameters, shares, annotations.chosen),
            kept_by=_kept_by(shares, program.mesh),
            prefetch=self.gathers.prefetch,
            limit_gathers=self.gathers.limit,
            memory=_memory(shares, annotations),
        )

    def _named_over_own_axes(self, program: Program) -> set[str]:
        """The parameters that ``params`` places over an axis by its name over which styles split parameters."""
        axes = [program.mesh.axes[k].name for k in program.mesh.axes_with(AxisRole.SHARD)]
        return set[str]().union(*(named_over(program, self.params, axis) for axis in axes))

    def _updates(
        self, program: Program, whole: Sequence[Input], given: Mapping[str, Placements]
    ) -> dict[str, Placements]:
        """The placements in which replicated parameters are updated, each rank its part.

        Of those that the program updates: a step outside of it finds state as it made it.
        """
        updated = {output.name for output in program.outputs if output.kind is OutputKind.UPDATE}
        split, own = Share("fully_shard"), [i for i in whole if i.name in updated]
        found = {i.name: split.placement(i, given[i.name], program.mesh) for i in own}
        return {name: placement for name, placement in found.items() if placement != given[name]}

    def _share(self, mark: Mark | None) -> Share:
        """The treatment of a parameter: by its annotation, else by the options of the mode."""
        if mark is not None and mark.unit is not None:
            return Share.of_unit(mark.unit, mark.shard)
        policy_dtype = self.mp_policy.wire_dtype if self.mp_policy is not None else None
        memory = self.offload_policy.memory if self.offload_policy is not None else Memory.DEVICE
        wire = self.wire.reduce_dtype or policy_dtype
        return Share(self.split.style, None, self.gathers.reshard, wire, memory=memory)

    @property
    def _shown_runs(self) -> int | str | None:
        if self.chooses_runs:
            return "'auto'"
        return self.runs if self.runs > 1 else None

    def __repr__(self) -> str:
        shown = {
            "axes": self.axes,
            "shard_optimizer": self.split.shards_optimizer or None,
            "reduce_dtype": self.wire.reduce_dtype,
            "gather_dtype": self.wire.gather_dtype,
            "gather_parameters": {True: "'once'", False: "'each'", None: None}[self.gathers_once],
            "reshard_after_forward": self.gathers.reshard,
            "defer_updates": self.defer_updates or None,
            "micro_batches": self._shown_runs,
            "statistics": self.statistics,
            "bits": self.bits and "'same'",
            "virtual": self.bits,
            "attention": self.attention,
            "sequence_dim": None if self.sequence_dim == SEQUENCE_DIM else self.sequence_dim,
            "balance": None if self.balance else False,
        }
        given = "".join(f", {name}={value}" for name, value in shown.items() if value is not None)
        return f"DataParallel({self.split.style!r}{given})"


def _units(annotations: Annotations, shares: Mapping[str, Share]) -> tuple[tuple[str, ...], ...]:
    """The parameters of each unit that annotations and the mode name, as their gradients come about."""
    split = [unit for unit in annotations.units if unit.annotation.api == "fully_shard"]
    units = [[name for name in annotations.members(unit) if name in shares] for unit in split]
    units += [[name for name in unit if name not in annotations.marks] for unit in annotations.chosen or ()]
    return tuple(tuple(unit) for unit in reversed(units) if unit)


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


def _kept_by(shares: Mapping[str, Share], mesh: Mesh) -> dict[str, int]:
    """The number of ranks that keep a parameter together after forward, where these are neither one nor all."""
    ranks = prod(mesh.axes[k].size for k in mesh.axes_with(AxisRole.SHARD))
    asked = {name: share.reshards for name, share in shares.items() if share.style != "replicate"}
    sizes = {name: size for name, size in asked.items() if size is not None and not isinstance(size, bool)}
    return {name: size for name, size in sizes.items() if size < ranks}


def _memory(shares: Mapping[str, Share], annotations: Annotations) -> dict[str, Memory]:
    """Memories of the parameters that are not on the device."""
    elsewhere = {name: share.memory for name, share in shares.items() if share.memory is not Memory.DEVICE}
    return {name: memory for name, memory in elsewhere.items() if name not in annotations.ignored}
