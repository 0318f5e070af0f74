"""The work of a user's step: captured once, partitioned for each number of ranks along "tensor"; bytes of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MethodType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from passes import OutputKind, Phase, Program, Role, SpmdError

from ..modes.data_parallel import DataParallel
from ..modes.sequence import SEQUENCE_DIM
from ..step import CompiledStep
from .capture import captured, partitioned, partitioned_on, sections
from .estimate import State, Traffic, Work
from .kernels import Section, kinds_of_blocks
from .recipes import recipe
from .shorten import shortened

SEQUENCE, EXPERTS, TENSOR = "cp", "ep", "tp"  # names of the axes that split these

_SAMPLED = 2  # ranks of the batch's axis: enough to see which values are split over it


@dataclass(frozen=True)
class StepWork:
    """One step as it is given. ``rows``: of its batch; ``tokens``: of a row, where an argument has rows of integers."""

    work: Work
    rows: int
    tokens: int
    notes: tuple[str, ...]

    @property
    def blocks(self) -> tuple[str, int] | None:
        """The name of the first of its equal blocks, and how many there are; None if some are of another kind."""
        found = [(each.name, each.count) for each in self.work.plain if each.count > 1]
        return found[0] if len(found) == 1 else None


class CapturedStep:
    """A step and the arguments of a call with the whole batch, captured once for all shares but those of experts.

    Raises ``TypeError`` for what is no compiled step, ``ValueError`` for a mode whose layouts are not searched.
    """

    def __init__(self, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._step, self._args = unbound(step, args)
        self._kwargs, self._known = dict(kwargs), dict[tuple[int, int], StepWork | None]()
        self.backend = "inductor" if self._step.options.backend == "inductor" else "aten"
        self._given = given_mode(self._step)
        self.axes = axes_of(self._given)
        self.recipes: dict[int, Mapping[str, int]] = {}  # by ranks along "tensor", where ``params`` names no axis
        self._captured: tuple[Program, dict[str, int]] | None = None  # and its equal blocks, of which it has two each

    def of(self, tensor: int = 1, experts: int = 1) -> StepWork:
        """The share of one of ``tensor`` ranks along the axis that ``params`` names, and of ``experts`` ranks."""
        found = self._known.get((tensor, experts))
        if found is None:
            found = self._work(tensor, experts) if self._captured else self._first_work(tensor, experts)
            self._known[tensor, experts] = found
        return found

    def divides_tensor(self, ranks: int) -> bool:
        """Whether so many ranks can divide parameters: as ``params`` says, or else by the recipe of the least cost."""
        if self.axes[1] is not None or ranks == 1:
            return True
        if ranks not in self.recipes:
            self.recipes[ranks] = self.recipe
            try:
                self.of(ranks)
            except (SpmdError, ValueError):
                self.recipes[ranks] = {}
        return bool(self.recipes[ranks])

    @cached_property
    def recipe(self) -> dict[str, int]:
        """The dims of parameters that ranks split at the least cost, by patterns."""
        self.of()
        assert self._captured is not None, "a share is of what was captured"
        program, counts = self._captured
        found: dict[str, int] = {}
        try:
            splits = recipe(program, axis=1) or {}
        except Exception:  # what it cannot divide is planned whole
            return found
        for name, dim in splits.items():  # of equal blocks, the last one's stands for all
            block = next((each for each in counts if name.startswith(f"{each.rpartition('.')[0]}.")), "")
            container = block.rpartition(".")[0]
            found[f"{container}.*.{name[len(container) + 1 :].partition('.')[2]}" if block else name] = dim
        return found

    def divides_experts(self, ranks: int) -> bool:
        """Whether so many ranks can divide its experts."""
        if ranks > 1 and self._may_have_experts and (1, ranks) not in self._known:
            try:
                self.of(1, ranks)
            except (SpmdError, ValueError):
                self._known[1, ranks] = None
        return ranks == 1 or self._known.get((1, ranks)) is not None

    @cached_property
    def _may_have_experts(self) -> bool:
        """Whether it has parameters of three dims: what has no experts is not captured in search of them."""
        modules = self._step.runner.read(self._args, self._kwargs).modules.values()
        return any(each.dim() == 3 for module in modules for each in module.parameters())

    def divides_sequence(self, context: int) -> bool:
        """Whether so many ranks can split its sequences, each with two equal parts of every one.

        Without attention as an op of its own nothing is known of what they would send.
        """
        attends = self.of().work.traffic.keys > 0
        return context == 1 or (attends and self.of().tokens % (2 * context) == 0 and self._splits_sequence)

    @cached_property
    def _splits_sequence(self) -> bool:
        try:
            self._local({self.axes[0]: _SAMPLED, SEQUENCE: 2}, {"batch": self.axes[0], "sequence": SEQUENCE}, {})
        except (SpmdError, ValueError):
            return False
        return True

    def _first_work(self, tensor: int, experts: int) -> StepWork:
        """The first share, by which it shows whether two of equal blocks can stand for all."""
        try:
            self._captured = self._capture(*shortened(self._step, self._args, self._kwargs))
            return self._work(tensor, experts)
        except Exception:  # it counts its blocks, or names each of them
            self._captured = self._capture(self._args, self._kwargs, {})
            return self._work(tensor, experts)

    def _capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], counts: dict[str, int]
    ) -> tuple[Program, dict[str, int]]:
        """The step on two ranks along the batch, and two along another axis, which pass the same."""
        batch, other = self.axes[0], self.axes[1] or TENSOR
        mode = self._mode({"batch": batch, "tensor": other}, {})
        return captured(self._step, mode, args, kwargs, {batch: _SAMPLED, other: _SAMPLED}), counts

    def _work(self, tensor: int, experts: int) -> StepWork:
        batch, other = self.axes[0], self.axes[1] or TENSOR
        mesh, roles = {batch: _SAMPLED, other: tensor}, dict[str, Any](batch=batch, tensor=other)
        if experts > 1:
            mesh = {batch: _SAMPLED, EXPERTS: experts, other: tensor}
            roles |= {"experts": EXPERTS, "batch": (batch, EXPERTS)}
        local = self._local(mesh, roles, self.recipes.get(tensor, {}))
        assert self._captured is not None, "a share is of what was captured"
        return _work_of(local, self._given, self._captured[1], _SAMPLED * experts, self.backend == "inductor")

    def _local(self, mesh: Mapping[str, int], roles: Mapping[str, Any], recipe: Mapping[str, int]) -> Program:
        """A rank's share on another mesh: of what was captured where that has as many axes, and so the same batch."""
        mode = self._mode(roles, recipe)
        assert self._captured is not None, "a share is of what was captured"
        program, counts = self._captured
        if len(mesh) == len(program.mesh.axes):
            return partitioned_on(program, mode, mesh)
        fewer = shortened(self._step, self._args, self._kwargs)[:2] if counts else (self._args, self._kwargs)
        return partitioned(self._step, mode, *fewer, mesh)

    def _mode(self, roles: Mapping[str, Any], recipe: Mapping[str, int]) -> Callable[[DeviceMesh], DataParallel]:
        """The step's mode on another mesh, whose axes have these roles."""
        given, batch = self._given, self.axes[0]
        params = _along(given.params, batch) | {name: {TENSOR: Shard(dim)} for name, dim in recipe.items()}
        if "tensor" not in roles:  # where none splits parameters, ``params`` need not be known
            params = {name: each for name, each in params.items() if self.axes[1] not in each}

        def mode(device_mesh: DeviceMesh) -> DataParallel:
            return DataParallel(
                "replicate",
                mesh=device_mesh,
                axes=roles,
                params=params,
                inputs=_along(given.inputs or {}, batch),
                input_batch_dim=given.input_batch_dim,
                sequence_dim=given.sequence_dim if "sequence" in roles else SEQUENCE_DIM,
                mp_policy=given.mp_policy,
                experts=given.experts.choices if "experts" in roles and given.experts else None,
            )

        return mode


