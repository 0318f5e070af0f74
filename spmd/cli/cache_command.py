"""``spmd cache list|check|clear``: the compiled steps that are kept for later processes.

::

    python -m spmd cache list
    python -m spmd cache check --folder runs/cache
    python -m spmd cache clear

``list`` shows each entry with its program, its size and when it was last used, ``check`` also whether it is as it was
written, and ``clear`` removes all. The folder is the user's cache directory, or that of SPMD_CACHE. It ends with 0 if
all is well, with 1 if an entry is damaged, and with 2 where the folder cannot be used.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..cache.folder import MANIFEST, Folder, RefusedFolderError, remove, size_of
from ..cache.not_cached import NotCachedError
from ..options import CacheOption, cache_setting


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``cache`` to its parser."""
    command.add_argument("action", choices=("list", "check", "clear"), help="what to do with the entries")
    command.add_argument("--folder", metavar="FOLDER", type=Path, help="another folder than the user's")
    command.add_argument("--json", action="store_true", help="print the entries as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """List, check or clear, and return the exit code."""
    named = arguments.folder or CacheOption.of(cache_setting()).folder or CacheOption.of("on").folder
    assert named is not None, '"on" names the user\'s folder'
    if not named.exists():
        Console().print(f"nothing is kept in {named}")
        return 0
    try:
        folder = Folder.open(named)
    except (RefusedFolderError, OSError) as error:
        parser.error(str(error))
    if arguments.action == "clear":
        return _clear(folder)
    return _show(folder, arguments.action == "check", arguments.json)


def _clear(folder: Folder) -> int:
    entries = folder.entries()
    for entry in entries:
        remove(entry)
    Console(soft_wrap=True).print(f"removed {len(entries)} entries from {folder.path}")
    return 0


def _show(folder: Folder, checks: bool, as_json: bool) -> int:
    rows = [_row(folder, entry, checks) for entry in folder.entries()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return int(any(row.get("damage") for row in rows))
    table = Table(title=str(folder.path), title_justify="left", box=None, padding=(0, 1))
    for heading in ("entry", "program", "KB", "last used", *(("as written",) if checks else ())):
        table.add_column(heading, overflow="fold")
    for row in rows:
        cells = row["entry"], row["program"], f"{row['bytes'] / 1000:,.0f}", row["used"]
        table.add_row(*cells, *((row["damage"] or "yes",) if checks else ()))
    Console(soft_wrap=True).print(table)
    return int(any(row.get("damage") for row in rows))


def _row(folder: Folder, entry: Path, checks: bool) -> dict[str, Any]:
    row = {"entry": entry.name, "program": _program(entry), "bytes": size_of(entry), "used": _used(entry)}
    return row | ({"damage": _damage(folder, entry)} if checks else {})


def _damage(folder: Folder, entry: Path) -> str:
    """Why an entry cannot be read, or nothing."""
    try:
        folder.read(entry)
    except (NotCachedError, RefusedFolderError, OSError, ValueError, LookupError) as error:
        return str(error) or type(error).__name__
    return ""


def _program(entry: Path) -> str:
    with suppress(OSError, ValueError, LookupError):
        return str(json.loads((entry / "final.json").read_text())["name"])
    return "?"


def _used(entry: Path) -> str:
    with suppress(OSError):
        return time.strftime("%Y-%m-%d %H:%M", time.localtime((entry / MANIFEST).stat().st_mtime))
    return "?"
