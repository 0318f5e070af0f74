"""Islands as Inductor compiled them: equal ones once, all of a program in one library; taken where that is quicker.

A kernel sums in another order than ops of aten do, so ranks have to take the same islands, or replicas would part: they
exchange what each has measured, and take those that are quicker in the sum.
"""

from __future__ import annotations

import json
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from passes import Island
from passes.analysis.aliases import is_view
from passes.analysis.structural_keys import text_of
from passes.measured import IslandTime
from passes.schedule.op_work import work_of

from ..interpreter.source_lines import warn_user
from .island_call import CompiledIsland
from .island_check import difference
from .island_code import IslandCode, NoKernelError, island_code
from .island_launch import LaunchedIsland
from .island_library import IslandLibrary
from .island_times import seconds_of

AllGatherText = Callable[[str], list[str]]

_LEAST_GAIN = 1.02
_NOT_MEASURED = 1e-6  # seconds of a call, at most: the times are of operands that never move
_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


MadeIsland = CompiledIsland | LaunchedIsland | str  # the last: why there is none


@dataclass(frozen=True)
class Kernels:
    """All that was made for the islands of a program, by key, and decided: what a later process needs to do the same.

    ``seconds``: op by op, and as kernels. ``chosen``: whether each is taken, by the keys of all that were found
    together. ``rows`` and ``text``: for the report.
    """

    made: Mapping[str, MadeIsland]
    seconds: Mapping[str, tuple[float, float]]
    chosen: Mapping[tuple[str, ...], list[bool]]
    rows: tuple[IslandTime, ...]
    text: str
    failure: str = ""  # of the compiler, which may do better in a later process


