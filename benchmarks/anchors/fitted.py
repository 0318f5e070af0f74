"""Constants that `python -m benchmarks.anchors FILE.csv --fit` has written; format them with ruff."""

from spmd.planning.machine import Software

SOFTWARE = {
    "deepspeed": Software(unfused=0.68, launch=4.25e-05, per_step=0.00516),
    "foundry": Software(launch=1.5e-05, per_step=0.054, attention=0.546),
    "nanotron": Software(
        unfused=0.00955, launch=8e-06, exposed=0.195, per_step=0.0296, balances=True, bucket=25000000.0
    ),
    "megatron": Software(
        unfused=0.2,
        launch=5e-06,
        exposed=0.00118,
        hides=0.98,
        gathers_beside=True,
        attention=2.5,
        bucket=160000000.0,
        adds=False,
    ),
    "experts": Software(unfused=0.0, launch=0.00015, hides=0.7, gathers_beside=True, bucket=160000000.0, adds=False),
    "graphed experts": Software(
        unfused=0.0, launch=2e-05, hides=0.7, gathers_beside=True, attention=2.4, bucket=160000000.0, adds=False
    ),
    "compiled": Software(unfused=0.0, launch=5e-06),
    "eager": Software(unfused=0.832, launch=8e-06),
}
