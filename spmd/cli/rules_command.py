"""``spmd rules [OP]``: the sharding rules, or what the rule of one op claims of a call.

Without an OP it prints a line for each rule: its ops, and the letters of an example, as in einsum. Dims of one letter
may be split together, one with a dot is needed whole. OP is a name or a pattern; of one rule it shows all that the rule
claims of its example, or of a call that you write, along an axis of so many ranks::

    python -m spmd rules
    python -m spmd rules "*norm*"
    python -m spmd rules aten.convolution
    python -m spmd rules "aten.mm(f32[7, 8], f32[8, 6])" --ranks 4
    python -m spmd rules mylib.scale_rows --file rules.py --json

It ends with 0, with 1 if the op has no rule, and with 2 for what is no op or no call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from passes.errors import PlacementError
from passes.ir.ops import Trait, has

from ..rules.base import Rule
from ..rules.einsum_labels import WHOLE
from ..rules.registry import localize_of
from ..rules.table.claims import OWN, Claim, Claims, Tensor, claims_of
from ..rules.table.example_call import call_of
from ..rules.table.names import is_there, name_of, op_called, ops_like, ruled_ops
from ..rules.table.rows import Row, example_of, rows
from .step_file import imported

_FEW_OPS = 3


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``rules`` to its parser."""
    command.add_argument("op", metavar="OP", nargs="?", help='a name, a pattern, or a call: "aten.t(f32[4, 6])"')
    command.add_argument("--ranks", type=int, default=2, help="ranks along the axis (default: 2)")
    command.add_argument("--file", metavar="FILE", type=Path, help="a Python file that registers rules of yours")
    command.add_argument("--json", action="store_true", help="print the same as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Find, print, and return the exit code."""
    if arguments.ranks < 1:
        parser.error(f"expected at least one rank, got --ranks {arguments.ranks}")
    pattern, bracket, _ = (arguments.op or "*").partition("(")
    try:
        if arguments.file is not None:
            imported(arguments.file)
        found = rows(_ops(pattern))
        if not found:
            return _explain_missing(pattern)
        if arguments.op is None or len(found) > 1:
            _show_table(found, arguments.json)
        else:
            _show_rule(found[0], arguments.op if bracket else None, arguments.ranks, arguments.json)
    except (ValueError, OSError, PlacementError) as error:
        parser.error(str(error))
    return 0


def _ops(pattern: str) -> dict[str, Rule]:
    """The op of exactly this name, without its other overloads, or all that match."""
    found = ops_like(pattern)
    name = name_of(op_called(pattern)) if "*" not in pattern and is_there(pattern) else pattern
    return {name: found[name]} if name in found else found


def _explain_missing(pattern: str) -> int:
    """Say what becomes of an op without a rule. Raises ``ValueError``, with names that are close, for no op."""
    if not is_there(pattern):
        close = get_close_matches(pattern.removeprefix("aten."), [n.removeprefix("aten.") for n in ruled_ops()], n=5)
        near = f"; close to it are {', '.join(close)}" if close else ""
        raise ValueError(f"no op is called {pattern!r}{near}. Without a name, spmd rules lists all that have a rule")
    if has(op_called(pattern), Trait.MUTABLE):
        print(f"{pattern} has no rule: it writes to its inputs, and programs have its functional form instead")
    else:
        print(
            f"{pattern} has no rule: where it can be decomposed, what it becomes has rules; else, and always where it "
            "is of a library, it runs on whole operands. spmd.register_rule gives it a rule"
        )
    return 1


def _show_table(found: list[Row], as_json: bool) -> None:
    if as_json:
        print(json.dumps([_row_as_data(row) for row in found], indent=2))
        return
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("op", overflow="fold", max_width=44)
    table.add_column("letters", overflow="fold", max_width=34)
    table.add_column("may be split", overflow="fold")
    for file, of_file in groupby(found, key=lambda row: row.file):
        table.add_row(Text(file, "bold"))
        for row in of_file:
            table.add_row(Text(_shown_ops(row)), Text(row.letters), Text(row.summary.replace("``", "")))
    Console(width=max(Console().width, 100)).print(table)


def _shown_ops(row: Row) -> str:
    """The ops of a rule, the first with an example in front, the rest as a number."""
    first = row.example.partition("(")[0] if row.example else row.ops[0]
    others = [name for name in row.ops if name != first]
    shown = [first, *(others if len(others) < _FEW_OPS else [])]
    return ", ".join(shown) + (f" and {len(others)} more" if len(shown) == 1 and others else "")


def _row_as_data(row: Row) -> dict[str, Any]:
    return {
        "ops": row.ops,
        "rule": row.name,
        "file": row.file,
        "line": row.line,
        "of_user": row.of_user,
        "may_be_split": row.summary,
        "letters": row.letters,
        "limits": row.claims.limits if row.claims is not None else (),
        "example": row.example,
    }


def _show_rule(row: Row, call: str | None, ranks: int, as_json: bool) -> None:
    text = call or next(filter(None, (example_of(name, row.rule) for name in row.ops)), None)
    claims = claims_of(row.rule, call_of(text, ranks)) if text is not None else None
    if as_json:
        shown = {"example": text, "ranks": ranks, "claims": asdict(claims) if claims is not None else None}
        print(json.dumps(_row_as_data(row) | shown, indent=2))
        return
    console = Console(width=max(Console().width, 100), highlight=False)
    console.print(f"[bold]{', '.join(row.ops)}[/]\n{row.file}:{row.line}, {row.name}: {row.summary}", soft_wrap=True)
    if claims is None or text is None:
        print("" if row.whole else "No example of it is known: write a call, as aten.t(f32[4, 8]) is one of aten.t")
        return
    console.print(f"\n{text}, along an axis of {ranks} ranks", markup=False, soft_wrap=True)
    console.print(_tensors(claims))
    console.print(_options(claims))
    for line in _notes(claims, text):
        console.print(line, markup=False, soft_wrap=True)


def _tensors(claims: Claims) -> Table:
    """The letters of each operand and result."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("", "type", "letters" if claims.labelled else "letters, read off its options"):
        table.add_column(heading)
    for each in (*claims.operands, *claims.results):
        table.add_row(each.name, Text(each.type), Text(" ".join(each.letters)))
    return table


def _options(claims: Claims) -> Table:
    """The placements that each option has, by operand and result."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, title_justify="left")
    for heading in ("option", *_numbered(claims.operands), "->", *_numbered(claims.results)):
        table.add_column(heading)
    whole = Claim("always", ("R",) * len(claims.operands), ("R",) * len(claims.results), local=False, sends=False)
    for each in (*claims.claims, whole):
        own = " (communicates)" if each.sends else (" (a program of its own)" if each.local else "")
        table.add_row(f"{each.what}{own}", *each.operands, "->", *each.results)
    return table


def _numbered(tensors: Sequence[Tensor]) -> Iterator[str]:
    """The names, with numbers for those of one list."""
    names = [each.name for each in tensors]
    for k, name in enumerate(names):
        yield name if names.count(name) == 1 else f"{name}[{names[:k].count(name)}]"


def _notes(claims: Claims, text: str) -> Iterator[str]:
    """Lines on what is refused, and on what else a rule needs or has."""
    for letter, reason in claims.refused.items():
        yield f"refused: {letter}, since {reason}"
    whole = dict.fromkeys(each.name for each in (*claims.operands, *claims.results) if WHOLE in each.letters)
    if whole:
        but = ", but for options of its own" if any(each.what == OWN for each in claims.claims) else ""
        yield f"refused: dims with a dot ({', '.join(whole)}), which the op needs whole{but}"
    if claims.limits:
        yield f"limits: {'; '.join(claims.limits)}"
    if claims.decomposed is not None:
        yield f"where dim {claims.decomposed} of the first operand is split, it is computed by other ops instead"
    localize = localize_of(op_called(text.partition("(")[0]))
    if localize is not None and localize.__doc__:
        yield f"sizes among the arguments: {localize.__doc__.splitlines()[0]}"
