"""What a user sees of an error: their frames and their line, once, and no log of torch's."""

from __future__ import annotations

import re
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import spmd
from tests.harness.fake import fake_world


def train(model: nn.Module, x: Tensor) -> Tensor:
    loss = forward(model, x).sum()
    loss.backward()
    return loss


def forward(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


def formats(model: nn.Module, x: Tensor) -> str:
    return f"{model(x).sum().item():.4f}"


def logs(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    LIBRARY["log"](loss)
    return loss


def repeats(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss * int(loss)


def weighs_classes(model: nn.Module, x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels, weight=weight)


LIBRARY: dict[str, Any] = {"__name__": "board.log"}
exec(compile("def log(value): return float(value)", "/site-packages/board/log.py", "exec"), LIBRARY)
WRONG = nn.Sequential(nn.Linear(4, 5), nn.Linear(6, 3))  # 5 features for 6


def shown(step: Any, model: nn.Module) -> str:
    """The traceback of a call of the compiled step."""
    with fake_world(2), pytest.raises(Exception) as raised:
        spmd.compile(step)(model, torch.ones(2, 4))
    return "".join(traceback.format_exception(raised.value))


def frames(text: str) -> list[str]:
    return re.findall(r'File ".*/(\w+\.py)", line \d+, in (\w+)', text)


def test_an_error_of_the_user_s_own_shows_the_user_s_frames(capfd: pytest.CaptureFixture[str]) -> None:
    text = shown(train, WRONG)
    assert frames(text) == [("test_tracebacks.py", where) for where in ("shown", "train", "forward")]
    assert text.count("must have same reduction dim") == 1 and "in model.1: result: Tensor = model(x)" in text
    assert capfd.readouterr().err == ""
    assert "x: [2, 4] on this rank, [4, 4] in the step" in text and "inputs=" not in text


def test_an_error_about_a_table_that_was_taken_for_rows_says_how_to_name_it() -> None:
    with fake_world(2), pytest.raises(AssertionError) as raised:
        model, x, labels = nn.Linear(4, 3), torch.ones(3, 4), torch.arange(3)
        spmd.compile(weighs_classes)(model, x, labels, torch.ones(3))
    *_, sizes = raised.value.__notes__
    assert "weight: [3] on this rank, [6] in the step" in sizes and "'weight': Replicate()" in sizes


def test_a_value_that_a_library_asks_for_is_named_at_the_user_s_line_first() -> None:
    text = shown(logs, nn.Linear(4, 3))
    assert frames(text)[-2:] == [("test_tracebacks.py", "logs"), ("log.py", "log")]
    first, second = text.splitlines()[-2:]
    assert re.search(r'test_tracebacks.py:\d+: LIBRARY\["log"\]\(loss\)$', first)
    assert second.endswith("called /site-packages/board/log.py:1")
    assert "Return the tensor and look at it outside of the step" in text


def test_no_text_of_torch_s_stands_above_an_explanation() -> None:
    text = shown(repeats, nn.Linear(4, 3))
    assert "select with torch.where" in text and frames(text)[-1] == ("test_tracebacks.py", "repeats")
    assert not any(words in text for words in ("data-dependent", "direct cause", "Refused"))


def test_all_frames_and_torch_s_log_are_there_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_FULL_TRACEBACK", "1")
    files = {file for file, _ in frames(shown(train, WRONG))}
    assert {"make_program.py", "trace.py", "proxy_tensor.py"} <= files


def test_an_error_of_ours_ends_at_the_user_s_line() -> None:
    text = shown(formats, nn.Linear(4, 3))
    assert "it formats the value of a tensor as text, which is not known while tracing" in text
    assert {file for file, _ in frames(text)} == {"test_tracebacks.py"}


def test_a_cause_is_kept() -> None:
    def fails(model: nn.Module, x: Tensor) -> Tensor:
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise KeyError("the effect") from error

    text = shown(fails, nn.Linear(4, 3))
    assert "ValueError: the cause" in text and "KeyError: 'the effect'" in text


def test_a_model_of_torch_s_fsdp_is_refused_with_the_counterpart() -> None:
    with fake_world(2):
        model = fully_shard(nn.Linear(4, 3))
        with pytest.raises(spmd.CaptureError, match=r"sharded by torch's FSDP, .* spmd\.fully_shard\(module\)"):
            spmd.compile(train)(model, torch.ones(2, 4))


def test_a_compiled_submodule_brings_no_warning_of_hooks_that_the_user_never_set() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(4, 5), backend="eager"), nn.Linear(5, 3))
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spmd.compile(train)(model, torch.ones(2, 4)).shape == ()
