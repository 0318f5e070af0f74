"""Master copies among the inputs and outputs of a program: exact parts of parameters that all ranks hold rounded."""

from __future__ import annotations

from dataclasses import replace

import torch

from passes import Input, Output, OutputKind, Role
from passes.ir.program import Placements


def master_of(parameter: Input, placement: Placements, wire: torch.dtype | None) -> Input:
    """The master copy of a parameter, of which each rank has the part that it updates, and others what it sent."""
    name = f"master[{parameter.name}]"
    return replace(parameter, role=Role.MASTER, name=name, placement=placement, of=parameter.name, wire=wire)


def update_of(master: Input) -> Output:
    """The new value of a master copy."""
    described = master.shape, master.dtype, master.placement, master.of
    return Output(OutputKind.UPDATE, master.name, Role.MASTER, *described)
