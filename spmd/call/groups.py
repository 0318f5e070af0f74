"""``Groups``: the process groups in which the programs of a call communicate, along the axes of its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from passes import Axis, AxisRole, Mesh, PlacementError

from ..ranks.connection import Connection
from ..ranks.consensus import AllGatherText
from ..ranks.local_ranks import connect_local_ranks
from ..ranks.world import subgroup_of


class Groups:
    """Adds groups to ``mesh``, the plain description of ``device_mesh``, one kind after the other.

    ``reshard``: what the mode and annotations say of ``reshard_after_forward``; a number is a group of ranks that keep
    parameters together after forward. ``own``: the gloo groups of the connection, by axis of several ranks.
    """

    def __init__(self, mesh: Mesh, device_mesh: DeviceMesh, reshard: Sequence[bool | int | None]) -> None:
        self.mesh, self._device_mesh = mesh, device_mesh
        self._kept_by = {each for each in reshard if each is not None and not isinstance(each, bool)}
        self.own: dict[int, Any] = {}

    def communicate_in(self, connection: Connection | None) -> None:
        """Let the gloo axes be the groups of ``connection``."""
        axes = [k for k, axis in enumerate(self.mesh.axes) if axis.size > 1]
        self.own = dict(zip(axes, connection.groups, strict=True)) if connection else {}
        groups = self._gloo()
        named = [replace(a, group=groups[k].group_name) if k in groups else a for k, a in enumerate(self.mesh.axes)]
        self.mesh = Mesh(tuple(named))

    def pass_by_in(self, groups: Sequence[Any]) -> None:
        """Let axes along which ranks send messages by gloo have groups for what passes by reductions in flight."""
        names = {k: group.group_name for k, group in zip(self.own, groups, strict=True)}
        by_messages = [axis.backend == "gloo" and not axis.shared for axis in self.mesh.axes]
        gloo = {k: name for k, name in names.items() if by_messages[k]}
        axes = [replace(axis, gathers=gloo.get(k, axis.gathers)) for k, axis in enumerate(self.mesh.axes)]
        self.mesh = replace(self.mesh, axes=tuple(axes))

    def kept_by(self) -> list[int]:
        """Numbers of ranks that keep parameters together after forward, ascending; other than one and all of them.

        Raises ``PlacementError`` for a number that does not divide the ranks, or where these are along several axes.
        """
        if not self._kept_by:
            return []
        axis = self._split_axis
        for size in sorted(self._kept_by):
            if axis.size > 1 and axis.size % size:
                raise PlacementError(
                    f"reshard_after_forward={size} does not divide the {axis.size} ranks of {axis.name}: each group of "
                    "ranks that keep parameters together must have as many"
                )
        return sorted(size for size in self._kept_by if size < axis.size)

    @property
    def _split_axis(self) -> Axis:
        """The one axis that styles split parameters over. Raises ``PlacementError`` unless there is one."""
        split = [self.mesh.axes[k] for k in self.mesh.axes_with(AxisRole.SHARD)]
        if len(split) == 1:
            return split[0]
        raise PlacementError(
            "reshard_after_forward=<ranks> keeps parameters together along one axis, but those with the role "
            f'"shard" are {", ".join(axis.name for axis in split) or "none"}: give that role to one axis, or '
            "reshard_after_forward=True or False"
        )

    def open_subgroups(self, connection: Connection | None) -> None:
        """Open those of ranks that keep parameters together, and those that gather along axes of NCCL.

        All ranks call it together.
        """
        groups = [self._subgroup(self.mesh.axes.index(self._split_axis), n, connection) for n in self.kept_by()]
        axes = [self._with_gathers(k, axis) for k, axis in enumerate(self.mesh.axes)]
        self.mesh = replace(self.mesh, axes=tuple(axes), subgroups=tuple(groups))

    def _subgroup(self, k: int, size: int, connection: Connection | None) -> Axis:
        axis, group = self.mesh.axes[k], self._gloo().get(k)
        if connection is not None and group is not None:
            group = connection.subgroup(group, size)
        else:
            group = subgroup_of(self._device_mesh.get_group(k), size)
        return Axis(f"{axis.name}/{size}", size, group.group_name, axis.coordinate % size, axis.backend)

    def _with_gathers(self, k: int, axis: Axis) -> Axis:
        if axis.backend != "nccl" or axis.size == 1:
            return axis
        return replace(axis, gathers=subgroup_of(self._device_mesh.get_group(k), axis.size).group_name)

    def _gloo(self) -> dict[int, Any]:
        return {k: group for k, group in self.own.items() if self.mesh.axes[k].backend == "gloo"}

    def connect_local_ranks(self, all_gather_text: AllGatherText) -> list[str]:
        """Connect the ranks of each host; ``mesh`` says from then on which axes share memory. All ranks call it.

        Returns notes on what cannot be shared.
        """
        self.mesh, notes = connect_local_ranks(self.mesh, self._gloo(), all_gather_text)
        return notes
