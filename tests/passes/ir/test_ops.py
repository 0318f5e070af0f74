"""The table of what is known of ops: consistent in itself, with torch, and complete where a pass relies on it."""

from __future__ import annotations

import operator

import pytest
import torch

from passes._torch import OpOverload, c10d
from passes.ir import ops
from passes.ir.ops import Trait, draws, find, has, in_place_variant, listed, out_overload, over_lists, traits
from passes.ir.schemas import schema
from passes.runtime import message_collectives

aten = torch.ops.aten

# In some torch from 2.11 to 2.15.
MAY_BE_ABSENT = {"_scaled_mm_v2", "_upsample_lanczos2d_aa", "hash_tensor", "linalg_polar"}


def all_ops() -> list[OpOverload]:
    """Every aten op of this torch, and those that graphs contain besides."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    found = [op for name in names if (op := find(name)) is not None]
    namespaces = (torch.ops.prims, c10d, message_collectives.ops)
    packets = [getattr(space, name) for space in namespaces for name in dir(space)]
    packets = [packet for packet in packets if isinstance(packet, torch._ops.OpOverloadPacket)]
    return found + [getattr(packet, name) for packet in packets for name in packet.overloads()]


EVERY = all_ops()


def test_every_aten_op_is_there() -> None:
    assert len(EVERY) > 3000


def test_entries_exist_in_this_torch() -> None:
    assert ops.ABSENT <= MAY_BE_ABSENT


def test_names_that_this_torch_lacks_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: set[str] = set()
    monkeypatch.setattr(ops, "ABSENT", absent)
    assert ops.aten("view no_such_op mm.no_such_overload") == (aten.view.default,)
    assert absent == {"no_such_op", "mm.no_such_overload"}


def test_each_row_names_an_op_once() -> None:
    for trait, row in ops._LISTED.items():
        assert len(set(row)) == len(row), trait


def test_the_traits_that_are_read_and_listed_are_all() -> None:
    read = {trait for op in EVERY for trait in ops._read(op)}
    assert read | ops._LISTED.keys() | {Trait.PROFILING} == set(Trait)


def test_every_op_that_takes_an_offset_in_memory_is_listed() -> None:
    takes = {op for op in EVERY if "storage_offset" in schema(op).names or schema(op).name in ("set", "resize")}
    assert not [op for op in takes if not has(op, Trait.READS_MEMORY, Trait.MUTABLE)]


def test_no_op_is_both_random_and_pure() -> None:
    assert not [op for op in EVERY if has(op, Trait.RANDOM) and has(op, Trait.PURE)]


def test_what_writes_is_no_view_and_no_entry_of_the_table_but_for_in_place_variants() -> None:
    assert not [op for op in EVERY if has(op, Trait.MUTABLE) and has(op, Trait.VIEW)]
    assert not [op for op in listed(*ops._LISTED) if has(op, Trait.MUTABLE)]


def test_entries_are_pure() -> None:
    """But for batch norms, whose calls decide, and assertions; so no entry is random either."""
    table = listed(*ops._LISTED) - listed(Trait.WRITES_STATISTICS, Trait.ASSERTS)
    assert not [op for op in table if not has(op, Trait.PURE) and op not in ops.PURE_FUNCTIONS]


def test_an_undeclared_view_is_one_whose_schema_says_nothing() -> None:
    assert not [op for op in listed(Trait.UNDECLARED_VIEW) if schema(op).shares or has(op, Trait.DECLARED)]


def test_only_what_torch_does_not_say_is_listed() -> None:
    """``view`` is a view by its schema; of all torch versions one at least lacks the tag of a pointwise op."""
    for op in EVERY:
        assert has(op, Trait.VIEW) == op.is_view, op
        if has(op, Trait.POINTWISE_KERNEL):
            assert has(op, Trait.POINTWISE), op
    read = {Trait.VIEW, Trait.MUTABLE, Trait.RANDOM, Trait.PURE, Trait.COMPOSITE, Trait.POINTWISE_KERNEL}
    assert read.isdisjoint(ops._LISTED)


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (Trait.RETURNS_OPERAND, Trait.SAME_ELEMENTS),
        (Trait.SAME_ELEMENTS, Trait.POINTWISE),
        (Trait.COPIES, Trait.POINTWISE),
        (Trait.COPIES, Trait.PACKS),
        (Trait.RESHAPES, Trait.PACKS),
        (Trait.RESHAPES, Trait.UNPACKS),
        (Trait.RESHAPES, Trait.KEEPS_CONTIGUOUS),
        (Trait.PERMUTES, Trait.PACKS),
        (Trait.PERMUTES, Trait.UNPACKS),
    ],
)
def test_one_trait_implies_another(narrow: Trait, wide: Trait) -> None:
    assert not [op for op in listed(narrow) if not has(op, wide)]


def test_traits_that_exclude_each_other() -> None:
    movements = (Trait.RESHAPES, Trait.PERMUTES, Trait.SQUEEZES, Trait.EXPANDS, Trait.CUTS, Trait.JOINS, Trait.COPIES)
    for group in (movements, (Trait.ZEROS, Trait.ONES, Trait.FULL), (Trait.MAKES_CONTIGUOUS, Trait.KEEPS_CONTIGUOUS)):
        rows = [listed(trait) for trait in group]
        assert len(frozenset[object]().union(*rows)) == sum(map(len, rows)), group


def test_arguments_that_traits_speak_of_are_there() -> None:
    assert not [op for op in listed(Trait.FULL) if "fill_value" not in schema(op).names]
    assert not [op for op in listed(Trait.CUTS, Trait.JOINS) if "dim" not in schema(op).names]
    statistics = listed(Trait.WRITES_STATISTICS)
    assert not [op for op in statistics if not {"running_mean", "training"} <= set(schema(op).names)]


def test_an_op_that_the_dispatcher_does_not_know() -> None:
    """Tracing meets those of TorchScript."""
    assert traits(torch.ops.prim.device.default) == frozenset()


def test_python_functions() -> None:
    assert has(operator.getitem, Trait.ALIAS)
    assert traits(operator.add) == traits("a method") == frozenset()


def test_in_place_variants() -> None:
    assert in_place_variant(aten.add.Tensor) is aten.add_.Tensor
    assert in_place_variant(aten.mm.default) is None
    assert in_place_variant(aten.t.default) is None, "it would change the view"
    found = {op: other for op in EVERY if (other := in_place_variant(op)) is not None}
    assert len(found) > 250
    assert not [op for op, other in found.items() if has(op, Trait.MUTABLE) or not has(other, Trait.MUTABLE)]


def test_out_variants_have_a_kernel_of_their_own() -> None:
    cpu = torch.device("cpu")
    assert out_overload(aten.mm.default, cpu) == (aten.mm.out, ("out",))
    assert out_overload(aten.stack.default, cpu) == (aten.stack.out, ("out",)), "written by hand"
    assert out_overload(aten.constant_pad_nd.default, cpu) is None, "it computes into fresh memory and copies"
    assert out_overload(aten.relu.default, cpu) is None


def test_ops_over_lists_take_lists_where_ops_take_tensors() -> None:
    assert over_lists(aten.add.Tensor) == (aten._foreach_add.List, aten._foreach_add.Scalar)
    assert over_lists(aten.mm.default) == (None, None)
    for op, found in ops._OVER_LISTS.items():
        assert op is not None and any(found), op
        for other in filter(None, found):
            assert schema(other).results == ("List[Tensor]",) and schema(other).arguments[0].type == "List[Tensor]"


def test_attention_without_dropout_draws_nothing() -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert has(attention, Trait.RANDOM)
    assert not draws(attention, (0, 0, 0), {})
    assert draws(attention, (0, 0, 0, 0.1), {}) and draws(attention, (0, 0, 0), {"dropout_p": 0.1})
    assert draws(aten.rand.default, ([2],), {}) and not draws(aten.mm.default, (0, 0), {})
