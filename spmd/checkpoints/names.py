"""Names of tensors in files beside those of a model: renamed, fused or split, by a table.

Each entry goes from names of the model to names in the files. The rows of the tensors on one side, one after the other,
are the rows of those on the other, of which one side has one:

    {"*.qkv.*": ("*.q_proj.*", "*.k_proj.*", "*.v_proj.*")}     one in the model, several of equal length in the files
    {"*.qkv.*": {"*.q_proj.*": 512, "*.kv_proj.*": 256}}        of these numbers of rows
    {("*.gate.*", "*.up.*"): "*.gate_up.*"}                     several in the model, one in the files
    {"*.experts.up": ("*.experts.#.w1.weight",)}                ``#``: an index of the first dim, each by itself
    {"*": "model.*"}                                            another name

A ``*`` stands for any text, the same in all names of an entry. The first entry that matches a name is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Rows = Sequence[str] | Mapping[str, int]
Names = Mapping[str | tuple[str, ...], str | Rows]


@dataclass(frozen=True)
class Piece:
    """A part of the model's tensor ``name``: from row ``at`` on, ``rows`` of it are those of ``source`` from ``start``.

    ``index``: the index of the first dim that the part lies in, whose dims are those that ``source`` has.
    """

    name: str
    source: str
    at: int
    rows: int
    start: int = 0
    index: int | None = None


@dataclass
class Pieces:
    """All pieces, by the model's names and by those in the files, whose shapes follow from the model's."""

    of: dict[str, list[Piece]] = field(default_factory=dict)
    sources: dict[str, list[Piece]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def by(cls, table: Names | None, shapes: Mapping[str, tuple[int, ...]]) -> Pieces:
        """Apply a table to a model's tensors. Raises ``ValueError`` for an entry that is none, or matches nothing."""
        found = cls()
        for key, value in _checked(table).items():
            heads = (key,) if isinstance(key, str) else key
            names = [name for name in shapes if re.fullmatch(_regex(heads[0]), name) and name not in found.of]
            if not names:
                raise ValueError(f"names has {heads[0]!r}, which matches no tensor of the model: {_some(shapes)}")
            for name in names:
                found._add(_Entry.of(heads, value, name), shapes)
        for name, shape in shapes.items():
            if name not in found.of:
                found._put([Piece(name, name, 0, shape[0] if shape else 1)], {name: shape})
        return found

    def _add(self, entry: _Entry, shapes: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in entry.heads if name not in shapes or not shapes[name]]
        if missing and entry.only_renames() and missing[0] in shapes:
            self._put([Piece(entry.heads[0], entry.tails[0], 0, 1)], {entry.tails[0]: ()})
        elif missing:
            raise ValueError(f"names has {missing[0]}, which is no tensor of the model with rows: {_some(shapes)}")
        elif len(entry.heads) > 1:
            self._put(*_split(entry, shapes))
        elif any("#" in tail for tail in entry.tails):
            self._put(*_stacked(entry, shapes[entry.heads[0]]))
        else:
            self._put(*_fused(entry, shapes[entry.heads[0]]))

    def _put(self, pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]]) -> None:
        taken = sorted(self.shapes.keys() & shapes.keys())
        taken += sorted({piece.name for piece in pieces} & self.of.keys())
        if taken:
            raise ValueError(f"names gives {taken[0]} to two tensors: each has a name of its own")
        self.shapes |= shapes
        for piece in pieces:
            self.of.setdefault(piece.name, []).append(piece)
            self.sources.setdefault(piece.source, []).append(piece)


