"""Findings as text for a terminal: each refusal with its line, then what else there is to say of the modes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from .findings import Findings, InMode
from .refusal import Refusal

_SHOWN = 12  # sentences under one heading; JSON has all


def text_of(findings: Findings, width: int = 120) -> str:
    """The findings in lines of at most ``width`` columns, without colors."""
    text = io.StringIO()
    Console(file=text, color_system=None, width=width).print(Group(*lines_of(findings)))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def lines_of(findings: Findings) -> Iterator[Any]:
    """Renderables, one below the other. What holds in some of the modes only says in which."""
    for refusal in findings.refusals:
        yield from _refusal(refusal, _only_in(findings, findings.modes_of(refusal)))
    yield from (Text(_headline(findings, mode), style="bold") for mode in findings.modes)
    for heading, of in _LISTS.items():
        sentences = list(dict.fromkeys(each for mode in findings.modes for each in of(mode)))
        for sentence in sentences[:_SHOWN]:
            where = _only_in(findings, [mode.mode for mode in findings.modes if sentence in of(mode)])
            yield _indented(Text.assemble((f"{heading}{where}: ", "yellow"), sentence))
        if len(sentences) > _SHOWN:
            yield _indented(Text(f"{heading}: {len(sentences) - _SHOWN} more, which --json lists", style="yellow"))


_LISTS: dict[str, Callable[[InMode], Sequence[str]]] = {
    "not looked at": lambda mode: mode.unseen,
    "compiles another program": lambda mode: mode.anew,
    "gathered whole": lambda mode: mode.whole,
    "not kept in the cache": lambda mode: [mode.not_kept] if mode.not_kept else [],
}


def _only_in(findings: Findings, modes: Sequence[str]) -> str:
    """``" in fully_shard"``, unless it is in all."""
    return f" in {', '.join(modes)}" if len(modes) < len(findings.modes) else ""


def _refusal(refusal: Refusal, where: str) -> Iterator[Any]:
    """One refusal: its line and source, what it says, and what to do instead."""
    title = Text.assemble((refusal.at, "bold"), ": ", (f"refused{where}", "red"), f", {refusal.kind}")
    yield title.append(f", {refusal.op}") if refusal.op else title
    body = [("cyan", refusal.source), ("", f"{refusal.reason}.")]
    if refusal.alternative:
        body.append(("green", f"Instead: {refusal.alternative}."))
    yield from (_indented(Text(line, style=style)) for style, line in body if line)
    yield Text()


def _headline(findings: Findings, mode: InMode) -> str:
    """The outcome in one mode."""
    count, ranks = len(mode.refusals), f"{findings.world} rank{'' if findings.world == 1 else 's'}"
    refused = f"{count} refusal{'' if count == 1 else 's'}"
    outcome = refused if count else "compiles" if mode.is_compiled else "its trace came to no end"
    return f"{findings.step}, {mode.mode}, {ranks}: {outcome}"


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 4), expand=False)
