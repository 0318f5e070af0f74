"""Models and steps that pipelines of others get wrong or refuse, by their reports, beside the plain step.

The tests of ``test_numbers.py``, and some more here, are what these reports describe:

torchtitan#2972, #4194   the loss is divided by a count after backward   two_stages[masked]
torchtitan#2206          parts have unequal counts                       other_meshes[fully_shard]
torchtitan#596, pytorch#162638   a stage clips by a norm of its own      two_stages[tied], an_encoder_and_a_decoder
torchtitan#4312, pytorch#127964   later stages read earlier ones         two_stages[encoder-decoder], two_stages[unet]
torchtitan#431, pytorch#159942    lengths differ from call to call       other_meshes[lengths]
pytorch#126600           rows do not divide by the micro-batches         two_stages[rows], rows_are_returned
pytorch#128115           later stages read arguments (labels)            two_stages[encoder-decoder], of_transformers
pytorch#184361, accelerate#3151   models of transformers, unmodified     of_transformers, and of test_bundles.py
Megatron-LM#299          the head is the embedding                       two_stages[tied], three_stages_read
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd

from .trainings import TOKENS, WIDTH, EncoderDecoder, by_groups, metrics, translate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


def pairs(rows: int = 8) -> tuple[Tensor, ...]:
    return tuple(torch.randint(TOKENS, (rows, 5)) for _ in range(2))


def verified(step: Any, *arguments: Any, mesh: dict[str, int], steps: int = 2, passes: Any = None, **mode: Any) -> None:
    options: dict[str, Any] = {"axes": {"stages": "pp"}, "micro_batches": 2} | mode
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**options), passes=passes)
    verdict = spmd.verify(compiled, *arguments, world=torch.Size(mesh.values()).numel(), mesh=mesh, steps=steps)
    assert verdict, verdict


@pytest.mark.exhaustive  # in every run it has two stages, in test_numbers.py
@pytest.mark.parametrize(("stages", "schedule"), [(3, "zb-h1"), (4, "1f1b")])
def test_an_encoder_and_a_decoder(stages: int, schedule: str) -> None:
    """torchtitan#2972 (scale), #596 and pytorch#162638 (norm), #4312 (skips), Megatron-LM#299 (tied)."""
    torch.manual_seed(0)
    model = EncoderDecoder().double()
    starts = ["encoder.1", "decoder.0", "decoder.1"][-(stages - 1) :]
    verified(translate, model, by_groups(model), *pairs(), mesh={"pp": stages}, schedule=schedule, stages=starts)


class Tied(nn.Module):
    """Two layers between an embedding and itself as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.a, self.b, self.head.weight = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(self.tokens(x))))))


class Often(Tied):
    """The embedding is read in the middle, too."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(TOKENS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(self.tokens(x)))))
        return self.head(torch.tanh(self.back(F.linear(x, self.tokens.weight))))


def test_a_weight_that_three_stages_read() -> None:
    torch.manual_seed(0)
    model = Often().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verified(translate_one, model, optimizer, *pairs(), mesh={"pp": 3}, stages=["b", "head"], steps=1)


def test_a_shared_weight_of_which_ranks_update_parts_under_a_scaler() -> None:
    """What stages exchange for it has been read before: the program that updates it has no such input."""
    torch.manual_seed(0)
    model, scaler = Tied().double(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mode = {"axes": {"stages": "pp", "batch": "dp"}, "shard_optimizer": True, "stages": ["b"]}
    verified(translate_scaled, model, optimizer, scaler, *pairs(), mesh={"pp": 2, "dp": 2}, steps=1, **mode)


def translate_scaled(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).transpose(1, 2), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def translate_one(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss has a term of the parameters of all stages, each of which counts once."""
    loss = F.cross_entropy(model(x).transpose(1, 2), y) + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def criticize(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).mean() + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_a_gradient_that_no_row_decides_is_sent() -> None:
    """The last stage has the weight that the gradient of a mean follows from."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verified(criticize, model, optimizer, torch.randn(8, 4).double(), mesh={"pp": 2}, stages=["2"], passes=(), steps=1)


def test_rows_are_returned() -> None:
    """pytorch#126600: 5 rows of a rank, in 5 micro-batches. All ranks get all rows that they pass."""
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = {"axes": {"stages": "pp", "batch": "dp"}, "micro_batches": 5, "stages": ["b"], "schedule": "gpipe"}
    verified(metrics, model, optimizer, *pairs(10), mesh={"pp": 2, "dp": 2}, passes=(), steps=1, **mode)


def test_stages_beside_rows_and_tensors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()
    split = {"*.0.*": {"tp": Shard(0)}, "*.2.weight": {"tp": Shard(1)}, "*.3.*": {"tp": Shard(0)}}
    axes = {"stages": "pp", "batch": "dp", "tensor": "tp", "shard": "dp"}
    mode = {"axes": axes, "parallel_style": "fully_shard", "params": split, "stages": ["3"]}
    x, y = (torch.randn(8, 4).double() for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verified(regress, model, optimizer, x, y, mesh={"pp": 2, "dp": 2, "tp": 2}, passes=(), steps=1, **mode)


def test_gradients_are_clipped_where_parts_have_one_element_or_two() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    axes = {"stages": "pp", "batch": "dp", "shard": "dp"}
    x, y = (torch.randn(8, 5).double() for _ in range(2))
    mode = {"axes": axes, "parallel_style": "fully_shard", "stages": ["2"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verified(regress, model, optimizer, x, y, mesh={"pp": 2, "dp": 2}, steps=1, **mode)


def regress(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm
