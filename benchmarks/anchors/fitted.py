"""Constants that `python -m benchmarks.anchors FILE.csv --fit` has written; format them with ruff."""

from spmd.planning.machine import Software

SOFTWARE = {
    "deepspeed": Software(unfused=0.68, launch=4.25e-05, per_step=0.00469),
    "foundry": Software(launch=1.5e-05, per_step=0.0491, attention=0.546),
    "nanotron": Software(unfused=0.0278, launch=8e-06, exposed=0.234, per_step=0.0523, balances=True, bucket=25e6),
    "megatron": Software(
        unfused=0.2,
        launch=5e-06,
        exposed=0.00118,
        hides=0.98,
        gathers_beside=True,
        attention=2.5,
        bucket=160e6,
        adds=False,
    ),
    "experts": Software(unfused=0.0, launch=0.00015, hides=0.7, gathers_beside=True, bucket=160e6, adds=False),
    "graphed experts": Software(
        unfused=0.0, launch=2e-05, hides=0.7, gathers_beside=True, attention=2.4, bucket=160e6, adds=False
    ),
    "compiled": Software(unfused=0.0, launch=5e-06),
    "eager": Software(unfused=0.806, launch=8e-06),
}
