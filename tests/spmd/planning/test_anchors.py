"""``benchmarks.anchors``: the errors that it prints by their definitions, and a table of runs from end to end."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.anchors import __main__ as command
from benchmarks.anchors.errors import errors_of, quantile
from benchmarks.anchors.fit import estimated, fit, halves
from benchmarks.anchors.noise import regressed
from benchmarks.anchors.rows import Row

COLUMNS = (
    "id,group,class,model,arch,tied,layers,hidden,ffn,heads,kv_heads,head_dim,experts,top_k,expert_ffn,vocab,seq_len,"
    "gpus,gpu,dp_shard,dp_replicate,tp,pp,vp,cp,ep,sharding,seq_parallel,async_tp,schedule,micro_batch,grad_accum,"
    "global_batch,precision,ac,compile,step_s,memory_gib,sweep,pair,note"
).split(",")
DENSE = {
    "group": "nanotron",
    "class": "bf16-dense",
    "model": "small",
    "arch": "llama",
    "layers": 4,
    "hidden": 64,
    "ffn": 128,
    "heads": 4,
    "kv_heads": 2,
    "vocab": 128,
    "seq_len": 16,
    "gpus": 8,
    "gpu": "H100-80GB",
    "tp": 1,
    "pp": 1,
    "sharding": "ZeRO-1",
    "micro_batch": 1,
    "grad_accum": 4,
    "global_batch": 32,
    "precision": "bf16",
    "step_s": 0.1,
}


def row(**cells: Any) -> Row:
    return Row({name: str((DENSE | cells).get(name, "")) for name in COLUMNS})


def test_quantiles_lie_between_values() -> None:
    assert [quantile([1.0, 2.0, 4.0], part) for part in (0.0, 0.5, 0.75, 1.0)] == [1.0, 2.0, 3.0, 4.0]


def test_errors_are_those_of_their_definitions() -> None:
    rows = [
        row(id=1, step_s=1.0, sweep="a", pair="layout:1", memory_gib=10),
        row(id=2, step_s=2.0, sweep="a", pair="layout:1;gpus:2"),
        row(id=3, step_s=4.0, sweep="a", pair="gpus:2"),
        row(id=4, step_s=9.0),
    ]
    found = errors_of("a", rows, {"1": 1.5, "2": 1.0, "3": 5.0}, {"1": 8.0})
    assert (found.count, found.unknown, found.sweeps, found.pairs, found.with_memory) == (3, 1, 1, 2, 1)
    assert (found.median, found.mean) == pytest.approx((0.5, (0.5 + 0.5 + 0.25) / 3))
    assert found.spearman == pytest.approx(0.5)  # ranks 2, 1, 3 of 1, 2, 3
    assert found.regret == pytest.approx(1.0)  # the one that is estimated best takes twice as long as the best
    assert found.signs == pytest.approx(0.5)
    assert found.memory == pytest.approx(0.2)


def test_equal_estimates_are_no_order() -> None:
    rows = [row(id=k, step_s=k, sweep="a", pair="layout:1") for k in (1, 2)]
    found = errors_of("a", rows, {"1": 3.0, "2": 3.0}, {})
    assert (found.spearman, found.signs, found.regret) == (0.0, 0.0, pytest.approx(0.5))


def test_halves_have_no_model_in_common() -> None:
    rows = [row(id=k, model=f"m{k % 3}", group="a" if k < 6 else "b") for k in range(9)]
    one, other = halves(rows)
    assert len(one) + len(other) == 9
    keys = [{(r.cells["group"], r.cells["model"]) for r in half} for half in (one, other)]
    assert not keys[0] & keys[1]


def test_a_regression_knows_the_rows_of_large_sweeps() -> None:
    stages = [(1, 8), (2, 4), (4, 4), (2, 8), (8, 2)]
    rows = [
        row(
            id=f"{pp}-{tp}-{rows}",
            gpus=64,
            pp=pp,
            tp=tp,
            micro_batch=rows,
            grad_accum=8,
            sweep="a",
            step_s=rows**0.5 / tp,
        )
        for pp, tp in stages
        for rows in (1, 2, 4, 8, 16)
    ]
    found = regressed([*rows, row(id="other", sweep="b")])
    assert found == pytest.approx({each.id: each.seconds for each in rows})


def test_deepep_divides_experts() -> None:
    cells = {"experts": 8, "dp_shard": 4}
    assert [row(**cells, **more).expert_ranks for more in ({}, {"note": "DeepEP"}, {"note": "DeepEP", "ep": 2})] == [
        1,
        4,
        2,
    ]


@pytest.mark.slow
def test_a_table_is_estimated_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(id=1), row(id=2, gpus=16, grad_accum=2, step_s=0.2), row(id=3, **{"class": "other"})]
    rows += [row(id=4, gpu="T1000"), row(id=5, kv_heads=3)]
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(dict(each.cells) for each in rows)
    monkeypatch.setattr(sys, "argv", ["anchors", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "out.csv")])
    command.main()
    assert "nanotron / bf16-dense" in capsys.readouterr().out
    with (tmp_path / "out.csv").open() as file:
        one, two, three, four, five = csv.DictReader(file)
    assert float(one["step_s"]) > float(two["step_s"]) > 0 and float(one["memory_gib"]) > 0
    assert three["step_s"] == "" and "adapters" in three["reason"]
    assert four["step_s"] == "" and "no figures of T1000" in four["reason"]
    assert five["step_s"] == "" and "RuntimeError" in five["reason"]  # 4 heads cannot share 3 keys
    quicker = [row(id=1, step_s=0.9 * float(one["step_s"]))]
    before, after = (estimated(quicker, *fit(quicker, rounds))["1"] for rounds in (0, 1))
    off = [abs(each / quicker[0].seconds - 1) for each in (before, after)]
    assert off[0] == pytest.approx(1 / 9, rel=1e-2)  # as in the file, but for rounding
    assert off[1] < off[0], "constants move towards what was measured"
