"""Enumerate: the options of a call, axis after axis, by its rule on the shapes that the axes before leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch.distributed.tensor import Partial, Replicate, Shard

from passes import Axis, AxisRole, Mesh, PartitionError
from passes.ir.ops import draws
from passes.ir.program import Placements

from ..memo import memo_key
from ..placements import ByGroup, Dealt, Interleaved, Mirrored, OwnRows, splits
from ..rules import OpCall, Option, rule_of
from ..rules.attention import Form, has_form, is_asked_for, is_attention
from .experts.own_order import splits_tokens
from .experts.whole_parts import cut_in_place, has_both
from .narrow import narrowed
from .values import Value


@dataclass
class Options:
    """Lists options for calls on one mesh; a rule is asked once for all calls of one memo key."""

    mesh: Mesh
    attention: str | None = None  # the form of attention over split sequences, if the user says
    _memo: dict[Any, list[Option]] = field(default_factory=dict)

    def next_axis(
        self, call: OpCall, operands: Sequence[Value], chosen: Sequence[Option], hint: Placements | None = None
    ) -> list[Option]:
        """The options along the axis after those of ``chosen`` that are right on all ranks."""
        if call.own_order is not None and splits_tokens(self.mesh.axes[len(chosen)]):
            return [self._behind_experts(call.own_order, chosen)]
        first, *others = map(self._of_call, narrowed(call, operands, chosen, self.mesh, hint))
        found = [option for option in first if all(option in other for other in others)] if others else first
        if any(value.group is not None for value in operands):
            kinds = _own_rows_along(self.mesh.axes[len(chosen)])
            found = [o for o in found if all(not isinstance(p, OwnRows) or isinstance(p, kinds) for p in o.operands)]
        if call.of_weights is not None and self.mesh.axes[len(chosen)].rows_move:
            found = [option for option in found if option.results[0] == call.of_weights] or found
        found = self._moving_no_row(found, operands, chosen)
        return self._of_attention(call, operands, chosen, found) if is_attention(call) else found

    def _moving_no_row(self, found: list[Option], operands: Sequence[Value], chosen: Sequence[Option]) -> list[Option]:
        """The options that leave rows in their micro-batch where tokens of all ranks come to experts, or go back."""
        before = [[each.operands[k] for each in chosen] for k in range(len(operands))]
        cuts = [cut_in_place(value, reads, self.mesh) for value, reads in zip(operands, before, strict=True)]
        if not any(cuts):
            return found

        def moves(placement: Any, cut: Shard | None) -> bool:
            return cut is not None and splits(placement, cut.dim) and placement != cut

        return [option for option in found if not any(map(moves, option.operands, cuts))]

    def _behind_experts(self, option: Option, chosen: Sequence[Option]) -> Option:
        """``option`` along an axis that cuts tokens which the ranks of experts split: in runs, where a rank has all."""
        before = [k for k, axis in enumerate(self.mesh.axes[: len(chosen)]) if has_both(axis)]
        if not before:
            return option
        (outer,) = (self.mesh.axes[k].size for k in before)
        (whole,) = (chosen[k] for k in before)

        def lifted(placement: Any, along: Any) -> Any:
            return Interleaved(placement.dim, outer) if type(placement) is Shard and along != placement else placement

        operands = map(lifted, option.operands, whole.operands)
        return replace(option, operands=tuple(operands), results=tuple(map(lifted, option.results, whole.results)))

    def of_all_axes(
        self, call: OpCall, operands: Sequence[Value], hint: Placements | None = None, chosen: tuple[Option, ...] = ()
    ) -> Iterator[tuple[Option, ...]]:
        """All combinations of an option per axis."""
        if len(chosen) == len(self.mesh.axes):
            yield chosen
            return
        for option in self.next_axis(call, operands, chosen, hint):
            yield from self.of_all_axes(call, operands, hint, (*chosen, option))

    def without_traffic(self, call: OpCall, operands: Sequence[Value], result: Placements) -> list[Option] | None:
        """One option per axis that gives exactly ``result`` and reads only what this rank has."""
        chosen: list[Option] = []
        for index in range(len(self.mesh.axes)):
            options = self.next_axis(call, operands, chosen)
            fits = [o for o in options if o.results[0] == result[index] and is_free(o, operands, index)]
            if not fits:
                return None
            chosen.append(min(fits, key=lambda o: sum(isinstance(p, Shard) for p in o.operands)))
        return chosen

    def _of_attention(
        self, call: OpCall, operands: Sequence[Value], chosen: Sequence[Option], found: list[Option]
    ) -> list[Option]:
        """The options of attention of the form that the user says; at most one axis has a program of its own."""
        if any(option.local is not None for option in chosen):
            found = [option for option in found if option.local is None]
        index = len(chosen)
        axis = self.mesh.axes[index]
        rows_split = any(splits(source[index], 2) for value in operands for source in value.nodes)
        if self.attention is None:
            return [option for option in found if not is_asked_for(call, option)]
        if AxisRole.SEQUENCE not in axis.roles or axis.size == 1 or not rows_split:
            return found
        fits = [option for option in found if has_form(option, self.attention)]
        if not fits:
            forms = [f'"{form}"' for form in get_args(Form) if any(has_form(option, form) for option in found)]
            raise PartitionError(
                f'expected attention="{self.attention}" to fit each call, but over the {axis.size} ranks of '
                f"{axis.name} queries of shape {[*call.operands[0].shape]} and their keys have "
                f"{' or '.join(forms) or 'no form, since some rank would have no row'}: leave attention out, and each "
                "call takes what it can"
            )
        return fits

    def along(self, call: OpCall, axis: int) -> list[Option]:
        """The options along one axis for a call on global shapes, whose operands have not been computed yet."""
        return self._of_call(replace(call, size=self.mesh.axes[axis].size))

    def _of_call(self, call: OpCall) -> list[Option]:
        """Everything replicated, and the options of the rule."""
        key = (*key_of(call), call.size, call.interleaved, call.of_parts, call.owned, call.hinted)
        if key not in self._memo:
            rule = rule_of(call.target)
            found = rule(call) if rule is not None else []
            if draws(call.target, call.args, call.kwargs):  # a draw's part is one run of rows, or one of each
                found = [option for option in found if not any(isinstance(p, Mirrored) for p in option.results)]
            self._memo[key] = [_replicated(call), *found]
        return self._memo[key]


def key_of(call: OpCall) -> tuple[Any, ...]:
    """The key of a call on one mesh."""
    return call.target, memo_key(call.args), memo_key(call.kwargs), call.results, call.own_order


def is_free(option: Option, operands: Sequence[Value], axis: int) -> bool:
    """Whether this rank has every operand of ``option``, or can cut it from one that it has."""
    return all(
        any(source[axis] == placement or isinstance(source[axis], Replicate) for source in value.nodes)
        and not isinstance(placement, Partial)
        for value, placement in zip(operands, option.operands, strict=True)
    )


def _own_rows_along(axis: Axis) -> tuple[type[OwnRows], ...]:
    """The kinds of own rows along an axis: those of its experts; of tokens that it splits, any."""
    if axis.rows_move:
        return (ByGroup,)
    return (Dealt,) if {AxisRole.BATCH, AxisRole.SEQUENCE} & set(axis.roles) else ()


def _replicated(call: OpCall) -> Option:
    return Option(
        tuple(Replicate() for _ in call.operands), tuple(None if r is None else Replicate() for r in call.results)
    )
