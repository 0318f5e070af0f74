"""FoldLayoutCopies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes import Canonicalize, DeadCode, FoldLayoutCopies, Program, ReuseMemory, UpdateInPlace, run

from ..programs import assert_same_bits, before_and_after, f64, make_program, targets

aten = torch.ops.aten


def stacked(x: Any, y: Any) -> Any:
    """The gradients of query, key and value, as the backward of their product reads them."""
    both = aten.stack.default([aten.exp.default(x), aten.sin.default(x)], 1)
    permuted = aten.permute.default(aten.transpose.int(both, 1, 2), [0, 2, 1, 3])
    permuted = aten.transpose.int(permuted, -1, 1)
    return aten.clone.default(permuted, memory_format=torch.contiguous_format)


def read_once() -> Program:
    def read(x: Any, y: Any) -> Any:
        return (aten.mm.default(aten.view.default(stacked(x, y), [-1, 2]), y),)

    return make_program(read, x=f64(3, 4, 5), y=f64(2, 6))


def rewritten(program: Program) -> list[str]:
    """The ops in planned memory, with the same bits as before; this pass alone leaves them, too."""
    assert_same_bits(program, run(program, [FoldLayoutCopies()]))
    after = run(program, [UpdateInPlace(), FoldLayoutCopies(), ReuseMemory()])
    assert_same_bits(program, after)
    return targets(after)


def test_fold_layout_copies(golden: Any) -> None:
    after, text = before_and_after(read_once(), FoldLayoutCopies(), ReuseMemory())
    golden(text)
    assert_same_bits(read_once(), after)


def test_a_stack_is_made_in_the_layout_that_its_reader_needs() -> None:
    ops = rewritten(read_once())
    assert "stack.out" in ops and "copy_.default" not in ops and "contiguous.default" not in ops


def test_until_memory_is_planned_the_copy_is_made_where_it_is_needed() -> None:
    program = run(read_once(), [FoldLayoutCopies()])
    (stack,) = program.graph.find_nodes(op="call_function", target=aten.stack.default)
    assert not stack.meta["val"].is_contiguous()
    assert "contiguous.default" in targets(program) and "clone.default" not in targets(program)


def test_a_stack_that_lives_on_is_copied() -> None:
    program = make_program(lambda x, y: (stacked(x, y),), x=f64(3, 4, 5), y=f64(2, 6))
    assert "clone.default" in rewritten(program)


def test_a_stack_with_other_readers_is_copied() -> None:
    def read(x: Any, y: Any) -> Any:
        both = aten.stack.default([x, aten.sin.default(x)], 1)
        copy = aten.clone.default(aten.transpose.int(both, 1, 2), memory_format=torch.contiguous_format)
        return aten.mm.default(aten.view.default(copy, [-1, 5]), y), aten.exp.default(both)

    program = make_program(read, x=f64(3, 4, 5), y=f64(5, 6))
    assert "copy_.default" in rewritten(program)


@pytest.mark.parametrize("copied", [
    lambda x: aten.clone.default(aten.t.default(aten.cat.default([x, x]))),  # it keeps the strides
    lambda x: aten.clone.default(aten.t.default(aten.sin.default(x)), memory_format=torch.contiguous_format),
])  # fmt: skip
def test_other_copies_stay(copied: Any) -> None:
    program = make_program(lambda x: (aten.mm.default(x, copied(x)),), x=f64(3, 3))
    assert run(program, [FoldLayoutCopies()]).history == ["02 FoldLayoutCopies: nothing to do"]


def test_a_layout_that_differs_between_ranks_is_copied() -> None:
    program = read_once()
    program.placeholders[0].meta["uneven"] = "rows"
    assert "clone.default" in targets(run(program, [FoldLayoutCopies()]))


def test_what_reads_layouts_may_not_follow() -> None:
    with pytest.raises(ValueError, match="FoldLayoutCopies must be the last pass, but DeadCode comes after it"):
        run(read_once(), [FoldLayoutCopies(), DeadCode()])
    with pytest.raises(ValueError, match="must come after Canonicalize"):
        run(read_once(), [FoldLayoutCopies(), Canonicalize()])
