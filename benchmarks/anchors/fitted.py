"""Constants that `python -m benchmarks.anchors FILE.csv --fit` writes; format them with ruff.

Those of "graphed experts" were set by hand since the last fit.
"""

from spmd.planning.machine import Software

SOFTWARE = {
    "deepspeed": Software(
        unfused=0.714,
        launch=4.25e-05,
        exposed=1.0,
        per_step=0.00419,
        hides=0.0,
        gathers_beside=False,
        attention=1.0,
        balances=False,
    ),
    "foundry": Software(
        unfused=1.0,
        launch=1.5e-05,
        exposed=1.0,
        per_step=0.0521,
        hides=0.0,
        gathers_beside=False,
        attention=0.546,
        balances=False,
    ),
    "nanotron": Software(
        unfused=0.0157,
        launch=8e-06,
        exposed=0.264,
        per_step=0.0483,
        hides=0.0,
        gathers_beside=False,
        attention=1.0,
        balances=True,
    ),
    "megatron": Software(
        unfused=0.2,
        launch=5e-06,
        exposed=0.00118,
        per_step=0.003,
        hides=0.98,
        gathers_beside=True,
        attention=2.5,
        balances=False,
    ),
    "experts": Software(
        unfused=0.0,
        launch=0.00015,
        exposed=1.0,
        per_step=0.003,
        hides=0.7,
        gathers_beside=True,
        attention=1.0,
        balances=False,
    ),
    "graphed experts": Software(
        unfused=0.0,
        launch=2e-05,
        exposed=1.0,
        per_step=0.003,
        hides=0.7,
        gathers_beside=True,
        attention=2.0,
        balances=False,
    ),
    "compiled": Software(
        unfused=0.0,
        launch=5e-06,
        exposed=1.0,
        per_step=0.003,
        hides=0.0,
        gathers_beside=False,
        attention=1.0,
        balances=False,
    ),
    "eager": Software(
        unfused=0.892,
        launch=8e-06,
        exposed=1.0,
        per_step=0.003,
        hides=0.0,
        gathers_beside=False,
        attention=1.0,
        balances=False,
    ),
}
