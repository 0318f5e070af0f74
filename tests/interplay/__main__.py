"""``python -m tests.interplay``: run all rows, a line each. Rows that a file of results has are not run again.

Each row is also verified, and certified where that is possible; the last line counts those where it is not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path

from ..harness.pool import RankError, Ranks
from ..harness.two_hosts import made_on_two_hosts
from .array import described, plain_row, rows, rows_of_triples
from .dimensions import Row
from .known import values_of
from .planted import FAULTS
from .running import checks_of, found_in, is_on_two_hosts


def main() -> None:
    """Run the rows of an array, of one seed."""
    command = argparse.ArgumentParser("python -m tests.interplay", description=__doc__)
    command.add_argument("--seed", type=int, default=0, help="which rows have the pairs (0)")
    command.add_argument("--results", type=Path, default=Path("runs/interplay.jsonl"), help="a line for each row")
    command.add_argument("--row", type=int, help="one row alone, by its number")
    command.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after that time")
    command.add_argument("--triples", type=int, help="in place of all pairs, a number of rows of triples, by the seed")
    command.add_argument("--rows", type=Path, help="in place of them, those of a JSON file")
    command.add_argument("--fault", default="", choices=["", *FAULTS], help="a fault to plant, which rows may find")
    command.add_argument("--only", help='one row alone, by what is not plain: "mesh=3, cache=warm"')
    given = command.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    chosen = _chosen(given)
    known = set()
    if given.results.exists():
        known = {str(json.loads(line)["values"]) for line in given.results.read_text().splitlines()}
    began, not_shown = time.monotonic(), Counter[str]()
    with _Pools() as pools:
        for number, row in enumerate(chosen):
            if str(row) in known or given.row not in (None, number):
                continue
            if time.monotonic() - began > given.seconds:
                break
            started = time.monotonic()
            lines, not_checked = _run(pools.of(row), row, given.fault)
            not_shown += Counter(each.partition(":")[0] for each in not_checked)
            seconds = time.monotonic() - started
            print(f"{number:3} {seconds:5.1f} s {described(row)}", flush=True)
            for line in (*lines[:4], *not_checked):
                print("       ", line[:600], flush=True)
            with given.results.open("a") as file:
                file.write(json.dumps({"seed": given.seed, "row": number, "values": row, "found": lines}) + "\n")
    print(", ".join(f"{count} {what}" for what, count in not_shown.items()) or "all verified and certified")


class _Pools(ExitStack):
    """The ranks of this machine, and of two hosts once a row asks for them."""

    @cached_property
    def _here(self) -> Ranks:
        return self.enter_context(closing(Ranks()))

    @cached_property
    def _on_two_hosts(self) -> Ranks:
        return self.enter_context(made_on_two_hosts())

    def of(self, row: Row) -> Ranks:
        """Those of a row."""
        return self._on_two_hosts if is_on_two_hosts(row) else self._here


def _run(pool: Ranks, row: Row, fault: str) -> tuple[list[str], list[str]]:
    """A line for each difference of a row, and for what cannot be verified or certified."""
    try:
        found = found_in(pool, row, fault)
        wrong, not_checked = checks_of(pool, row, fault)
    except RankError as error:
        return [f"raised: {error}"], []
    return [*found, *wrong], not_checked


def _chosen(given: argparse.Namespace) -> list[Row]:
    if given.only is not None:
        return [plain_row(**values_of(given.only))]
    if given.rows is not None:
        return list(json.loads(given.rows.read_text()))
    return rows(given.seed) if given.triples is None else rows_of_triples(given.seed, given.triples)


if __name__ == "__main__":
    main()
