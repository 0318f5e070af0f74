"""Models of transformers start warm: in another process as they train, and not once anything of them is edited."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd import capture_call
from spmd.cache.library_code import variables_named

from ..harness import programs
from .catalog import ENTRIES
from .examine import Training

NAMES = ("Llama", "GPT2 classifier", "T5")
USUAL = NAMES[1:]  # that an entry of Llama's serves in the place of a trace is what all tests of edits below start from
PROGRAM = """
import sys
from spmd import capture_call
from tests.models.test_warm_starts import losses_of

traces, capture = [], capture_call.capture
capture_call.capture = lambda *given: (traces.append(""), capture(*given))[1]
for name in sys.argv[2:]:
    found = losses_of(name, sys.argv[1])
    print(name, len(traces) > 0, *(each.hex() for each in found), sep=",")
    traces.clear()
"""


def training_of(name: str) -> Training:
    """Training of one architecture of the zoo."""
    return Training(next(entry for entry in ENTRIES if entry.name == name))


def losses_of(name: str, cache: str, steps: int = 3) -> list[float]:
    """The losses of the first steps, compiled."""
    training = training_of(name)
    torch.manual_seed(0)
    state, step = training.build(), spmd.compile(Training.step, cache=cache)
    return [step(*state, *training.part(0, k)).item() for k in range(steps)]


@pytest.mark.slow
@pytest.mark.processes
def test_another_process_traces_nothing_and_computes_the_same_bits(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    names = NAMES if request.config.getoption("--exhaustive") else USUAL
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    cold, warm = (
        [line.split(",") for line in programs.run([file, tmp_path / "cache", *names]).stdout.splitlines()] for _ in "12"
    )
    assert [line[0] for line in cold] == [*names] and all(line[1] == "True" for line in cold)
    assert warm == [[name, "False", *losses] for name, _, *losses in cold]


class TracedError(Exception):
    """Raised in place of a trace."""


def refuse(*_: Any) -> Any:
    raise TracedError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The entry of a step of Llama's."""
    import torch.distributed as dist

    folder = tmp_path_factory.mktemp("entries") / "cache"
    losses_of("Llama", str(folder), 1)
    dist.destroy_process_group()
    yield folder


def other_rotation(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return q * 0.5, k


def other_forward(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)))


def other_loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    return logits.float().logsumexp(-1).mean()


def set_module_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", other_rotation)


def set_method(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", other_forward)


def register_attention(model: Any, patch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        return query.transpose(1, 2), None

    patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attend)


EDITS: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "a function of a module": set_module_function,
    "a method of a class": set_method,
    "a registry": register_attention,
    "attention": lambda model, _: model.set_attn_implementation("eager"),
    "a value of the configuration": lambda model, _: setattr(model.config, "output_hidden_states", True),
    "checkpointing": lambda model, _: model.gradient_checkpointing_enable(),
    "the loss": lambda model, _: setattr(model, "loss_function", other_loss),
    "an activation": lambda model, _: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()),
    "a number of a layer": lambda model, _: setattr(model.model.layers[0].self_attn, "scaling", 0.125),
    "a number of a norm": lambda model, _: setattr(model.model.norm, "variance_epsilon", 0.5),
    "a forward of a layer's own": lambda model, _: setattr(model.model.layers[0].mlp, "forward", torch.tanh),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("edit", [None, *EDITS])
def test_what_was_edited_is_traced(cache: Path, edit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_call, "capture", refuse)
    training = training_of("Llama")
    model, optimizer = training.build()
    step = spmd.compile(Training.step, cache=cache)
    if edit is None:
        step(model, optimizer, *training.part(0, 0))
        return
    EDITS[edit](model, monkeypatch)
    with pytest.raises(TracedError):
        step(model, optimizer, *training.part(0, 0))


@pytest.mark.usefixtures("alone")
def test_the_variables_that_its_files_name_are_compared(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = importlib.import_module("transformers.utils.import_utils").is_torch_available.__wrapped__.__code__
    assert ["USE_TORCH_XLA", None] in variables_named([code])
    monkeypatch.setattr(capture_call, "capture", refuse)
    training = training_of("Llama")
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    with pytest.raises(TracedError):
        spmd.compile(Training.step, cache=cache)(*training.build(), *training.part(0, 0))
