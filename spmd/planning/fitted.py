"""Constants that `python -m benchmarks.anchors FILE.csv --fit` has written; format them with ruff."""

from .machine import Constants

CONSTANTS = Constants(
    matmul={"A": 0.7, "H": 0.58, "B": 0.59, "V": 0.75},
    attention={"A": 0.612, "H": 0.32, "B": 0.163, "V": 0.4},
    memory=0.92,
    nvlink=0.713,
    network=0.95,
    message=0.573,
    inner=12.4,
    tile=0.4,
    float8=0.853,
    float4=0.565,
    kernel=2.67e-06,
    latency=6.7e-06,
    hop=3.52e-06,
    far_hop=1.58e-05,
    spread=0.0136,
    contention=0.3,
    knee=3.33,
    jitter=0.00045,
    throttle=0.5,
    reserved=0.05,
)
