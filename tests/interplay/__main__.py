"""``python -m tests.interplay``: run all rows, a line each. Rows that a file of results has are not run again."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from ..harness.pool import RankError, Ranks
from .array import differing, rows
from .comparing import differences, world


def main() -> None:
    """Run the rows of an array, of one seed."""
    command = argparse.ArgumentParser("python -m tests.interplay", description=__doc__)
    command.add_argument("--seed", type=int, default=0, help="which rows have the pairs (0)")
    command.add_argument("--results", type=Path, default=Path("runs/interplay.jsonl"), help="a line for each row")
    command.add_argument("--row", type=int, help="one row alone, by its number")
    command.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after that time")
    given = command.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    known = set()
    if given.results.exists():
        known = {(each["seed"], each["row"]) for each in map(json.loads, given.results.read_text().splitlines())}
    pool, began = Ranks(), time.monotonic()
    try:
        for number, row in enumerate(rows(given.seed)):
            if (given.seed, number) in known or given.row not in (None, number):
                continue
            if time.monotonic() - began > given.seconds:
                break
            started = time.monotonic()
            try:
                found = pool.run(world(row), differences, row)
                lines = sorted({line for lines in found for line in lines})
            except RankError as error:
                lines = [f"raised: {error}"]
            seconds = time.monotonic() - started
            print(f"{number:3} {seconds:5.1f} s {' '.join(differing(row).values())}", flush=True)
            for line in lines[:4]:
                print("       ", line[:600], flush=True)
            with given.results.open("a") as file:
                file.write(json.dumps({"seed": given.seed, "row": number, "values": row, "found": lines}) + "\n")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
