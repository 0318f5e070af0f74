"""Constants that `python -m benchmarks.anchors FILE.csv --fit` has written; format them with ruff."""

from .machine import Constants

CONSTANTS = Constants(
    matmul={"A": 0.7, "H": 0.58, "B": 0.62, "V": 0.75},
    attention={"A": 0.612, "H": 0.32, "B": 0.155, "V": 0.4},
    memory=0.98,
    nvlink=0.941,
    network=0.98,
    message=0.58,
    inner=41.3,
    tile=0.469,
    float8=0.848,
    float4=0.521,
    kernel=5e-06,
    latency=5.9e-06,
    hop=3.33e-06,
    far_hop=2.46e-05,
    spread=0.0286,
    contention=0.3,
    knee=3.5,
    jitter=0.00247,
    throttle=0.5,
    reserved=0.05,
)
