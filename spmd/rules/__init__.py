"""What is right for each op: the rules, and the types in which they speak.

Importing the package fills the table. The files stand in the order in which a step meets them.
"""

# isort: off
from . import pointwise as pointwise
from . import factories as factories
from . import views as views
from . import cat_split as cat_split
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

from .base import Call, Info, Local, Localize, Option, P, Part, R, Rule, S
from .decomposed import taken_apart
from .iota import counted_dim
from .registry import LOCALIZE, RULES, known, localize_of, rule_of
from .user import register_rule

__all__ = [
    "LOCALIZE",
    "RULES",
    "Call",
    "Info",
    "Local",
    "Localize",
    "Option",
    "P",
    "Part",
    "R",
    "Rule",
    "S",
    "counted_dim",
    "known",
    "localize_of",
    "register_rule",
    "rule_of",
    "taken_apart",
]