def _along(placements: Mapping[str, Any], batch: str) -> dict[str, Any]:
    """Placements of a mesh of one axis, as those along ``batch`` of a larger one."""
    given = {k: each[0] if isinstance(each, Sequence) and len(each) == 1 else each for k, each in placements.items()}
    return {name: {batch: each} if isinstance(each, Placement) else each for name, each in given.items()}


def _work_of(local: Program, given: DataParallel, counts: Mapping[str, int], ranks: int, fuses: bool) -> StepWork:
    """Sections and state of a rank's share; ``ranks`` have other rows, ``fuses``: with islands, too.

    Raises ``ValueError`` without a batch.
    """
    rows = [i for i in local.inputs if i.role is Role.BATCH and i.shape]
    if not rows:
        raise ValueError("expected a step with a batch among its arguments, of which ranks can have different rows")
    shape = rows[0].shape
    dim = given.input_batch_dim
    integers = [prod(i.shape) // i.shape[dim] for i in rows if i.dtype == torch.int64 and len(i.shape) > 1]
    plain = _counted(sections(local, fused=False), counts)
    fused = _counted(sections(local, fused=True), counts) if fuses else ()
    traffic = Traffic(keys=max(sum(k.keys.each for k in each.kernels[Phase.FORWARD]) for each in plain))
    work = Work(plain, fused, _state(local, given, counts), traffic)
    return StepWork(work, shape[dim] // ranks, max(integers, default=1), tuple(local.notes))


def _counted(found: list[Section], counts: Mapping[str, int]) -> list[Section]:
    """The sections, with as many blocks as the whole model has."""
    return [replace(each, count=counts.get(each.name, each.count)) for each in found]


def given_mode(step: Any) -> DataParallel:
    """The mode of a step. Raises ``ValueError`` unless it is ``DataParallel``."""
    mode = step.options.mode
    if not isinstance(mode, DataParallel):
        raise ValueError(f"expected a step with DataParallel, whose layouts a plan compares, got {mode!r}")
    return mode


def axes_of(mode: DataParallel) -> tuple[str, str | None]:
    """The names of the batch's axis, and of the one along which ``params`` splits parameters, if it names one."""
    named = [axis for placement in mode.params.values() if isinstance(placement, Mapping) for axis in placement]
    stated = (mode.axes or {}).get("batch", "dp")
    batch = stated if isinstance(stated, str) else next(iter(stated))
    others = sorted({axis for axis in named if axis != batch})
    if len(others) > 1:
        raise ValueError(f"expected params to split parameters over one axis beside {batch!r}, got {others}")
    return batch, others[0] if others else None


def unbound(step: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A step, and its arguments with the instance where it is a method."""
    if isinstance(step, MethodType):
        step, args = step.__func__, (step.__self__, *args)
    if not isinstance(step, CompiledStep):
        raise TypeError(f"expected a step that spmd.compile made, got {step!r}: decorate it with @spmd.compile")
    return step, args


def _state(local: Program, given: DataParallel, counts: Mapping[str, int]) -> State:
    """Bytes for each number: of parameters, of gradients like them, of the optimizer's state, and of what is sent.

    They are means over the whole model, whose blocks may have another optimizer, or be frozen, unlike its ends.
    """
    kinds = kinds_of_blocks(local).items()
    times = {f"{each}.": counts.get(kind, len(blocks)) / len(blocks) for kind, blocks in kinds for each in blocks}

    def total(listed: Iterable[tuple[str | None, Sequence[int], int]]) -> float:
        """Bytes of tensors, each with the parameter that it belongs to, its shape, and the size of its elements."""
        return sum(
            next((n for block, n in times.items() if (of or "").startswith(block)), 1.0) * prod(shape) * size
            for of, shape, size in listed
        )

    parameters = [(i.name, i.shape, _size(i.dtype)) for i in local.inputs if i.role is Role.PARAMETER]
    changed = {o.of or o.name for o in local.outputs if o.role in (Role.PARAMETER, Role.GRADIENT)}
    held = [(i.of, i.shape, _size(i.dtype)) for i in local.inputs if i.role is Role.OPTIMIZER_STATE]
    made = [o for o in local.outputs if o.role is Role.OPTIMIZER_STATE and o.kind is not OutputKind.UPDATE]
    count = total((name, shape, 1) for name, shape, _ in parameters) or 1
    policy = given.mp_policy.param_dtype if given.mp_policy is not None else None
    narrow = given.wire.gather_dtype or policy
    weight, wire = total(parameters) / count, given.wire.gather_dtype
    return State(
        weight,
        total(each for each in parameters if each[0] in changed) / count,
        total([*held, *((o.of, o.shape, _size(o.dtype)) for o in made)]) / count,
        _size(narrow) if narrow is not None else None,
        weight if wire is not None and wire.itemsize < weight else 0.0,
    )


def _size(dtype: torch.dtype | None) -> int:
    return dtype.itemsize if dtype is not None else 8
