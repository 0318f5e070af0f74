"""Errors that a user's own rule, pass, mode, override, transformation or backend raises: why, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import passes
import spmd
from spmd.rules import RULES, user_rules

MINE = torch.library.Library("errors_of_users", "DEF")
MINE.define("half(Tensor x) -> Tensor")
MINE.impl("half", lambda x: x / 2, "CompositeExplicitAutograd")
torch.library.register_fake("errors_of_users::half", torch.empty_like, lib=MINE)


def missing(*args: Any, **kwargs: Any) -> Any:
    return {}["missing"]


class BrokenPass(passes.Pass):
    """A pass that fails at an op."""

    numerics = "exact"

    def rewrite(self, program: passes.Program) -> int:
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.errors_of_users.half.default):
            missing(node)
        return 0


class BrokenMode(spmd.DataParallel):
    """A mode that has no plan."""

    def plan(self, program: passes.Program) -> spmd.Plan:
        missing()
        return super().plan(program)


class BrokenOverride(spmd.Override):
    """An override that fails for the second submodule."""

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        return missing() if fqn == "1" else orig_submodule  # type: ignore[no-any-return]


class BrokenTransform(spmd.Override):
    """An override whose transform fails."""

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        return missing()  # type: ignore[no-any-return]


def step(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.errors_of_users.half(model(x))  # type: ignore[no-any-return]


HERE = "test_errors_of_users.py"
AT_OP = "partitioned step/program-0 at errors_of_users.half.default (half)"
OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rule": ({}, ["rule registered for errors_of_users.half.default, missing (", AT_OP, "half(model(x))"]),
    "pass": ({"passes": (BrokenPass(),)}, ["pass BrokenPass, stage 02", "at errors_of_users.half.default (half)"]),
    "mode": ({"parallel_mode": BrokenMode()}, ["the mode BrokenMode", "while spmd partitioned step/program-0"]),
    "override": (
        {"module_override": [BrokenOverride()]},
        ["BrokenOverride.replacement, asked for 1,", "captured step"],
    ),
    "transform": (
        {"module_override": [BrokenTransform()]},
        ["BrokenTransform.transform", "partitioned step/program-0"],
    ),
    "gm_transformation": ({"gm_transformation": missing}, ["gm_transformation=missing (", "lowered step/program-0"]),
    "backend": ({"backend": missing}, ["while the backend compiled this: ", "while spmd lowered step/program-0"]),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", OPTIONS)
def test_they_are_named_with_op_and_line(kind: str) -> None:
    options, words = OPTIONS[kind]
    if kind == "rule":
        spmd.register_rule(torch.ops.errors_of_users.half.default)(missing)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    try:
        with pytest.raises((spmd.SpmdError, KeyError)) as caught:
            spmd.compile(**options)(step)(model, torch.ones(4, 3))
    finally:
        if RULES.pop(torch.ops.errors_of_users.half.default, None):
            user_rules.registered.pop()  # entries of a cache are not kept where there is one
    raised = caught.value.__cause__ if isinstance(caught.value, spmd.SpmdError) else caught.value
    assert isinstance(raised, KeyError)
    text = "\n".join([repr(raised), str(caught.value), *caught.value.__notes__])
    assert all(word in text for word in [*words, HERE, "missing"]), text
    assert kind in ("pass", "backend") or 'return {}["missing"]' in text
    assert len({*caught.value.__notes__}) == len(caught.value.__notes__)
