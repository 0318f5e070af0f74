"""Scripts with three refusals each, one of them at a value: all three are found, each at its line.

A line that is refused ends with ``# refused``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from passes import SpmdError
from spmd.checking import Findings, check
from spmd.cli.step_file import load_step
from spmd.verification.world import simulated_world

SCRIPTS = sorted(path for path in (Path(__file__).parent / "scripts").glob("*.py") if path.stem != "__init__")
MARK = "# refused"
AT_A_VALUE = "the value of a tensor"


@cache
def checked(script: Path) -> Findings:
    with simulated_world(2, None, "cpu"):
        step, given = load_step(f"{script}:{step_of(script)}", "example_args")
        return check(step, *given)


def step_of(script: Path) -> str:
    return "trainer.step" if script.stem == "trainer" else "train_step"


def marked(script: Path) -> list[int]:
    return [number for number, line in enumerate(script.read_text().splitlines(), start=1) if line.endswith(MARK)]


def test_there_are_ten_with_three_refusals_each() -> None:
    assert [len(marked(script)) for script in SCRIPTS] == [3] * 10


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_all_refusals_are_found(script: Path) -> None:
    found = checked(script)
    assert [each.line for each in found.refusals] == marked(script)
    assert all(Path(each.file).name == script.name and each.source.endswith(MARK) for each in found.refusals)
    assert all(each.reason and each.alternative and each.goes_on for each in found.refusals)
    assert not found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_compiling_refuses_first_is_among_them(script: Path) -> None:
    refused = {each.message for each in checked(script).refusals}
    with simulated_world(1, None, "cpu"):
        step, given = load_step(f"{script}:{step_of(script)}", "example_args")
        with pytest.raises(SpmdError) as raised:
            step(*given)
    assert str(raised.value) in refused


def test_the_step_can_be_called_as_before() -> None:
    """A check leaves state, globals and open files as they were."""
    with simulated_world(2, None, "cpu"):
        script = next(each for each in SCRIPTS if each.stem == "curriculum")
        step, (model, optimizer, x) = load_step(f"{script}:train_step", "example_args")
        before = [parameter.detach().clone() for parameter in model.parameters()]
        check(step, model, optimizer, x)
    assert all(one.equal(now) for one, now in zip(before, model.parameters(), strict=True))
    assert not optimizer.state and not step.function.__globals__["seen"].any()
