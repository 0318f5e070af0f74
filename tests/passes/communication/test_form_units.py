"""FormUnits, and repeated blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes import Collective, FormUnits, Input, Kind, Mesh, Program, Role, fill_vals, run
from passes.analysis.repeated_blocks import blocks_of
from passes.ir.rates import Rate

from ..programs import MESH, all_gather, all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten
FIRST, MAX = 40, 400


def training(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] | None = None,
    gathered: Iterable[str] = (),
    frozen: Iterable[str] = (),
    shared: bool = True,
) -> Program:
    """A program that reduces a gradient for each parameter, and gathers some; through shared memory, or by messages."""
    graph, mode = fx.Graph(), FakeTensorMode()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    inputs, results, described = [], [], []
    for k, (name, shape) in enumerate(shapes.items()):
        node = graph.placeholder(f"p{k}")
        dtype = (dtypes or {}).get(name, torch.float32)
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        inputs.append(Input(Role.PARAMETER, name, shape, dtype))
    for node, declared in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        for role in (Role.PARAMETER,) * (declared.name in gathered) + (Role.GRADIENT,) * (declared.name not in frozen):
            call = all_gather if role is Role.PARAMETER else all_reduce
            results.append(call(fx.Proxy(node, tracer)).node)
            kind = Kind.ALL_GATHER if role is Role.PARAMETER else Kind.ALL_REDUCE
            described.append(Collective(kind, "dp", None, role, of=(declared.name,)))
    graph.output(tuple(results))
    mesh = Mesh((replace(MESH.axes[0], shared=shared),))
    program = Program.from_graph(fx.GraphModule(torch.nn.Module(), graph), mesh=mesh)
    program.inputs = inputs
    for node, each in zip(program.collectives(), described, strict=True):
        node.meta["collective"] = each
    fill_vals(program)
    return program


def units(program: Program, max_bytes: int = MAX, first_bytes: int = FIRST) -> list[str]:
    """The units as short texts."""
    found = run(program, [FormUnits(max_bytes, first_bytes)]).units
    assert found == run(program, [FormUnits(max_bytes, first_bytes)]).units
    return [" ".join(unit) for unit in found]


def block(prefix: str, *widths: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}.weight": (width,) for name, width in zip("abcd", widths, strict=False)}


def test_form_units(golden: Any) -> None:
    program = training({"m.embed.weight": (3,), **block("m.h.0", 5, 6), **block("m.h.1", 5, 6)})
    after, text = before_and_after(program, FormUnits(MAX, FIRST))
    golden(text)
    assert_same_bits(program, after)


def test_a_unit_closes_once_it_has_reached_its_limit_and_the_first_one_early() -> None:
    program = training({f"m.{name}": (10,) for name in "abcdefg"})  # 40 bytes each
    assert units(program, 80, 40) == ["m.g", "m.e m.f", "m.c m.d", "m.a m.b"]
    assert units(program, 81, 40) == ["m.g", "m.d m.e m.f", "m.a m.b m.c"]
    assert units(program, 81, 41) == ["m.f m.g", "m.c m.d m.e", "m.a m.b"]
    assert units(program, 40, 400) == [f"m.{name}" for name in "gfedcba"]


def test_four_linears_are_three_units() -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(4):
        shapes |= {f"model.{k}.weight": (2000, 2000), f"model.{k}.bias": (2000,)}
    found = run(training(shapes), [FormUnits()]).units
    assert found == (
        ("model.3.weight", "model.3.bias"),
        ("model.1.weight", "model.1.bias", "model.2.weight", "model.2.bias"),
        ("model.0.weight", "model.0.bias"),
    )


def test_a_repeated_block_is_a_unit_once_it_is_large_enough() -> None:
    shapes = {"m.embed.weight": (5,), **block("m.h.0", 5, 6), **block("m.h.1", 5, 6), "m.head.weight": (20,)}
    expected = ["m.head.weight", "m.h.1.a.weight m.h.1.b.weight", "m.h.0.a.weight m.h.0.b.weight", "m.embed.weight"]
    assert units(training(shapes)) == expected
    shapes = {"m.embed.weight": (5,), **block("m.h.0", 2, 3), **block("m.h.1", 2, 3), "m.head.weight": (10,)}
    both = "m.h.0.a.weight m.h.0.b.weight m.h.1.a.weight m.h.1.b.weight"
    assert units(training(shapes)) == ["m.head.weight", both, "m.embed.weight"]


def test_only_a_repeated_block_closes_a_unit() -> None:
    shapes = {**block("m.h.0", 10), **block("m.h.1", 10), **block("m.h.2", 10), "m.head.weight": (10,)}
    assert units(training(shapes)) == ["m.head.weight", "m.h.0.a.weight m.h.1.a.weight m.h.2.a.weight"]


def test_a_unit_has_one_dtype_one_module_and_the_same_collectives() -> None:
    names = ["m.a", "m.b", "m.c", "m.d"]
    shapes = dict.fromkeys(names, (1,))
    assert units(training(shapes, dtypes={"m.b": torch.float64})) == ["m.a m.c m.d", "m.b"]
    assert units(training(shapes, gathered=["m.a", "m.c"])) == ["m.b m.d", "m.a m.c"]
    assert units(training({"m.a": (1,), "n.a": (1,)})) == ["n.a", "m.a"]


def test_frozen_parameters_that_are_communicated_have_units_of_their_own() -> None:
    shapes = dict.fromkeys(["m.a", "m.b", "m.c", "m.d"], (1,))
    assert units(training(shapes, frozen=["m.b"])) == ["m.a m.c m.d"]
    assert units(training(shapes, frozen=["m.b", "m.c"], gathered=shapes)) == ["m.a m.d", "m.b m.c"]
    assert units(training(shapes, frozen=shapes, gathered=shapes)) == ["m.a m.b m.c m.d"]  # evaluation


def test_an_update_without_communication_counts_as_trained() -> None:
    program = make_program(lambda a, b: (aten.neg.default(a),), {0: "a"}, a=f64(2), b=f64(2))
    program.inputs = [replace(each, role=Role.PARAMETER) for each in program.inputs]
    assert units(program) == ["a"]


def test_given_units_stay_and_the_others_are_formed() -> None:
    program = training(dict.fromkeys(["m.a", "m.b", "m.c"], (1,)))
    program.units = (("m.a", "m.c"),)
    assert run(program, [FormUnits()]).units == (("m.a", "m.c"), ("m.b",))


def test_repeated_blocks() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        **block("m.h.0", 3, 4),
        **block("m.h.1", 3, 4),
        **block("m.h.2", 3, 5),  # of another shape
        **block("m.h.3.0", 3, 4),
        **block("m.h.3.1", 3, 4),
        **block("m.layers.0", 3),  # a leaf
        **block("m.layers.1", 3),
        "m.h.0.x": (1,),
        "m.h.1.x": (1,),
    }
    found: dict[str, Any] = {name.removesuffix(".weight"): inside for name, inside in blocks_of(shapes).items()}
    assert found["m.h.0.a"] == found["m.h.0.x"] == ("m.h.0",)
    assert found["m.h.1.b"] == ("m.h.1",)
    assert found["m.h.3.1.a"] == ("m.h.3.1",)
    assert not any(found[name] for name in ("m.h.2.a", "m.layers.0.a", "m.layers.1.a"))


def test_what_nothing_hides_is_in_small_units() -> None:
    names = {f"m.{name}": (10,) for name in "abcdefghij"}  # 40 bytes each, 80 gathered
    assert units(training(names), 1000, 80) == ["m.i m.j", "m.a m.b m.c m.d m.e m.f m.g m.h"]
    sent = units(training(names, shared=False), 1000, 80)
    assert sent == ["m.i m.j", "m.g m.h", "m.e m.f", "m.c m.d", "m.a m.b"]
    gathered = units(training(names, gathered=names), 1000, 80)
    assert gathered == ["m.j", "m.e m.f m.g m.h m.i", "m.d", "m.c", "m.b", "m.a"]


def test_units_are_as_large_as_the_latency_of_their_axis_asks_for() -> None:
    program = training({f"m.{name}": (10,) for name in "abcdefg"})  # 40 bytes each
    assert units(program, 80, 40) == ["m.g", "m.e m.f", "m.c m.d", "m.a m.b"]
    (axis,) = program.mesh.axes
    program.mesh = replace(program.mesh, axes=(replace(axis, rate=Rate(latency=80.0, per_byte=1.0)),))
    assert units(program, 80, 40) == ["m.f m.g", "m.b m.c m.d m.e", "m.a"]
    assert units(program, 400, 100) == ["m.e m.f m.g", "m.a m.b m.c m.d"]


def test_a_small_rest_of_a_block_joins_the_unit_before_it() -> None:
    def found(first: int) -> list[str]:
        shapes = {**block("m.h.0", first, 20, 5), **block("m.h.1", first, 20, 5), "m.head.weight": (10,)}
        return units(training(shapes), 100, 40)[1:]

    whole = [" ".join(f"m.h.{k}.{name}.weight" for name in "abc") for k in (1, 0)]
    assert found(12) == whole
    assert found(13) == ["m.h.1.b.weight m.h.1.c.weight", "m.h.1.a.weight", *found(13)[2:]]
