"""The page of a compiled step in headless Chromium: what a person does with it, and no error on the console."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import spmd
from passes.page.contents import WATCHED
from passes.page.render import render
from tests.harness.cases import MLP
from tests.harness.structure import compile_on_fake_ranks, regression

pytestmark = pytest.mark.processes
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LEFT, RIGHT, FIRST_AXIS = 92, 8, 70  # of the timeline, in pixels


@dataclass
class Opened:
    """A page, the step that it shows, and what went wrong in it."""

    page: Any
    step: spmd.CompiledStep
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path, spmd.CompiledStep]]:
    """A browser, the file of a page, and the step that it shows."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    model, optimizer, x, y = regression(6, 5, 4)
    mode = spmd.DataParallel("fully_shard")
    step = compile_on_fake_ranks(2, MLP.step, (model, optimizer), x, y, parallel_mode=mode)
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert step.program is not None
    calls = [{node.name: 0.002 for node in step.program.graph.nodes}]
    step.report().with_measured(step.program, calls).save(path)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000)  # ms
        yield browser, path, step
        browser.close()


@pytest.fixture
def opened(written: tuple[Any, Path, spmd.CompiledStep]) -> Iterator[Opened]:
    """The page, opened anew for each test; nothing may go wrong in it."""
    browser, path, step = written
    found = Opened(browser.new_page(viewport={"width": 1400, "height": 900}), step)
    found.page.set_default_timeout(60_000)
    found.page.on("console", lambda message: found.errors.append(message.text))
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.goto(path.as_uri())
    found.page.wait_for_selector("body[data-ready]")
    while not found.page.evaluate("document.getElementById('timeline').width > 500"):  # it is drawn a frame later
        found.page.wait_for_timeout(10)  # to wait for a function would have the page evaluate text, which it forbids
    yield found
    assert found.errors == []
    found.page.close()


def test_it_opens_and_loads_nothing(opened: Opened) -> None:
    assert [url.rpartition("/")[2] for url in opened.requests] == ["report.html"]
    assert opened.page.title() == opened.step.report().name
    summary = opened.page.inner_text("#summary")
    assert f"{len(opened.step.report().every)} collectives" in summary
    assert "gradient: sum over dp" in summary and opened.step.report().memory["cpu"].at in summary
    assert opened.page.evaluate("document.getElementById('timeline').width") > 500


def test_a_search_finds_a_parameter(opened: Opened) -> None:
    opened.page.fill("#search", "model.2.weight")
    rows = opened.page.locator("#rows .row").all_inner_texts()
    assert any("model.2.weight" in row for row in rows)
    opened.page.fill("#search", "no such value")
    assert opened.page.inner_text("#matches") == "0 values"


def test_a_click_on_a_collective_shows_its_reason(opened: Opened) -> None:
    scatter = next(one for one in opened.step.report().every if one.kind == "reduce_scatter")
    opened.page.click("tbody.group:has-text('reduce_scatter') button")
    opened.page.click(f"tr.one[data-node={scatter.node}]")
    assert scatter.why in opened.page.inner_text("#reason")
    details = opened.page.inner_text("#details")
    assert all(text in details for text in (scatter.node, *scatter.of[:2], "exposed", "Read by"))
    assert "4.00 ms, the median of 1 call" in details, "of the collective and of its wait"
    assert opened.page.locator("#rows .row.selected").count() == 1, "the graph shows it, too"
    opened.page.click("#details .close")
    assert not opened.page.locator("#details h2").count()


def test_a_bar_of_the_timeline_shows_what_runs(opened: Opened) -> None:
    timeline = opened.step.report().timeline
    assert timeline is not None
    longest = max(timeline.transfers, key=lambda each: each.seconds)
    width = opened.page.locator("#timeline").bounding_box()["width"] - LEFT - RIGHT
    middle = (longest.start + longest.end) / 2 / timeline.seconds
    opened.page.click("#timeline", position={"x": LEFT + middle * width, "y": FIRST_AXIS})
    assert opened.page.inner_text("#details h2") == longest.node


