"""Constants that `python -m benchmarks.anchors FILE.csv --fit` has written; format them with ruff."""

from spmd.planning.machine import Software

SOFTWARE = {
    "deepspeed": Software(
        unfused=0.98, launch=4.05e-05, exposed=1.0, per_step=0.0108, hides=0.0, gathers_beside=False, attention=1.0
    ),
    "foundry": Software(
        unfused=1.0, launch=1.5e-05, exposed=1.0, per_step=0.0412, hides=0.0, gathers_beside=False, attention=0.545
    ),
    "nanotron": Software(
        unfused=0.00645, launch=8e-06, exposed=1.0, per_step=0.0246, hides=0.0, gathers_beside=False, attention=1.0
    ),
    "megatron": Software(
        unfused=0.2, launch=5e-06, exposed=0.00118, per_step=0.003, hides=0.98, gathers_beside=True, attention=2.5
    ),
    "experts": Software(
        unfused=0.688, launch=1e-05, exposed=1.0, per_step=0.003, hides=0.7, gathers_beside=True, attention=1.58
    ),
    "compiled": Software(
        unfused=0.0, launch=5e-06, exposed=1.0, per_step=0.003, hides=0.0, gathers_beside=False, attention=1.0
    ),
    "eager": Software(
        unfused=0.952, launch=8e-06, exposed=1.0, per_step=0.003, hides=0.0, gathers_beside=False, attention=1.0
    ),
}
