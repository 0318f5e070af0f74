"""Sharding rules: for each op, the placements of operands and results under which it can run on parts of tensors.

Importing the package fills the table. The files are listed in the order in which a step calls their ops.
"""

# isort: off
from . import pointwise as pointwise
from . import factories as factories
from . import views as views
from . import cat_split as cat_split
from . import diagonals as diagonals
from . import reductions as reductions
from . import scans as scans
from . import fft as fft
from . import distances as distances
from . import matmul as matmul
from . import grouped_mm as grouped_mm
from . import linalg as linalg
from . import iota as iota
from . import indexing as indexing
from . import normalization as normalization
from . import attention as attention
from . import convolution as convolution
from . import pooling as pooling
from . import sampling as sampling
from . import loss as loss
from . import size_arguments as size_arguments
# isort: on

from .base import Info, Local, Localize, LocalPart, OpCall, Option, P, R, Rule, S, Sent, parts_of
from .decomposed import decomposition_of
from .iota import iota_dim_of
from .registry import LOCALIZE, RULES, localize_of, rule_of
from .sequences.bands import positions_of
from .user_rules import register_rule

__all__ = [
    "LOCALIZE",
    "RULES",
    "Info",
    "Local",
    "LocalPart",
    "Localize",
    "OpCall",
    "Option",
    "P",
    "R",
    "Rule",
    "S",
    "Sent",
    "decomposition_of",
    "iota_dim_of",
    "localize_of",
    "parts_of",
    "positions_of",
    "register_rule",
    "rule_of",
]
