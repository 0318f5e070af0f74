"""Constants that `python -m benchmarks.anchors FILE.csv --fit` has written; format them with ruff."""

from .machine import Constants

CONSTANTS = Constants(
    matmul={"A": 0.703, "H": 0.595, "B": 0.623, "V": 0.75},
    attention={"A": 0.62, "H": 0.32, "B": 0.223, "V": 0.4},
    memory=0.967,
    nvlink=0.98,
    network=0.98,
    message=0.712,
    inner=111.0,
    tile=0.751,
    float8=0.842,
    float4=0.54,
    kernel=5e-06,
    latency=2.2e-05,
    hop=6e-06,
    far_hop=4.14e-05,
    spread=0.0239,
    contention=0.3,
)
