"""What a watch sees of programs that run several times: the values of one node in all runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from passes import Program
from passes.ir.program import MicroBatches
from passes.runtime.arena import reserve, view_at
from spmd.verification.runs import run_programs
from tests.passes.programs import f64, make_program

aten = torch.ops.aten


def waves(x: Any) -> tuple[Any, ...]:
    return aten.sin.default(x), aten.cos.default(x), aten.exp.default(x)


def named(names: dict[str, str], rows: int) -> Program:
    """The program with other names of nodes, each of which knows the captured one."""
    program = make_program(waves, x=f64(rows))
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta |= {"captured": node.name, "in_time": Shard(0)}
            node.name = names.get(node.name, node.name)
    return program


def test_nodes_of_one_name_that_compute_other_values_are_not_joined() -> None:
    """A pass may name what it inserts otherwise in a program of other sizes, as that of a shorter last part."""
    others = named({"sin": "first", "cos": "second"}, 3)
    last = named({"cos": "first", "sin": "second"}, 2)
    micro = MicroBatches(2, {"x": 0}, joined={each.name: 0 for each in last.outputs})
    seen, x = dict[str, Any](), torch.arange(5, dtype=torch.float64)

    def watch(nodes: Any, values: Any) -> None:
        if "captured" in nodes[0].meta:
            seen[nodes[0].meta["captured"]] = values[0]

    (returned,) = run_programs([replace(last, micro_batches=micro, earlier={"accumulating": others})], [[x]], watch)
    assert torch.equal(returned[0], x.sin())
    assert list(seen) == ["exp"] and torch.equal(seen["exp"], x.exp())


def product(x: Any, y: Any) -> tuple[Any, ...]:
    return (aten.mm.default(x, y),)


class OperandsOfProducts(TorchDispatchMode):
    """Notes of each product by how many bytes the memory that it writes to lies behind its first operand."""

    def __init__(self) -> None:
        super().__init__()
        self.distances: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.mm.out:
            self.distances.append(kwargs["out"].data_ptr() - args[0].data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("of_operand", "of_result"), [(72, 512), (72, 64), (64, 128)])
def test_a_product_that_is_written_over_its_operand_is_computed_so(of_operand: int, of_result: int) -> None:
    """Copies at aligned addresses would hide that memory is used for two values at once."""
    program = make_program(product, x=f64(4, 4), y=f64(4, 4))
    (made,) = program.graph.find_nodes(op="call_function", target=aten.mm.default)
    x, y = made.args
    with program.graph.inserting_before(made):
        new = program.graph.call_function
        arena = new(reserve, (1024, torch.device("cpu")))
        spaces = [new(view_at, (arena, each, (4, 4), (4, 1), torch.float64)) for each in (of_operand, of_result)]
        stored = new(aten.copy_.default, (spaces[0], x))
        written = new(aten.mm.out, (stored, y), {"out": spaces[1]})
    for node in (arena, *spaces, stored, written):
        node.meta["val"] = made.meta["val"]
    written.meta |= made.meta | {"computes": aten.mm.default}
    made.replace_all_uses_with(written)
    program.graph.erase_node(made)
    left, right = torch.rand(4, 4, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64)
    with OperandsOfProducts() as seen:
        ((result,),) = run_programs([program], [[left.clone(), right.clone()]])
    if of_result == 512:
        assert seen.distances != [of_result - of_operand] and torch.allclose(result, left @ right)
    else:  # what the result is then, no kernel promises
        assert seen.distances == [of_result - of_operand]
