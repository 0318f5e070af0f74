"""A map from bytes to what is known of them."""

from __future__ import annotations

import random

from passes.schedule.segments import Segments


def test_an_interval_is_divided_where_another_one_begins_or_ends() -> None:
    found: Segments[list[str]] = Segments(list, list.copy)
    for held in found.over(10, 20):
        held.append("a")
    for held in found.over(15, 30):
        held.append("b")
    assert list(found.all()) == [[], ["a"], ["a", "b"], ["b"], []]
    list(found.over(12, 30))
    found.replace(12, 30, ["c"])
    assert list(found.all()) == [[], ["a"], ["c"], []]


def test_it_is_as_a_list_of_bytes() -> None:
    chance, found = random.Random(0), Segments[list[int]](list, list.copy)
    plain: list[list[int]] = [[] for _ in range(50)]
    for step in range(200):
        start, end = sorted(chance.sample(range(51), 2))
        assert {tuple(held) for held in found.over(start, end)} == {tuple(held) for held in plain[start:end]}
        if step % 3:
            for held in found.over(start, end):
                held.append(step)
            plain[start:end] = [[*held, step] for held in plain[start:end]]
        else:
            found.replace(start, end, [step])
            plain[start:end] = [[step]] * (end - start)