class CompiledIslands:
    """The islands of a step's programs, by key, and what is known of each."""

    def __init__(self) -> None:
        self._made: dict[str, MadeIsland] = {}
        self.seconds: dict[str, tuple[float, float]] = {}
        self._chosen: dict[tuple[str, ...], list[bool]] = {}  # by the keys of all islands of a program
        self._count = 0
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.failure = ""  # of the compiler

    def compiled(self, island: Any) -> Any:
        """The compiled form of an island; that of another region, or where there is none, is itself.

        An island that has no memory for its results, as ``ReuseMemory`` gives it, becomes a function that returns them.
        """
        if not isinstance(island, Island):
            return island
        key = key_of(island)
        self._compile({key: island})
        made = self._made[key]
        if isinstance(made, str):
            return island
        return made if island.outs else partial(_into_new, made, island.with_outs())

    def made(self, key: str) -> MadeIsland:
        """The island of a key as it was compiled, or why it was not."""
        return self._made[key]

    def adopt(self, kernels: Kernels, compiles: bool = False) -> None:
        """Take the kernels of an earlier process, and what ranks decided there; all of them do so together.

        With ``compiles`` only what was measured: it decides for kernels that are compiled here.
        """
        self.seconds |= kernels.seconds
        if not compiles:
            self._made |= kernels.made
            self._chosen |= kernels.chosen

    def choice(self, exchange: AllGatherText | None) -> Choice:
        """What decides, for one compilation, which islands are taken, together with the other ranks."""
        return Choice(self, exchange)

    def choose(self, islands: Sequence[Island], exchange: AllGatherText | None) -> list[bool]:
        """Whether each island is taken: where it is quicker than its ops in the sum of all ranks.

        Without an exchange, as decided before.
        """
        keys = tuple(map(key_of, islands))
        if exchange is not None:
            self._measure(dict(zip(keys, islands, strict=True)))
            has_kernels = [not isinstance(self._made[key], str) for key in keys]  # seconds may be of an earlier process
            own = [self.seconds.get(key) if has else None for key, has in zip(keys, has_kernels, strict=True)]
            figures = exchange(json.dumps(own))
            self._chosen[keys] = [_is_quicker(each) for each in zip(*map(json.loads, figures), strict=True)]
        return self.chosen(keys)

    def chosen(self, keys: tuple[str, ...]) -> list[bool]:
        """What was decided for islands with these keys, which were found together."""
        return self._chosen.get(keys, [True] * len(keys))

    def _measure(self, islands: dict[str, Island]) -> None:
        self._compile(islands)
        for key, island in islands.items():
            made = self._made[key]
            if key in self.seconds or isinstance(made, str):
                continue
            if why := difference(island, made):
                self._made[key] = why
            else:
                self.seconds[key] = seconds_of(island, self)

    def _compile(self, islands: dict[str, Island]) -> None:
        """Compile all that is new in one library."""
        codes, failures = dict[str, IslandCode](), list[str]()
        for key in [key for key in islands if key not in self._made]:
            try:
                island = islands[key]
                island, name = island if island.outs else island.with_outs(), f"island_{self._count}"
                if self._is_launched(island):
                    self._made[key] = LaunchedIsland(island, name)
                else:
                    codes[key] = island_code(island, name)
                self._count += 1
            except NoKernelError as error:
                self._made[key] = str(error)
                failures += [str(error)] if error.__cause__ else []  # Inductor's own: for want of a compiler, too
        if codes:
            self._load(codes)
        if failures and all(isinstance(each, str) for each in self._made.values()):
            self._warn(failures[0])

    def _is_launched(self, island: Island) -> bool:
        """Whether kernels are launched one by one: on a GPU, where no C++ of ours can call them."""
        return any(node.meta["val"].device.type != "cpu" for node in island.placeholders)

    def _load(self, codes: dict[str, IslandCode]) -> None:
        try:
            library = IslandLibrary.compiled(_HEADER + "\n".join(code.text for code in codes.values()))
        except Exception as error:  # of the compiler, of many kinds
            why = f"{type(error).__name__}: {error}"
            self._made |= dict.fromkeys(codes, why)
            self._warn(why)
            return
        for key, code in codes.items():
            self._made[key] = CompiledIsland(code, library, self.scratch)

    def _warn(self, why: str) -> None:
        if not self.failure:
            self.failure = why
            warn_user(
                f'backend="inductor" runs ops of aten, since no kernels compile here: {why}\nInstall g++, or set CXX '
                "to a compiler; on a GPU, install Triton"
            )

    def scratch(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for temporaries, the same for all islands, since one runs at a time."""
        if self._scratch.numel() < sum(sizes):
            self._scratch = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        return list(self._scratch[: sum(sizes)].split(list(sizes)))


class Choice:
    """Decides, for one compilation, which islands are taken; after ``end`` as it was decided then."""

    def __init__(self, islands: CompiledIslands, exchange: AllGatherText | None) -> None:
        self._islands, self._exchange = islands, exchange
        self._found: dict[str, list[tuple[Island, bool]]] = defaultdict(list)  # by key, those of all programs
        self._together: list[tuple[str, ...]] = []

    def __call__(self, found: Sequence[Island]) -> Sequence[bool]:
        """Whether each island is taken."""
        chosen = self._islands.choose(found, self._exchange)
        if self._exchange is not None:
            self._together.append(tuple(map(key_of, found)))
            for island, is_taken in zip(found, chosen, strict=True):
                self._found[key_of(island)].append((island, is_taken))
        return chosen

    def end(self) -> None:
        """All is decided."""
        self._exchange = None

    def kernels(self) -> Kernels:
        """All that was made and decided."""
        islands, found = self._islands, self._found
        seconds = {key: islands.seconds[key] for key in found if key in islands.seconds}
        chosen = {keys: islands.chosen(keys) for keys in self._together}
        made = {key: islands.made(key) for key in found}
        return Kernels(made, seconds, chosen, self.times(), self.text(), islands.failure)

    def times(self) -> tuple[IslandTime, ...]:
        """A row for each distinct island."""
        rows = []
        for key, calls in self._found.items():
            (island, is_taken), made = calls[0], self._islands.made(key)
            by_ops, by_kernels = self._islands.seconds.get(key, (0.0, 0.0))
            why, nodes = made if isinstance(made, str) else "", len(island.nodes)
            row = IslandTime(island.name, nodes, len(calls), _saved(island), by_ops, by_kernels, is_taken, why)
            rows.append(row)
        return tuple(rows)

    def text(self) -> str:
        """The C++ of the islands that are taken, each with the ops that it fuses."""
        parts = []
        for key, calls in self._found.items():
            (island, is_taken), made = calls[0], self._islands.made(key)
            if is_taken and not isinstance(made, str):
                ops = [f"//     {node.name} = {node.target}" for node in island.nodes]
                names = ", ".join(each.name for each, _ in calls)
                parts.append("\n".join([f"// {names}: {made.code.kernels} kernels of", *ops, made.code.text]))
        return "\n".join([_HEADER, *parts]) if parts else ""


def _into_new(made: CompiledIsland | LaunchedIsland, writing: Island, *operands: Tensor) -> tuple[Tensor, ...]:
    vals: list[Tensor] = [node.meta["val"] for node in writing.placeholders]
    outs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in vals[len(operands) :]]
    made.bind([*operands, *outs], vals)()
    return tuple(outs)


def _saved(island: Island) -> int:
    """The bytes that the ops of an island read and write, less those of its operands and results."""
    own = sum(node.meta["val"].nbytes for node in (*island.placeholders, *island.results))
    computed = [node for node in island.nodes if node.target is not operator.getitem and not is_view(node)]
    return max(sum(work_of(node).bytes for node in computed) - int(own), 0)


def _is_quicker(figures: Sequence[list[float] | None]) -> bool:
    """Whether kernels take less time than ops on all ranks together; never where one of them has none."""
    if any(each is None for each in figures):
        return False
    by_ops, by_kernels = (sum(each[k] for each in figures if each) for k in (0, 1))
    return by_ops >= _LEAST_GAIN * (by_kernels + _NOT_MEASURED * len(figures))


def key_of(island: Island) -> str:
    """Equal for islands of the same ops on the same types and layouts, and for as many threads."""
    graph = island.functional()
    number = {node: f"%{k}" for k, node in enumerate(graph.nodes)}
    lines = [f"{torch.get_num_threads()} threads"]
    for node in graph.nodes:
        val, arguments = node.meta.get("val"), text_of([node.args, dict(node.kwargs)], number)
        layout = f"{val.dtype} {tuple(val.shape)} {val.stride()} {val.device}" if isinstance(val, Tensor) else ""
        lines.append(f"{node.op if node.op != 'call_function' else node.target} {arguments} {layout}")
    return "\n".join(lines)
