"""Fixtures for every test: the pool of gloo ranks, a world of one, golden text; options and markers.

Functions import torch and spmd themselves: the process that hands tests to workers (pytest-xdist) needs neither, and
the workers start when it has read this file.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .harness.pool import Ranks

os.environ["SPMD_QUIET"] = "1"  # the ranks and programs that tests start, too
# Programs are forked from a process that has loaded torch, which reads this once. ``spmd run`` sets it before it does.
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # variables that a launcher sets
SEED = 9_075  # of each test: none that a test would choose, for two models of a test may have to differ


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to four gloo ranks, started when first asked for and kept for the whole session."""
    from .harness.pool import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def hosts() -> Iterator[Ranks]:
    """Like ``ranks``, on two hosts with a link: the first half of a job's ranks on one, the others on the other."""
    from .harness.two_hosts import pool_on_two_hosts

    with pool_on_two_hosts() as pool:
        yield pool


@pytest.fixture
def alone() -> Iterator[None]:
    """No process group before the test, and none after it."""
    import torch.distributed as dist

    assert not dist.is_initialized(), "an earlier test left a process group"
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def on_its_own() -> Iterator[None]:
    """A test draws the same numbers whichever ran before it, and leaves neither its ``spmd.seed`` nor its ranks."""
    import torch
    import torch.distributed as dist

    import spmd

    random.seed(SEED)
    torch.manual_seed(SEED)
    had_group, variables = dist.is_initialized(), {name: os.environ.get(name) for name in OF_RANKS}
    yield
    spmd.seed(None)
    left = {name: os.environ.pop(name, None) for name, before in variables.items() if os.environ.get(name) != before}
    os.environ.update({name: before for name in left if (before := variables[name]) is not None})
    if has_left := dist.is_initialized() and not had_group:
        dist.destroy_process_group()
    assert not (left or has_left), f"the test left a process group (ask for `alone`), or what makes ranks: {left}"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare a text with ``golden/<name>.txt`` beside the test; ``name`` is by default that of the test."""

    def compare(text: str, name: str = request.node.name.removeprefix("test_")) -> None:
        path = request.path.parent / "golden" / f"{name}.txt"
        if request.config.getoption("--renew"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is not there: run this test with --renew, which writes it"
        assert text == path.read_text()

    return compare


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--exhaustive``, ``--renew`` and ``--backend``."""
    parser.addoption("--exhaustive", action="store_true", help="all optimizers in all combinations, all real models")
    parser.addoption("--renew", action="store_true", help="write golden text anew, for review as a diff")
    parser.addoption("--backend", default="aten", help="of steps for which a test names none")


def pytest_configure(config: pytest.Config) -> None:
    """Tell ``harness/backend.py`` and ``interplay/``, also in processes that tests start; limit what new tests take."""
    from .cpu_limit.limit import CpuLimit
    from .interplay.seeds import VARIABLE, seed

    os.environ["TESTS_BACKEND"] = config.getoption("--backend")
    os.environ[VARIABLE] = str(seed())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CpuLimit.of(config))


def pytest_report_header() -> str:
    """Which rows of the covering array run."""
    from .interplay.array import rows_within
    from .interplay.seeds import SECONDS, VARIABLE, seed

    return f"interplay: {len(rows_within(seed(), SECONDS))} rows of {VARIABLE}={seed()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what is exhaustive, mark the quick tests, and skip what needs a CUDA device where there is none."""
    import torch

    if not config.getoption("--exhaustive"):
        config.hook.pytest_deselected(items=[item for item in items if _is_exhaustive(item)])
        items[:] = [item for item in items if not _is_exhaustive(item)]
    for item in items:
        assert isinstance(item, pytest.Function)
        if not {"ranks", "hosts"} & set(item.fixturenames) and not {"slow", "processes"} & set(item.keywords):
            item.add_marker("quick")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    items.sort(key=lambda item: "processes" not in item.keywords)  # if a long one came last, workers would wait


def _is_exhaustive(item: pytest.Item) -> bool:
    """Whether an item is marked so, or has another value of a parameter than that whose turn it is."""
    if item.get_closest_marker("exhaustive"):
        return True
    if (marker := item.get_closest_marker("in_turn")) is None:
        return False
    assert isinstance(item, pytest.Function)
    positions, counts = {}, {}
    for names, values, *_ in (mark.args for mark in item.iter_markers("parametrize")):
        given = [item.callspec.params[name] for name in names.split(", ")]
        rows = [value if len(given) > 1 else (value,) for value in values]
        counts[names] = len(rows)
        positions[names] = next(k for k, row in enumerate(rows) if all(map(operator.is_, row, given)))
    (name,) = marker.args
    others = math.prod(count for names, count in counts.items() if names != name)
    assert counts[name] <= others, f"{item.nodeid}: {name} has more values than there are cases to take them in turn"
    turn = sum(position for names, position in positions.items() if names != name)
    return positions[name] != turn % counts[name]


def pytest_collection_finish() -> None:
    """All tests are imported, and torch, which sets the levels of its loggers then."""
    from .harness.backend import take_backend
    from .harness.memory import spare_the_collector

    # torch writes its trace of each fake tensor, with the stack, for as long as this logger has a handler: one of torch
    # that leaves at the first record, or one of pytest, which listens to each logger that passes nothing on.
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()
    take_backend()
    spare_the_collector()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Run each test once more, where ``cpu_limit/`` measures it again."""
    from .cpu_limit.limit import TWICE, run_once

    if TWICE in os.environ:
        run_once(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the processor time of each test, as the property ``cpu`` in what ``--junitxml`` writes."""
    from .harness.cpu_time import cpu_seconds

    if (marker := item.get_closest_marker("costly")) is not None:
        (why,) = marker.args
        item.user_properties.append(("costly", why))
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu", round(cpu_seconds() - before, 3)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file's tests have imported and cached stays: a compile that collects garbage need not visit it."""
    from .harness.memory import spare_the_collector

    if nextitem is not None and nextitem.path != item.path:
        spare_the_collector()
