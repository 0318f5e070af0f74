"""The negative log likelihood: rows (and for images, positions) may be split, and so may classes.

A sum over split rows is partial, and so is its total weight. A mean would divide by the rank's own count: capture
decomposes it in forward, and backward divides by the total weight it is given. The loss of alignments (CTC) is one
per row. Other losses are decomposed.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.tensor.placement_types import Placement

from passes.runtime.ctc_loss import ctc_loss, ctc_loss_backward

from . import lookup
from .base import Local, OpCall, Option, P, R, S
from .einsum_labels import EQUAL, WHOLE, Dims, arguments, infos, option, options
from .optional_ops import aten
from .registry import rule

NONE, MEAN = 0, 1

ROWS = {
    **dict.fromkeys(aten("nll_loss_forward", "nll_loss_backward"), ("nc", "n")),
    **dict.fromkeys(aten("nll_loss2d_forward", "nll_loss2d_backward"), ("nchw", "nhw")),
}
_ROWS_OF_CTC = {"log_probs": ".n.", "targets": "n.", "input_lengths": "n", "target_lengths": "n"}


@rule(*aten("nll_loss_forward", "nll_loss2d_forward"))
def forward(call: OpCall) -> list[Option]:
    """Rows or classes: a loss per row without reduction, else partial sums of loss and weight."""
    source, target = _labels(call)
    if source is None or call.arg("reduction") == MEAN:
        return []
    operands = {"self": source, "target": target}
    if call.arg("reduction") == NONE:
        return [*options(call, Dims(operands, (target, EQUAL))), _by_class(call, (P, R), lookup.nll_loss)]
    return [*options(call, Dims(operands, ("", ""), reduced=target)), _by_class(call, (P, P), lookup.nll_loss)]


@rule(*aten("nll_loss_backward", "nll_loss2d_backward"))
def backward(call: OpCall) -> list[Option]:
    """Rows or classes. Linear in the incoming gradient. Only a mean reads the total weight."""
    source, target = _labels(call)
    if source is None:
        return []
    grad = target if call.arg("reduction") == NONE else ""
    operands = {"grad_output": grad, "self": source, "target": target}
    by_class = _by_class(call, (S(1),), lookup.nll_loss_backward)
    found = [*options(call, Dims(operands, source, linear=(("grad_output",),))), by_class]
    return found if call.arg("reduction") == MEAN else [*found, *(_with_any_weight(call, each) for each in found)]


def _with_any_weight(call: OpCall, given: Option) -> Option:
    """The same, with a total weight that is still to be summed up, as forward leaves it: nothing reads it."""
    names = [name for name, value in arguments(call) for _ in infos(value)]
    operands = zip(names, given.operands, strict=True)
    return replace(given, operands=tuple(P if name == "total_weight" else p for name, p in operands))


def _by_class(call: OpCall, results: tuple[Placement, ...], local: Local) -> Option:
    """The option that splits the classes: each rank computes the rows whose class it has."""
    weight = {"weight": S(0)} if call.arg("weight") is not None else {}
    return replace(option(call, {"self": S(1), **weight}, results), local=local)


def _labels(call: OpCall) -> tuple[str | None, str]:
    """Labels of the log probabilities and the targets, the classes needed whole; None where there are no rows."""
    source, target = ROWS[call.target]
    return (source.replace("c", WHOLE) if call.arg("self").ndim == len(source) else None), target


@rule(ctc_loss)
def aligned_forward(call: OpCall) -> list[Option]:
    """Rows: frames and classes are needed whole."""
    return options(call, Dims(_ROWS_OF_CTC, ("n", "n..")))


@rule(ctc_loss_backward)
def aligned_backward(call: OpCall) -> list[Option]:
    """Rows. Linear in the incoming gradient."""
    operands = {"grad": "n", **_ROWS_OF_CTC, "losses": "n", "log_alpha": "n.."}
    return options(call, Dims(operands, ".n.", linear=(("grad",),)))