@dataclass(frozen=True)
class _Entry:
    """An entry for the names that one name of a model chooses. ``rows``: of each of ``tails``, where they are given."""

    heads: tuple[str, ...]
    tails: tuple[str, ...]
    rows: tuple[int, ...] | None

    @classmethod
    def of(cls, heads: Sequence[str], value: str | Rows, name: str) -> _Entry:
        match = re.fullmatch(_regex(heads[0]), name)
        assert match is not None, "it was chosen so"
        tails = (value,) if isinstance(value, str) else tuple(value)
        filled = [_filled(pattern, match.groups()) for pattern in (*heads, *tails)]
        rows = tuple(value.values()) if isinstance(value, Mapping) else None
        return cls(tuple(filled[: len(heads)]), tuple(filled[len(heads) :]), rows)

    def only_renames(self) -> bool:
        """Whether it gives one tensor another name."""
        return len(self.heads) == len(self.tails) == 1 and self.rows is None and "#" not in self.tails[0]

    def parts(self, length: int) -> Iterator[tuple[str, int, int]]:
        """(name, start, rows) of each of ``tails`` in so many rows."""
        rows, count = self.rows, len(self.tails)
        if rows is None:
            if length % count:
                raise ValueError(
                    f"names has {count} names for {self.heads[0]}, whose {length} rows are no multiple of that: give "
                    f"the rows of each, as in {{{self.tails[0]!r}: {length - 1}, ...}}"
                )
            rows = (length // count,) * count
        if sum(rows) != length:
            raise ValueError(f"names gives {self.heads[0]} {sum(rows)} rows, but it has {length}")
        start = 0
        for name, own in zip(self.tails, rows, strict=True):
            yield name, start, own
            start += own


_Found = tuple[list[Piece], dict[str, tuple[int, ...]]]


def _fused(entry: _Entry, shape: tuple[int, ...]) -> _Found:
    (head,) = entry.heads
    parts = list(entry.parts(shape[0]))
    pieces = [Piece(head, name, start, rows) for name, start, rows in parts]
    return pieces, {name: (rows, *shape[1:]) for name, _, rows in parts}


def _stacked(entry: _Entry, shape: tuple[int, ...]) -> _Found:
    (head,) = entry.heads
    if len(shape) < 2:
        raise ValueError(f"names has # for {head}, which has no dims beside the first: its shape is {list(shape)}")
    pieces, shapes = list[Piece](), dict[str, tuple[int, ...]]()
    for index in range(shape[0]):
        for name, start, rows in entry.parts(shape[1]):
            source = name.replace("#", str(index))
            pieces.append(Piece(head, source, start, rows, index=index))
            shapes[source] = (rows, *shape[2:])
    return pieces, shapes


def _split(entry: _Entry, shapes: Mapping[str, tuple[int, ...]]) -> _Found:
    (source,), start, pieces = entry.tails, 0, list[Piece]()
    for name in entry.heads:
        if shapes[name][1:] != shapes[entry.heads[0]][1:]:
            raise ValueError(f"names has {', '.join(entry.heads)} as one tensor, but rows of {name} have another shape")
        pieces.append(Piece(name, source, 0, shapes[name][0], start))
        start += shapes[name][0]
    return pieces, {source: (start, *shapes[entry.heads[0]][1:])}


def _checked(table: Names | None) -> Names:
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise TypeError(f"expected names to be a dict from names of the model to names in the files, got {table!r}")
    for key, value in table.items():
        heads = (key,) if isinstance(key, str) else key
        tails = (value,) if isinstance(value, str) else value
        if not (_is_texts(heads, tuple) and _is_texts(tails, (tuple, list, dict))) or len(heads) > 1 < len(tails):
            raise ValueError(f"expected one name on a side of an entry of names, some on the other: {key!r}: {value!r}")
        if len({each.count("*") for each in (*heads, *tails)}) > 1:
            raise ValueError(f"the names of an entry of names have unequal numbers of *: {key!r}: {value!r}")
        if isinstance(value, Mapping) and not all(type(rows) is int and rows > 0 for rows in value.values()):
            raise ValueError(f"expected a number of rows for each name, got {key!r}: {value!r}")
        if len(heads) > 1 and any("#" in each for each in tails):
            raise ValueError(f"# stands for an index of one tensor of the model, but there are several: {key!r}")
    return table


def _is_texts(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and bool(value) and all(isinstance(each, str) for each in value)  # type: ignore[attr-defined]


def _regex(pattern: str) -> str:
    return "(.*)".join(map(re.escape, pattern.split("*")))


def _filled(pattern: str, texts: Sequence[str]) -> str:
    first, *rest = pattern.split("*")
    return first + "".join(text + after for text, after in zip(texts, rest, strict=True))


def _some(names: Mapping[str, object]) -> str:
    return f"{', '.join(list(names)[:3])}, ..."
