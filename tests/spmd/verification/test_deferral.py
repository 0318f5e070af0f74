"""The three programs of a step that defers its update, on simulated ranks, against the whole program: equal bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import passes
from passes import Mesh, PassError, Program, Role
from passes.defer import run_and_defer
from passes.ir.bundle import Bundle, print_bundle, read_bundle
from passes.ir.check_bundle import check_bundle
from spmd.verification.bundle_lockstep import BundleRank, BundleRun
from spmd.verification.compared_stages import kept, run_stage
from spmd.verification.wholes import difference

from .prepared import Prepared, prepared

RATES = (0.1, 0.03)  # the learning rates of two calls


def deferred(base: str) -> tuple[Prepared, list[Program], list[Bundle]]:
    """What was prepared, and of ranks that communicate by messages, the whole programs and the bundles."""
    given, whole, bundles = prepared(base), list[Program](), list[Bundle]()
    for each in given.programs:
        mesh = Mesh(tuple(replace(axis, shared=False) for axis in each.transformed.mesh.axes))
        program, bundle = run_and_defer(replace(each.transformed, mesh=mesh), passes.default(), lambda *_: None)
        assert isinstance(bundle, Bundle), bundle
        whole.append(program)
        bundles.append(bundle)
    return given, whole, bundles


def differs(given: Prepared, whole: list[Program], bundles: list[Bundle]) -> list[str]:
    """What is other than in the whole program after two steps, each with its own learning rate."""
    names = [each.name for each in whole[0].inputs if each.role is Role.HYPER_PARAMETER and each.name.endswith("lr")]
    assert names
    calls = [dict.fromkeys(names, rate) for rate in (*RATES, 123.0)]
    ranks = [BundleRank(bundle, 0, kept(values)) for bundle, values in zip(bundles, given.inputs, strict=True)]
    run, state, found = BundleRun(ranks), [kept(values) for values in given.inputs], list[str]()
    results = [
        run.call(call, [rates] * len(ranks)) for call, rates in zip(("first", "steady", "finish"), calls, strict=True)
    ]
    for rates, of_ranks in zip(calls, results[:2], strict=False):
        state = [values | rates for values in state]
        after = run_stage(whole, state)
        found += [name for a, b in zip(after, of_ranks, strict=True) for name in b if difference(a[name], b[name], 0.0)]
        state = [{name: held[name] for name in values} for held, values in zip(after, state, strict=True)]
    for rank, held in zip(ranks, state, strict=True):
        found += [name for name in held.keys() - calls[0].keys() if difference(held[name], rank.state[name], 0.0)]
    assert not any(count for rank in ranks for count in rank.in_flight.counts.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("base", ["replicate", "odd"])
def test_a_deferred_update_is_the_same_step(base: str) -> None:
    given, whole, bundles = deferred(base)
    assert len({each.digest() for each in bundles}) == 1, "of ranks with unequal parts, too"
    assert [each for each in bundles[0].channels if each.given]
    assert differs(given, whole, bundles) == []
    text = print_bundle(bundles[0])
    assert print_bundle(read_bundle(text, bundles[0])[0]) == text


def test_an_update_with_the_learning_rate_of_another_call_is_found() -> None:
    given, whole, bundles = deferred("replicate")
    for bundle in bundles:
        for channel in bundle.channels:
            for role in channel.readers if channel.given else ():
                program = bundle.programs[role]
                nodes = {each.name: node for each, node in zip(program.inputs, program.placeholders, strict=True)}
                nodes[channel.name].replace_all_uses_with(nodes[channel.given])
    assert "model.up.weight" in differs(given, whole, bundles)


def test_what_is_not_handed_on_is_refused() -> None:
    bundle = deferred("replicate")[2][0]
    calls: dict[str, Any] = {name: order for name, order in bundle.calls.items() if name != "first"}
    with pytest.raises(PassError, match=r"no call of .* runs first"):
        check_bundle(bundle.with_orders(calls))
    calls = calls | {"first": (("first", "finish"),)}
    with pytest.raises(PassError, match=r"call steady of .* reads pending\.\w+, .*which no call before it leaves"):
        check_bundle(bundle.with_orders(calls))
    with pytest.raises(PassError, match="has two writers of it, first and steady"):
        check_bundle(bundle.with_orders({**bundle.calls, "both": (("first", "steady"),)}))
