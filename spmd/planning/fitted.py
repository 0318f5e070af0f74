"""Constants that `python -m benchmarks.anchors FILE.csv --fit` has written; format them with ruff."""

from .machine import Constants

CONSTANTS = Constants(
    matmul={"A": 0.703, "H": 0.595, "B": 0.639, "V": 0.75},
    attention={"A": 0.636, "H": 0.329, "B": 0.234, "V": 0.4},
    memory=0.967,
    nvlink=0.98,
    network=0.98,
    message=0.593,
    inner=114.0,
    tile=0.77,
    float8=0.821,
    float4=0.51,
    kernel=5e-06,
    latency=2.2e-05,
    hop=6e-06,
    far_hop=4.14e-05,
    spread=0.022,
    contention=0.3,
)
