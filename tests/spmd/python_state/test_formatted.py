"""Text with values in it that a step prints or logs: each call shows its own, as eager does."""

# ruff: noqa: UP031, UP032 - these are the ways in which people write such text

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd

LOG = logging.getLogger("train")


class Trainer:
    """Has a logger."""

    def __init__(self) -> None:
        self.log = LOG


TRAINER = Trainer()


def shows(loss: Tensor, x: Tensor) -> None:
    value = loss.item()
    print(f"loss {value:.4f} {loss:>12.3f} {loss.detach()!r}")
    print("loss is {}, {:.2f} of {}".format(value, loss, len(x)), str(value), f"{loss * 2}", sep=" | ", end=";\n")
    print("loss %s of %d" % (value, len(x)), "%s" % value, "a" + f"{value}" + "b")
    print([f"{value:.3f}", {"loss": f"{loss:.1f}"}], f"{x.shape} {value}", f"{(loss > 3).item()}")
    LOG.info(f"loss {value:.3f}")
    TRAINER.log.warning("loss {:.2f}".format(value))


def make_step(show: Callable[[Tensor, Tensor], None]) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        show(loss, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def calls(step: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scale in (1, 2, math.nan):
        step(model, optimizer, scale * torch.ones(4, 3).double())


def shows_rounded(loss: Tensor, x: Tensor) -> None:
    print(f"loss {loss.item():.4f}")
    print(f"{loss:>12.3f} of {len(x)}", {"loss": f"{loss:.3f}"})
    print("%s" % len(x), "{:.3f}".format(loss))
    print(f"{loss:.1e}")
    LOG.info(f"loss {loss.item():.3f}")
    LOG.warning(f"{loss:.3f}")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "show, options",
    [(shows, {}), (shows_rounded, {"parallel_mode": spmd.DataParallel(micro_batches=2)})],
    ids=["plain", "in parts"],
)
def test_each_call_shows_its_values(
    show: Callable[[Tensor, Tensor], None],
    options: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    shown = []
    for step in (make_step(show), spmd.compile(**options)(make_step(show))):
        calls(step)
        logged = [record.getMessage() for record in caplog.records if record.name == "train"]
        shown.append((capsys.readouterr().out.splitlines(), logged))
        caplog.clear()
    assert len(shown[0][0]) == 12 and len(shown[0][1]) == 6
    assert shown[0] == shown[1]


def kept_for_later(loss: Tensor, x: Tensor) -> None:
    text = f"{loss:.3f}"
    print(text)


def padded(loss: Tensor, x: Tensor) -> None:
    print(f"{loss:.3f}".rjust(12))


def padded_by_a_width(loss: Tensor, x: Tensor) -> None:
    print("%12s" % loss.item())


def padded_after_it_is_text(loss: Tensor, x: Tensor) -> None:
    print(f"{loss!r:>40}")


def padded_by_format(loss: Tensor, x: Tensor) -> None:
    print("{!s:>40}".format(loss))


def counted(loss: Tensor, x: Tensor) -> None:
    print(len(f"{loss:.3f}"))


def printed_by_a_function(loss: Tensor, x: Tensor) -> None:
    def print(text: str) -> None:
        assert len(text) < 7

    print(f"{loss:.3f}")


def cut(loss: Tensor, x: Tensor) -> None:
    print(f"loss {loss:.3f}"[:6])


LOST = (kept_for_later, padded, padded_by_a_width, padded_after_it_is_text, padded_by_format, counted)
LOST += (printed_by_a_function,)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("show", LOST)
def test_text_that_is_not_shown_at_once_is_refused(show: Callable[[Tensor, Tensor], None]) -> None:
    with pytest.raises(spmd.CaptureError, match=r"(?s)formats the value of a tensor.*test_formatted\.py"):
        calls(spmd.compile(make_step(show)))


@pytest.mark.usefixtures("alone")
def test_a_part_of_a_text_is_refused() -> None:
    with pytest.raises(spmd.CaptureError, match="a part is shown of a text with the value of a tensor"):
        calls(spmd.compile(make_step(cut)))


def ends(loss: Tensor, x: Tensor) -> None:
    if not math.isfinite(loss.item()):
        print(f"Loss is {loss.item()}, stopping", {"loss": loss, "rows": len(x)})
        sys.exit(1)


@pytest.mark.usefixtures("alone")
def test_a_step_that_ends_the_process_has_printed_before(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        calls(spmd.compile(make_step(ends)))
    assert capsys.readouterr().out == "Loss is (a value), stopping {'loss': '(a value)', 'rows': 4}\n"


@pytest.mark.usefixtures("alone")
def test_the_plain_step_shows_the_same_to_verify() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(8, 3).double()
    step = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(make_step(shows))
    verdict = spmd.verify(step, model, torch.optim.SGD(model.parameters(), 0.1), x, world=2)
    assert verdict, verdict
