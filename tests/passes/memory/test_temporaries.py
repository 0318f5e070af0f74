"""What convolutions need while they run counts, at the time at which they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes.memory.temporaries import most_with_temporaries

from ..programs import f64, make_program

aten = torch.ops.aten
CPU = torch.device("cpu")
IMAGES = 2 * 20 * 8 * 8 * 8  # bytes of (2, 20, 8, 8)
IN_BLOCKS = 2 * 32 * 8 * 8 * 8  # 20 channels are two blocks of 16


def convolved(x: Any, w: Any) -> Any:
    y = aten.convolution.default(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return (aten.sum.default(y),)


def test_a_convolution_copies_its_operand_and_its_result() -> None:
    program = make_program(convolved, x=f64(2, 20, 8, 8), w=f64(20, 20, 3, 3))
    assert most_with_temporaries(program, CPU) == IMAGES + 2 * IN_BLOCKS
    assert most_with_temporaries(program, torch.device("cuda")) == 0


@pytest.mark.parametrize("of_x", [True, False])
def test_its_gradient_copies_that_of_the_operand_too_where_there_is_one(of_x: bool) -> None:
    def backward(x: Any, w: Any) -> Any:
        options = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [of_x, True, False])
        found = aten.convolution_backward.default(x, x, w, *options)
        return tuple(aten.sum.default(found[k]) for k in ((0, 1) if of_x else (1,)))

    program = make_program(backward, x=f64(2, 20, 8, 8), w=f64(20, 20, 3, 3))
    assert most_with_temporaries(program, CPU) == IMAGES * of_x + 20 * 20 * 3 * 3 * 8 + (2 + of_x) * IN_BLOCKS


def test_values_that_are_gone_by_then_do_not_count() -> None:
    def large_before(x: Any, w: Any) -> Any:
        much = aten.sum.dim_IntList(aten.repeat.default(x, [16, 1, 1, 1]), [1], True)
        return (*convolved(x, w), aten.sum.default(much))

    program = make_program(large_before, x=f64(2, 20, 8, 8), w=f64(20, 20, 3, 3))
    small = 32 * 8 * 8 * 8  # bytes of the sums
    assert most_with_temporaries(program, CPU) == max(16 * IMAGES + small, IMAGES + 2 * IN_BLOCKS + small)
