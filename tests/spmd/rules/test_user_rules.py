"""``register_rule``: its arguments, its errors, and the options of a registered rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from passes.errors import PlacementError
from spmd.rules import RULES, Option, P, R, S, register_rule, rule_of, user_rules

from .engine import Sample, check, options_of

NAMES = "tests_rules"


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library(NAMES, "DEF")
    library.define("scale(Tensor x, Tensor scale, float more=1.0, *, bool twice=False) -> Tensor")
    library.define("ends(Tensor[] parts, int n) -> (Tensor, Tensor)")
    library.define("write_(Tensor(a!) x) -> ()")
    library.impl("scale", lambda x, scale, more=1.0, *, twice=False: x * scale * more, "CompositeExplicitAutograd")
    library.impl("ends", lambda parts, n: (parts[0] * n, parts[-1] * n), "CompositeExplicitAutograd")
    yield library
    library._destroy()


@pytest.fixture
def ops(library: torch.library.Library) -> Iterator[Any]:
    before, registered = dict(RULES), [*user_rules.registered]
    yield getattr(torch.ops, NAMES)
    RULES.clear()
    RULES.update(before)
    user_rules.registered[:] = registered  # a process whose user has rules keeps no compiled steps


def _scale(*kwargs: str, size: int = 2) -> Sample:
    return Sample(torch.ops.tests_rules.scale.default, (torch.randn(4, 6), torch.randn(6)), dict.fromkeys(kwargs, True))


def test_a_rule_is_used_and_right(ops: Any) -> None:
    assert rule_of(ops.scale.default) is None

    @register_rule(ops.scale)
    def scale(x: Any, scale: Any, more: float = 1.0, twice: bool = False) -> Any:
        assert x.shape == (4, 6) and x.ndim == 2 and x.dtype == torch.float32
        last = x.ndim - 1
        tail = [None] if twice else []
        return [
            ([Shard(0)], [Shard(0), Replicate(), *tail]),
            ([Shard(-1)], [Shard(last), Shard(0), *tail]),
            ([Partial()], [Partial(), Replicate(), *tail]),
            ([Replicate()], [Replicate(), Replicate(), *tail]),
        ]

    assert options_of(_scale(), 2) == [Option((S(0), R), (S(0),)), Option((S(1), S(0)), (S(1),)), Option((P, R), (P,))]
    assert len(options_of(_scale("twice"), 2)) == 3
    assert Option((S(0), R), (S(0),)) not in options_of(_scale(), 3), "4 rows do not split in 3"


def test_lists_of_tensors(ops: Any) -> None:
    register_rule(ops.ends.default)(
        lambda parts, n: [
            ([Shard(0)] * 2, [Shard(0), None]),
            ([Shard(1), Replicate()], [[Shard(1), Replicate()], None]),
        ]
    )
    sample = Sample(ops.ends.default, ([torch.randn(4, 6), torch.randn(4, 6)], 3))
    assert check(sample, 2) == 2


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (None, "expected a sequence"),
        ([[Shard(0)]], "expected a pair"),
        ([([Shard(0), Shard(0)], [Shard(0), Replicate()])], "expected 1 output placements"),
        ([([Shard(0)], [Shard(0)])], "expected 2 input placements"),
        ([([Shard(0)], [Shard(0), None])], "expected Shard, Replicate or Partial"),
        ([([Shard(2)], [Shard(0), Replicate()])], "cannot be split along 2"),
        ([([Shard(0)], [[Shard(0)], Replicate()])], "one placement per tensor"),
    ],
)
def test_pairs_that_do_not_fit_the_call_are_refused(ops: Any, pairs: Any, words: str) -> None:
    register_rule(ops.scale.default)(lambda x, scale: pairs)
    with pytest.raises(PlacementError, match=words):
        options_of(_scale(), 2)


def test_anything_but_an_op_and_a_function_is_refused(ops: Any) -> None:
    with pytest.raises(TypeError, match="expected an op"):
        register_rule("tests_rules::scale")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a function"):
        register_rule(ops.scale)(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="writes to its inputs"):
        register_rule(ops.write_)


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        ([Partial()], [Partial(), Partial()]),
        ([Shard(0)], [Replicate(), Replicate()]),
        ([Replicate()], [Shard(0), Replicate()]),
        ([Partial("max")], [Partial(), Replicate()]),
    ],
)
def test_a_wrong_claim_is_found_out(ops: Any, outputs: Any, inputs: Any) -> None:
    register_rule(ops.scale.default)(lambda x, scale: [(outputs, inputs)])
    with pytest.raises(AssertionError):
        check(_scale(), 2)
