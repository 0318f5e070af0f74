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
