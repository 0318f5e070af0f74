"""The context of a partition: all that program and plan say before the walk begins, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import AxisRole, Input, Mesh, OutputKind, PartitionError, Program, Role
from passes.ir.program import Placements, is_even, is_sharded, replicated

from .experts.axis import EXPERTS_AXIS
from .experts.routes import Routes
from .masters import master_of
from .plan import Plan
from .redistribute import Reason


@dataclass(frozen=True)
class Context:
    """A global program and its plan. Nothing here changes during the walk."""

    program: Program
    plan: Plan

    @property
    def mesh(self) -> Mesh:
        """The mesh that the program is divided over."""
        return self.program.mesh

    @cached_property
    def replicated(self) -> Placements:
        """All of a value on every rank."""
        return replicated(self.mesh)

    @cached_property
    def inputs(self) -> dict[fx.Node, Input]:
        """The description of each placeholder."""
        return dict(zip(self.program.placeholders, self.program.inputs, strict=True))

    @cached_property
    def node_of(self) -> dict[str, fx.Node]:
        """The placeholder of each input, by name."""
        return {declared.name: node for node, declared in self.inputs.items()}

    def placement_of(self, node: fx.Node) -> Placements | None:
        """The placement of a placeholder; None for a number."""
        tensor = isinstance(node.meta["val"], torch.Tensor)
        return self.placements[self.inputs[node].name] if tensor else None

    @cached_property
    def placements(self) -> dict[str, Placements]:
        """The placement of each input, by name."""
        return {i.name: self.plan.placements.get(i.name, self.replicated) for i in self.program.inputs}

    @cached_property
    def update_placements(self) -> dict[str, Placements]:
        """The placement in which each parameter is updated, by name: its own, unless the plan names another."""
        parameters = (i.name for i in self.program.inputs if i.role is Role.PARAMETER)
        return {name: self.plan.updates.get(name, self.placements[name]) for name in parameters}

    @cached_property
    def lasting_gradients(self) -> frozenset[str]:
        """The parameters whose gradient lives on after the step."""
        return frozenset(o.of for o in self.program.outputs if o.role is Role.GRADIENT and o.of is not None)

    @cached_property
    def pending_gradients(self) -> frozenset[str]:
        """The parameters whose gradient is not reduced: it lives on as a sum over the ranks."""
        return frozenset(o.of for o in self.program.outputs if o.pending and o.of is not None)

    def gradient_placement(self, parameter: str) -> Placements:
        """The placement to reduce a gradient to: that of the update, or that of the parameter if the gradient lasts."""
        return (self.placements if parameter in self.lasting_gradients else self.update_placements)[parameter]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of each input, by name."""
        return {declared.name: declared.shape for declared in self.program.inputs}

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """The plan's units, each in order of registration. Raises ``PartitionError`` unless a parameter is in one."""
        order = {i.name: k for k, i in enumerate(self.program.inputs) if i.role is Role.PARAMETER}
        named = [name for unit in self.plan.units for name in unit]
        wrong = sorted({name for name in named if name not in order or named.count(name) > 1})
        if wrong:
            raise PartitionError(f"the plan's units must name parameters, each once, but these are not: {wrong[:8]}")
        return tuple(tuple(sorted(unit, key=order.__getitem__)) for unit in self.plan.units)

    @cached_property
    def gathers_parameters(self) -> bool:
        """Whether forward and backward gather split parameters before they read them, as data parallelism does."""
        return bool(self.plan.options.get("gather_parameters"))

    @cached_property
    def model_axes(self) -> frozenset[int]:
        """The axes that split the model: those over which no argument is split.

        Nor, where parameters are gathered, does an axis whose role is to split arguments, or parameters to be gathered.
        """
        arguments = [i for i in self.program.inputs if i.role is Role.BATCH]
        split = {k for i in arguments for k, p in enumerate(self.placements[i.name]) if isinstance(p, Shard)}
        if self.gathers_parameters:
            split.update(self.mesh.axes_with(AxisRole.BATCH, AxisRole.SHARD, AxisRole.SEQUENCE))
        return frozenset(range(len(self.mesh.axes))) - split

    @cached_property
    def routes(self) -> Routes:
        """The routes of rows that go to the ranks of their experts."""
        return Routes.of(self.program, self.plan.experts)

    @cached_property
    def uneven_rows(self) -> frozenset[int]:
        """The numbers of rows of arguments of which ranks have unequal parts."""
        arguments = [(i, self.placements[i.name]) for i in self.program.inputs if i.role is Role.BATCH]
        uneven = [(i, placement) for i, placement in arguments if not is_even(i.shape, placement, self.mesh)]
        return frozenset(i.shape[p.dim] for i, placement in uneven for p in placement if isinstance(p, Shard)) - {0}

    @cached_property
    def complete_gradients(self) -> dict[fx.Node, str]:
        """The nodes with a complete gradient to reduce, and its parameter: the last one, or one a backward pass."""
        nodes = [node for node in self.program.graph.nodes if "grad_of" in node.meta]
        tagged = {node: name for node in nodes if (name := node.meta["grad_of"]) not in self.pending_gradients}
        last = {parameter: node for node, parameter in tagged.items()}
        return {node: name for node, name in tagged.items() if node is last[name] or self.reduces_each(name)}

    @cached_property
    def updated_in_parts(self) -> dict[fx.Node, str]:
        """The nodes that are, at the end of the step, a parameter of which each rank updates a part; with its name."""
        ends = zip(self.program.output_values(), self.program.outputs, strict=True)
        return {node: o.name for node, o in ends if o.kind is OutputKind.UPDATE and o.name in self.plan.updates}

    @cached_property
    def masters(self) -> dict[str, Input]:
        """The master copy of each parameter that ranks update in parts and hold rounded, by the parameter's name."""
        updated = [declared for declared in self.program.inputs if declared.name in self.plan.updates]
        rounded = [each for each in updated if each.dtype and self.to_gather(each.name).narrows(each.dtype)]
        wire = self.plan.options.get("gather_dtype")
        return {each.name: master_of(each, self.plan.updates[each.name], wire) for each in rounded}

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """The numbers of the forward ops whose results have gradients."""
        origins = (node.meta.get("origin") for node in self.program.graph.nodes)
        return frozenset(origin.cotangent_of[0] for origin in origins if origin is not None and origin.cotangent_of)

    def reduces_each(self, parameter: str) -> bool:
        """Whether each backward pass reduces the gradient of ``parameter``; a replicated one is reduced once."""
        once = self.plan.options.get("reduce_gradients") != "each"
        return not once and is_sharded(self.gradient_placement(parameter))

    def to_gather(self, parameter: str) -> Reason:
        """The reason to gather a parameter, with the dtype in which that is done."""
        split = self.update_placements[parameter] == self.placements[parameter]
        use = "before use" if split else "after its update"
        return Reason(Role.PARAMETER, use, (parameter,), self.plan.options.get("gather_dtype"))

    def to_reduce(self, parameter: str) -> Reason:
        """The reason to reduce a gradient, with the dtype in which that is done."""
        wire = self.plan.reduce_dtypes.get(parameter, self.plan.options.get("reduce_dtype"))
        return Reason(Role.GRADIENT, of=(parameter,), wire=wire)

    def read_placement(self, parameter: str, placement: Placements) -> Placements:
        """``placement`` over the axes that split the model, or experts, replicated over those of the batch."""
        stays = self.model_axes | self.expert_axes if parameter in self.plan.experts else self.model_axes
        return tuple(p if k in stays else Replicate() for k, p in enumerate(placement))

    @cached_property
    def expert_axes(self) -> frozenset[int]:
        """The axes over which ranks have other experts."""
        return frozenset(self.mesh.axes_with(EXPERTS_AXIS)) if self.plan.experts else frozenset()

    def batch_placement(self, shape: Sequence[int] | None) -> Placements | None:
        """The placement of the batch, if a value of this shape has the same lengths in the dims that it splits."""
        for declared in self.program.inputs:
            placement = self.placements[declared.name]
            dims = [p.dim for p in placement if isinstance(p, Shard)]
            if declared.role is not Role.BATCH or not dims or shape is None or len(shape) <= max(dims):
                continue
            if all(shape[d] == declared.shape[d] for d in dims):
                return placement
        return None
