"""Solvers and factorizations of matrices: the dims in front of the matrix may be split, evenly."""

from __future__ import annotations

from .base import Call, Option
from .labels import WHOLE, Dims, arguments, infos, letters, options
from .ops import aten
from .table import rule

# How many dims at the end belong to the matrix, of every operand, and then of each result.
MATRIX = 2
RESULTS: dict[str, tuple[int, ...]] = {
    "linalg_solve_triangular": (2,),
    "triangular_solve": (2, 2),
    "cholesky": (2,),
    "cholesky_inverse": (2,),
    "cholesky_solve": (2,),
    "linalg_cholesky_ex": (2, 0),
    "linalg_eig": (1, 2),
    "linalg_inv_ex": (2, 0),
    "linalg_lu": (2, 2, 2),
    "linalg_lu_factor_ex": (2, 1, 0),
    "linalg_qr": (2, 2),
    "linalg_matrix_exp": (2,),
    "_linalg_det": (0, 2, 1),
    "_linalg_slogdet": (0, 0, 2, 1),
    "_linalg_eigh": (1, 2),
    "_linalg_svd": (2, 1, 2),
}
OPS = {op: ndims for name, ndims in RESULTS.items() for op in aten(name)}


@rule(*OPS)
def by_matrix(call: Call) -> list[Option]:
    """Each matrix alone, if all operands have the same dims in front."""
    fronts = {info.shape[:-MATRIX] for info in call.operands}
    if len(fronts) != 1 or min(info.ndim for info in call.operands) < MATRIX:
        return []
    front = letters(len(fronts.pop()))
    operands = {name: front + WHOLE * MATRIX for name, value in arguments(call) for _ in infos(value)}
    # What is not asked for has a size of its own: the vectors of eigh or svd.
    whole = [
        front + WHOLE * ndim if info is None or info.ndim == len(front) + ndim else WHOLE * info.ndim
        for ndim, info in zip(OPS[call.target], call.results, strict=True)
    ]
    return options(call, Dims(operands, tuple(whole), even="*"))


@rule(*aten("_linalg_solve_ex", "linalg_lu_solve"))
def solve(call: Call) -> list[Option]:
    """Each system alone, if every operand has the matrices' dims in front: a right-hand side may be a vector."""
    matrices, *others = [(name, info) for name, value in arguments(call) for info in infos(value)]
    shape = matrices[1].shape
    if any(info.shape != shape[:-1] and info.shape[:-MATRIX] != shape[:-MATRIX] for _, info in others):
        return []  # one right-hand side for all
    front = letters(len(shape) - MATRIX)
    operands = {name: front.ljust(info.ndim, WHOLE) for name, info in (matrices, *others)}
    results = tuple("" if info is None else front.ljust(info.ndim, WHOLE) for info in call.results)
    return options(call, Dims(operands, results, even="*"))