def test_equal_collectives_differ_and_curves_are_named(opened: Opened) -> None:
    page = opened.page.context.browser.new_page()
    scripts = Path(render.__code__.co_filename).parent / "script"
    for name in ("format", "timeline", "memory", "collectives"):
        page.add_script_tag(content=(scripts / f"{name}.js").read_text())
    made = page.evaluate(
        """() => {
            const [a, b] = [{ phase: "backward", of: ["w"] }, { phase: "backward", of: ["w"] }];
            const c = { phase: "forward", of: ["w"] }, none = { phase: "", of: [] };
            const to = { measureText: (text) => ({ width: text.length }) };
            const label = "peak: 2 MB in use at addmm at model.encoder.2.down";
            const ticks = [5e-4, 1.5e-3, 1e-3, 2e-2].map(tickText);
            return [...[a, b, c, none].map((one) => moment(one, [a, b, c, none])),
                withoutFirstNames(to, label, 50), withoutFirstNames(to, label, 42), withoutFirstNames(to, label, 20),
                ...ticks];
        }"""
    )
    assert made[:4] == ["(backward, 1 of 2)", "(backward, 2 of 2)", "(forward)", ""]
    cut = "peak: 2 MB in use at"
    assert made[4:7] == [f"{cut} addmm at model.encoder.2.down", f"{cut} addmm at …2.down", f"{cut[:19]}…"]
    assert made[7:] == ["500 µs", "1.5 ms", "1 ms", "20 ms"]
    page.close()
    names = opened.page.locator("#legend span").all_inner_texts()
    assert [name for name in names if name.startswith("memory")] == ["memory in use on cpu"]


def test_the_slider_changes_the_stage(opened: Opened) -> None:
    opened.page.focus("#stage")
    opened.page.keyboard.press("Home")
    assert opened.page.inner_text("#stage-name").startswith("00_capture")
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.inner_text("#stage-name").startswith("01_partition")
    opened.page.check("#only-changes")
    added = opened.page.locator("#rows .row.added").all_inner_texts()
    assert any("all_gather_into_tensor" in row for row in added)


def test_the_graph_folds_by_keys(opened: Opened) -> None:
    opened.page.click("#fold")
    folded = opened.page.locator("#rows .row").count()
    opened.page.focus("#rows")
    for key in ("Home", "ArrowDown", "ArrowDown", "ArrowRight"):
        opened.page.keyboard.press(key)
    assert opened.page.locator("#rows .row").count() > folded
    opened.page.keyboard.press("ArrowLeft")
    assert opened.page.locator("#rows .row").count() == folded


def test_the_graph_has_rows_at_once_when_it_is_folded_at_its_end(opened: Opened) -> None:
    scroll = (
        "const rows = document.getElementById('rows'); rows.scrollTop = 1e9; await new Promise(requestAnimationFrame);"
    )
    count = "document.getElementById('fold').click(); return rows.querySelectorAll('.row').length;"
    opened.page.click("#unfold")
    assert opened.page.evaluate(f"async () => {{ {scroll} {count} }}") > 0


def test_the_mesh_shows_each_ranks_part(opened: Opened) -> None:
    opened.page.fill("#search-state", "model.0.weight")
    opened.page.click("#inputs .row >> nth=0")
    assert opened.page.locator("#picture .part").all_inner_texts() == ["[0:3, :]", "[3:5, :]"]


def test_light_and_dark(opened: Opened) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        grounds.append(opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 246, 244)", "rgb(20, 23, 26)"]


def test_watched_values_are_charts(written: tuple[Any, Path, spmd.CompiledStep], tmp_path: Path) -> None:
    browser, _, step = written
    values = [{"w": {"norm": 10.0**-k}, "b": {"norm": 2.0 if k < 4 else math.nan}} for k in range(5)]
    lines = [{"call": k, "values": each} for k, each in enumerate(values)]
    files = {"report.json": json.dumps(step.report().to_dict()), WATCHED: "\n".join(map(json.dumps, lines))}
    path, errors = tmp_path / "watched.html", list[str]()
    path.write_text(render(files), encoding="utf-8")
    page = browser.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#watched .chart path").count() == 2
    assert page.inner_text("#watched .exposed") == "b is NaN in call 4."
    page.locator("#watched .names button:has-text('w')").focus()
    assert page.inner_text("#watched [role=status]") == "w: 0.0001 in call 4"
    assert page.locator("#watched path.chosen").count() == 1
    page.close()
    assert errors == []
