"""Kernels of ``backend="inductor"`` as the files of an entry: libraries as they were compiled, and what was decided.

A later process loads the libraries, and so runs the same machine code, and takes the same islands, whatever it would
measure. ``surroundings_of_kernels`` has the facts that decide what a compiler writes here.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from passes.measured import IslandTime

from .._torch import inductor_passes, inductor_settings
from ..lowering.island_call import CompiledIsland
from ..lowering.island_code import IslandCode
from ..lowering.island_library import IslandLibrary
from ..lowering.islands import CompiledIslands, Kernels, MadeIsland
from .code_digests import code_digest
from .not_cached import NotCachedError
from .packed import as_bytes

_DATA, _TEXT = "kernels.json", "kernels.cpp"
_CPU_FACTS = Path("/proc/cpuinfo")
_OF_CPU = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")  # the last two: of ARM
_OF_COMPILERS = ("COMPILER_PATH", "CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH", "GCC_EXEC_PREFIX", "LIBRARY_PATH")


def kernels_to_files(kernels: Kernels) -> dict[str, bytes]:
    """The files of an entry that hold ``kernels``. Raises ``NotCachedError`` for those of a GPU, or without any."""
    if kernels.failure:
        raise NotCachedError(f"its kernels did not compile: {kernels.failure}")
    libraries: dict[IslandLibrary, str] = {}

    def made(island: MadeIsland) -> Any:
        if isinstance(island, str):
            return island
        if not isinstance(island, CompiledIsland):
            raise NotCachedError("its kernels are those of a GPU, which Triton compiles in each process")
        file = libraries.setdefault(island.library, f"kernels-{len(libraries)}.so")
        return {"library": file, "code": asdict(island.code)}

    keys = {key: number for number, key in enumerate(kernels.made)}
    data = {
        "made": [[key, made(island)] for key, island in kernels.made.items()],
        "seconds": [[keys[key], *seconds] for key, seconds in kernels.seconds.items()],
        "chosen": [[[keys[key] for key in found], taken] for found, taken in kernels.chosen.items()],
        "rows": [asdict(row) for row in kernels.rows],
    }
    files = {file: library.content for library, file in libraries.items()}
    return {**files, _DATA: as_bytes(data), _TEXT: kernels.text.encode()}


def kernels_from_files(data: Mapping[str, Any], files: Mapping[str, bytes], islands: CompiledIslands) -> Kernels:
    """The kernels of ``kernels_to_files``, loaded; ``data``: what its JSON has. The hashes of files were compared."""
    libraries = {name: IslandLibrary.read(content) for name, content in files.items() if name.endswith(".so")}

    def made(given: Any) -> MadeIsland:
        if isinstance(given, str):
            return given
        code = IslandCode(**{**given["code"], "temporaries": tuple(given["code"]["temporaries"])})
        return CompiledIsland(code, libraries[given["library"]], islands.scratch)

    keys = [key for key, _ in data["made"]]
    return Kernels(
        made={key: made(given) for key, given in data["made"]},
        seconds={keys[number]: (by_ops, by_kernels) for number, by_ops, by_kernels in data["seconds"]},
        chosen={tuple(keys[number] for number in found): taken for found, taken in data["chosen"]},
        rows=tuple(IslandTime(**row) for row in data["rows"]),
        text=files[_TEXT].decode(),
    )


def surroundings_of_kernels() -> list[Any]:
    """The processor, compiler and settings of kernels; each instruction counts, as compilers use them all.

    The compiler is compared by its file, which is quicker to look at than to run.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    settings = [each for each in sorted(os.environ.items()) if each[0].startswith("TORCHINDUCTOR_")]
    settings = [(name, value) for name, value in settings if name != "TORCHINDUCTOR_CACHE_DIR"]  # torch sets it
    settings += [(name, os.environ[name]) for name in _OF_COMPILERS if name in os.environ]
    edits = [[name, _described(each)] for name, each in sorted(inductor_passes().items())]
    return [_processor(_CPU_FACTS), compiler, _file(shutil.which(compiler)), settings, inductor_settings(), edits]


def _described(custom: Any) -> str:
    """A pass of a user's in Inductor: what it says that it is, or the digest of its code."""
    if hasattr(custom, "uuid"):
        if (known := custom.uuid()) is None:
            raise NotCachedError("a pass of Inductor has no uuid, by which it asks not to be kept")
        return str(known)
    call = custom if hasattr(custom, "__code__") else type(custom).__call__
    return code_digest(call.__code__) if hasattr(call, "__code__") else repr(custom)


@cache
def _processor(facts: Path) -> list[str]:
    with suppress(OSError):
        lines = facts.read_text().splitlines()
        return sorted({line for line in lines if line.startswith(_OF_CPU)}) or lines
    return [platform.processor()]


def _file(name: str | None) -> list[Any]:
    if name is None:
        return []
    path = os.path.realpath(name)
    found = os.stat(path)
    return [path, found.st_size, found.st_mtime_ns]
