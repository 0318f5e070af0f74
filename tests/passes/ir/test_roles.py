"""Roles of values and of axes are names with properties: one object each in a process, plain data on the way."""

import json
import pickle
from copy import deepcopy
from dataclasses import replace

import pytest

from passes import Axis, AxisRole, Holds, InputSource, Mesh, Role
from passes.ir import names
from passes.ir.micro_batches import ACCUMULATOR, GATHERED_ONCE, REDUCED_ONCE, RUN_NUMBER

DECLARED = [each for each in vars(Role).values() if isinstance(each, Role)]
OF_A_FEATURE = [ACCUMULATOR, GATHERED_ONCE, REDUCED_ONCE, RUN_NUMBER]


@pytest.mark.parametrize("role", [*DECLARED, *OF_A_FEATURE])
def test_a_role_is_the_same_object_after_a_journey(role: Role) -> None:
    assert pickle.loads(pickle.dumps(role)) is role and deepcopy(role) is role and replace(role) is role
    assert Role.from_data(json.loads(json.dumps(role.to_data()))) is role
    assert role == role.name == str(role) == f"{role}"


def test_another_process_makes_the_role_from_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not have imported the feature that the role belongs to."""
    saved = ACCUMULATOR.to_data(), pickle.dumps(ACCUMULATOR)
    monkeypatch.setattr(names, "_known", {})
    read = Role.from_data(saved[0])
    assert read is not ACCUMULATOR and vars(read) == vars(ACCUMULATOR) and type(read.source) is InputSource
    assert pickle.loads(saved[1]) is read and read.is_sum and read.holds is Holds.GRADIENTS


def test_one_name_has_the_same_properties_everywhere() -> None:
    with pytest.raises(ValueError, match=r"expected 'accumulator' to have the properties .* as before, got"):
        Role("accumulator")
    assert ACCUMULATOR.is_sum


def test_a_name_alone_is_read_only_if_it_is_declared() -> None:
    with pytest.raises(ValueError, match=r"expected a Role to be one of parameter, .*, got 'accumulator': another"):
        Role.from_data("accumulator")


def test_what_state_is_and_what_runs_give() -> None:
    state = [role for role in DECLARED if role.is_state]
    assert state == ["parameter", "buffer", "optimizer state", "master copy", "gradient", "scaler state"]
    assert [role for role in OF_A_FEATURE if role.is_carried] == [ACCUMULATOR, GATHERED_ONCE, REDUCED_ONCE]
    assert all(role.is_given_by_runs for role in OF_A_FEATURE) and not any(role.is_given_by_runs for role in DECLARED)
    stay = {role for role in [*DECLARED, *OF_A_FEATURE] if role.stays}
    assert stay == {*state, Role.CONSTANT, ACCUMULATOR, GATHERED_ONCE, REDUCED_ONCE}


EXPERTS, IN_TURN = AxisRole("experts", rows_move=True, by_values=True), AxisRole("turns", of_ranks=False, at_once=False)


@pytest.mark.parametrize("role", [AxisRole.BATCH, AxisRole.SHARD, AxisRole.TENSOR, AxisRole.SEQUENCE, EXPERTS, IN_TURN])
def test_a_role_of_an_axis_is_the_same_object_after_a_journey(role: AxisRole) -> None:
    assert pickle.loads(pickle.dumps(role)) is role and deepcopy(role) is role
    assert AxisRole.from_data(json.loads(json.dumps(role.to_data()))) is role


def test_an_axis_has_the_properties_of_its_roles() -> None:
    ranks, turns = Axis("dp", 2, "dp", roles=(AxisRole.BATCH, EXPERTS)), Axis("t", 4, "t", roles=(IN_TURN,))
    assert ranks.of_ranks and ranks.at_once and ranks.rows_move and not ranks.sums_last
    assert not turns.of_ranks and not turns.at_once and not turns.rows_move
    assert Mesh((ranks, turns)).size == 2
    assert Mesh((ranks, turns)).axes_with(EXPERTS, AxisRole.SHARD) == (0,)
