"""Solvers and factorizations of matrices: the batch dims may be split, evenly."""

from __future__ import annotations

from .base import OpCall, Option
from .einsum_labels import WHOLE, Dims, arguments, infos, letters, options
from .optional_ops import aten
from .registry import rule

# The number of last dims that belong to the matrix: of an operand that is not among ``OPERANDS``, and of each result.
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
    "_linalg_eigvals": (1,),
    "geqrf": (2, 1),
    "linalg_householder_product": (2,),
    "linalg_ldl_factor_ex": (2, 1, 0),
    "linalg_ldl_solve": (2,),
    "linalg_pinv.atol_rtol_tensor": (2,),
    "lu_unpack": (2, 2, 2),
    "ormqr": (2,),
}
OPERANDS = {"tau": 1, "pivots": 1, "LU_pivots": 1, "atol": 0, "rtol": 0}
TAU = dict.fromkeys(aten("ormqr"), "input2")  # what it calls its tau
OPS = {op: ndims for name, ndims in RESULTS.items() for op in aten(name)}


@rule(*OPS)
def by_matrix(call: OpCall) -> list[Option]:
    """The batch dims, if all operands have the same ones."""
    given = {name: info for name, value in arguments(call) for info in infos(value) if info.ndim}  # else for all
    ndims = {name: 1 if name == TAU.get(call.target) else OPERANDS.get(name, MATRIX) for name in given}
    fronts = {info.shape[: info.ndim - ndims[name]] for name, info in given.items()}
    if len(fronts) != 1 or any(info.ndim < ndims[name] for name, info in given.items()):
        return []
    front = letters(len(fronts.pop()))
    operands = {name: front + WHOLE * count for name, count in ndims.items()}
    # Results that were not requested, such as the vectors of eigh or svd, have another number of dims.
    whole = [
        front + WHOLE * ndim if info is None or info.ndim == len(front) + ndim else WHOLE * info.ndim
        for ndim, info in zip(OPS[call.target], call.results, strict=True)
    ]
    return options(call, Dims(operands, tuple(whole), filled="*"))


@rule(*aten("_linalg_solve_ex", "linalg_lu_solve"))
def solve(call: OpCall) -> list[Option]:
    """The batch dims, if every operand has those of the matrices; a right-hand side may be a vector."""
    matrices, *others = [(name, info) for name, value in arguments(call) for info in infos(value)]
    shape = matrices[1].shape
    if any(info.shape != shape[:-1] and info.shape[:-MATRIX] != shape[:-MATRIX] for _, info in others):
        return []  # one right-hand side for all
    front = letters(len(shape) - MATRIX)
    operands = {name: front.ljust(info.ndim, WHOLE) for name, info in (matrices, *others)}
    results = tuple("" if info is None else front.ljust(info.ndim, WHOLE) for info in call.results)
    return options(call, Dims(operands, results, filled="*"))
