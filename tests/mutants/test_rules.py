"""Each rule has wrong versions, and the one check of all rules finds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from spmd.rules import RULES, Option, localize_of, rule_of
from spmd.rules.grouped_mm import grouped_mm
from spmd.rules.reductions import extremes
from spmd.rules.registry import LOCALIZE
from tests.spmd.rules.engine import Sample, check_options, options_of
from tests.spmd.rules.samples import samples

from . import rules

DRAWN = 3  # of each rule by each operator

# Whose programs are the same on all ranks: they fill a part that is empty, or that lies in memory as kernels refuse it.
ON_ANY_RANK = (extremes, grouped_mm)


@pytest.fixture(scope="module")
def by_rule() -> dict[Any, list[Sample]]:
    """The samples of each rule, in an order drawn by seed."""
    found = defaultdict[Any, list[Sample]](list)
    for sample in samples():
        found[rule_of(sample.op)].append(sample)
    for each in found.values():
        Random(0).shuffle(each)
    return found


def draw(operator: Any, each: Sequence[Sample]) -> list[tuple[Sample, Option]]:
    """Wrong options of these samples, one of each until there are enough."""
    random, found = Random(0), list[tuple[Sample, Option]]()
    for sample in each:
        wrong = [found for option in options_of(sample, rules.SIZE) for found in operator(sample, option)]
        if wrong:
            found.append((sample, random.choice(wrong)))
        if len(found) == DRAWN:
            break
    return found


def is_caught(sample: Sample, option: Option) -> bool:
    try:
        check_options(sample, rules.SIZE, [option])
    except Exception:  # kernels refuse operands that do not fit together, in any way
        return True
    return False


def missed(operator: Any, rule: Any, each: Sequence[Sample]) -> list[Any] | None:
    """The wrong options that no check finds; None if the operator makes none of this rule."""
    wrong = draw(operator, each)
    found = [(operator.__name__, str(sample), option) for sample, option in wrong if not is_caught(sample, option)]
    if operator is rules.other_rank and (rule in ON_ANY_RANK or len(found) < len(wrong)):
        return []  # for some arguments a program does not depend on the rank
    return found if wrong else None


def test_wrong_versions_of_each_rule_are_caught(by_rule: dict[Any, list[Sample]]) -> None:
    stay, without = list[Any](), list[Any]()
    for rule, each in by_rule.items():
        found = [missed(operator, rule, each) for operator in rules.OPERATORS]
        stay += [mutant for mutants in found for mutant in mutants or ()]
        without += [rule] if found == [None] * len(found) else []
    assert not stay
    makes = [rule for rule in without if any(localize_of(sample.op) for sample in by_rule[rule])]
    for rule in makes:
        assert any(is_caught_with_sizes_of_the_whole(sample) for sample in by_rule[rule] if localize_of(sample.op))
    (whole,) = {*without} - {*makes}  # the rule of ops that cannot be split
    assert all(is_caught(sample, rules.claimed(sample)) for sample in by_rule[whole])


def is_caught_with_sizes_of_the_whole(sample: Sample) -> bool:
    """Whether it shows that a rank takes global sizes among the arguments for its own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delitem(LOCALIZE, sample.op)
        return any(is_caught(sample, each) for each in options_of(sample, rules.SIZE))


def test_no_rule_is_without_a_sample(by_rule: dict[Any, list[Sample]]) -> None:
    assert {*RULES.values()} <= {*by_rule}
