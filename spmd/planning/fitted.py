"""Constants that `python -m benchmarks.anchors FILE.csv --fit` has written; format them with ruff."""

from .machine import Constants

CONSTANTS = Constants(
    matmul={"A": 0.7, "H": 0.58, "B": 0.59, "V": 0.75},
    attention={"A": 0.612, "H": 0.32, "B": 0.163, "V": 0.4},
    memory=0.894,
    nvlink=0.749,
    network=0.95,
    message=0.573,
    inner=14.9,
    tile=0.363,
    float8=0.853,
    float4=0.551,
    kernel=4.04e-06,
    latency=8.56e-06,
    hop=3.52e-06,
    far_hop=2.05e-05,
    spread=0.0174,
    contention=0.3,
    knee=3.33,
    jitter=0.00054,
    throttle=0.5,
    reserved=0.05,
)
