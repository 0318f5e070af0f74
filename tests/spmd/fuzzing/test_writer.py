"""The writer: every template fits some step, and choices that are simpler stand for simpler steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmd.fuzzing.choices import Choices, Gene
from spmd.fuzzing.forward import Forward
from spmd.fuzzing.modes import MESHES
from spmd.fuzzing.outcome import run
from spmd.fuzzing.plain_run import can_be_verified
from spmd.fuzzing.script import Script
from spmd.fuzzing.shrink import shrunk
from spmd.fuzzing.statements import (
    ACROSS_ROWS,
    ARGUMENTS,
    CALLED,
    JOINED,
    LAYERS,
    LINES,
    MIXTURES,
    RANDOM,
    ROWWISE,
    STATEFUL,
    options,
)
from spmd.fuzzing.training import LOSSES, OPTIMIZERS, RESULTS, TRAININGS
from spmd.fuzzing.writer import write, written

SHAPES = ((4, 4), (6, 3, 4), (4, 4, 4), (4, 1, 4), (4, 1))
TABLES = [each for table in (ROWWISE, ACROSS_ROWS, RANDOM, JOINED) for each in options(table)]
TEMPLATES = [
    *(("", f"h = {each}", "") for each in TABLES),
    *((layer, "h = {m}(h)", "") for layer in LAYERS),
    *((layer, f"h = {call}", "") for layer, call in CALLED),
    *((layer, lines, "") for layer, lines in LINES),
    *(("", lines, setup) for setup, lines in STATEFUL),
    *(("", lines, f"{name} = {value}") for name, value, lines in ARGUMENTS),
]


def fits_some_value(layer: str, lines: str, setup: str) -> bool:
    torch.manual_seed(0)
    tried = [(Forward(torch.rand(shape) + 0.1), Gene((width, 1))) for shape in SHAPES for width in (0, 1)]
    for forward, gene in tried:
        forward._add(layer, lines, gene, setup)
    return any(forward.lines for forward, _ in tried)


def test_each_template_fits_some_value() -> None:
    assert len(TEMPLATES) > 200
    assert [each for each in TEMPLATES if not fits_some_value(*each)] == []


@pytest.mark.parametrize("part", ["loss", "training", "optimizer"])
def test_each_loss_training_and_optimizer_can_be_verified(part: str) -> None:
    targets = (LOSSES.index(("F.mse_loss(h, y)", "torch.randn({shape})")),)
    for k in range(len({"loss": LOSSES, "training": TRAININGS, "optimizer": OPTIMIZERS}[part])):
        needs_targets = part == "training" and TRAININGS[k].fits(has_targets=True)
        script = written(Choices(**{"loss": targets if needs_targets else (0,), part: (k,)}))
        assert can_be_verified(script), script.plain()
        if part == "training":
            wanted = (TRAININGS[k].loop, *TRAININGS[k].before, *TRAININGS[k].backward, *TRAININGS[k].after)
            assert all(line in script.plain() for line in wanted)


def test_each_result_is_returned() -> None:
    for k, result in enumerate(RESULTS):
        script = write(Choices(training=(0, k)))
        assert script is not None and f"return {result}" in script.plain()


def test_no_choices_are_the_simplest_step() -> None:
    script = write(Choices())
    assert script is not None
    assert script.body[0] == "h = model[0](x)" and len(script.text().splitlines()) <= 24


@pytest.mark.slow
@pytest.mark.parametrize("form", [0, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in range(1, len(MIXTURES)))])
def test_each_mixture_is_verified_over_an_axis_of_experts(form: int, tmp_path: Path) -> None:
    """In two groups of ranks, which sort their own rows."""
    script = write(Choices(mode=(MESHES.index({"dp": 2, "ep": 2}), 1, form)))
    assert script is not None and '"experts": "ep"' in script.text()
    (tmp_path / "step.py").write_text(script.text())
    outcome = run(tmp_path / "step.py")
    assert outcome.kind == "agreed", outcome.details


def test_choices_are_shrunk_to_what_fails() -> None:
    choices = Choices(data=(5, 6), statements=((3, 1), (7, 2), (3, 9)), loss=(4,), mode=(1, 2, 3))
    smallest = shrunk(choices, lambda each: any(one[0] == 7 for one in each.statements) and sum(each.mode) >= 3)
    assert smallest == Choices(statements=((7, 0),), mode=(0, 0, 3))


def test_a_step_that_divides_rounding_by_its_own_size_is_left_out_also_for_a_batch_of_whole_numbers() -> None:
    """The gradient of a row's angle to itself is nothing but rounding, which Adafactor makes a step of."""
    script = Script(
        layers=["nn.Linear(4, 4)"],
        optimizers={"optimizer": "torch.optim.Adafactor(model.parameters(), lr=0.1)"},
        data={"x": "torch.randint(5, (1, 4))", "y": "torch.ones(1)"},
        body=[
            "h = model[0](torch.tanh(x))",
            "loss = F.cosine_embedding_loss(h, h.roll(1, 0), y)",
            "loss.backward()",
            "optimizer.step()",
            "optimizer.zero_grad()",
            "return loss",
        ],
    )
    assert not can_be_verified(script)
    script.body[1] = "loss = h.square().mean()"
    assert can_be_verified(script)
