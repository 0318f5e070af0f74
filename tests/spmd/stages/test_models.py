"""Models and steps that pipelines of others get wrong or refuse, by their reports, beside the plain step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from tests.models.catalog import ENTRIES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]
TOKENS, WIDTH = 11, 8


def rotary(length: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] / 10 ** (torch.arange(WIDTH // 2) / WIDTH)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


class Block(nn.Module):
    """Attention to itself and to what others have computed, with rotary positions that the model computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor], memory: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        cos, sin = positions
        q, k = (each * cos + each.roll(WIDTH // 2, -1) * sin for each in (q, k))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x if memory is None else x + F.scaled_dot_product_attention(x, self.memory(memory), memory)


class EncoderDecoder(nn.Module):
    """The embedding is read by encoder, decoder and head (tied); all decoder blocks read what the encoder computes.

    Each block of the encoder also reads the mean of all blocks before it, as attention residuals do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.encoder, self.decoder = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        positions = rotary(source.shape[1])
        x, past = self.tokens(source), []
        for block in self.encoder:
            past.append(x)
            x = block(sum(past[1:], past[0]) / len(past), positions)
        y = self.tokens(target)
        for block in self.decoder:
            y = block(y, positions, x)
        return F.linear(y, self.tokens.weight)


def translate(model: nn.Module, optimizer: Any, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over tokens that count, divided by their number before backward; clipped by the norm of all stages."""
    counts = target > 2
    losses = F.cross_entropy(model(source, target).transpose(1, 2), target, reduction="none")
    loss = (losses * counts).sum() / counts.sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def pairs(rows: int = 8) -> tuple[Tensor, ...]:
    return tuple(torch.randint(TOKENS, (rows, 5)) for _ in range(2))


def by_groups(model: nn.Module) -> torch.optim.Optimizer:
    """No weight decay for vectors, as everybody has it."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


def verified(step: Any, *arguments: Any, mesh: dict[str, int], steps: int = 2, **mode: Any) -> None:
    options: dict[str, Any] = {"axes": {"stages": "pp"}, "micro_batches": 2} | mode
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**options))
    verdict = spmd.verify(compiled, *arguments, world=torch.Size(mesh.values()).numel(), mesh=mesh, steps=steps)
    assert verdict, verdict


@pytest.mark.parametrize(("stages", "schedule"), [(3, "zb-h1"), pytest.param(4, "1f1b", marks=pytest.mark.exhaustive)])
def test_an_encoder_and_a_decoder(stages: int, schedule: str) -> None:
    """torchtitan#2972 (scale), #596 and pytorch#162638 (norm), #4312 (skips), Megatron-LM#299 (tied)."""
    torch.manual_seed(0)
    model = EncoderDecoder().double()
    starts = ["encoder.1", "decoder.0", "decoder.1"][-(stages - 1) :]
    verified(translate, model, by_groups(model), *pairs(), mesh={"pp": stages}, schedule=schedule, stages=starts)


class UNet(nn.Module):
    """Two levels down and up again; what goes up is joined with what went down."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.first(x))
        deep = F.relu(self.norm(self.down(wide)))
        return self.last(torch.cat([self.up(deep), wide], 1))


def two_optimizers(
    model: nn.Module, optimizers: list[Any], scaler: torch.amp.GradScaler, x: Tensor, y: Tensor
) -> Tensor:
    loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    for each in optimizers:
        scaler.unscale_(each)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for each in optimizers:
        scaler.step(each)
        each.zero_grad()
    scaler.update()
    return loss


def test_a_unet_with_two_optimizers_and_a_scaler() -> None:
    torch.manual_seed(0)
    model = UNet().double()
    early, late = list(model.parameters())[:4], list(model.parameters())[4:]
    optimizers = [torch.optim.SGD(early, lr=0.1, momentum=0.9), torch.optim.AdamW(late, lr=0.01)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    images = [torch.randn(6, 1, 4, 4).double() for _ in range(2)]
    verified(two_optimizers, model, optimizers, scaler, *images, mesh={"pp": 2}, stages=["up"])


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    verified(translate_one, model, optimizer, *pairs(), mesh={"pp": 3}, stages=["b", "head"])


def translate_one(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).transpose(1, 2), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def rows(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    logits = model(x)
    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)
    each.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"logits": logits.detach(), "each": each.detach(), "right": logits.argmax(-1) == y}


@pytest.mark.parametrize(
    ("mesh", "axes", "micro_batches"),
    [({"pp": 2}, {"stages": "pp"}, 4), ({"pp": 2, "dp": 2}, {"stages": "pp", "batch": "dp"}, 5)],
)
def test_rows_are_returned(mesh: dict[str, int], axes: dict[str, str], micro_batches: int) -> None:
    """pytorch#126600: 10 rows, which 4 micro-batches do not divide, become 5. All ranks get all rows that they pass."""
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mode = {"axes": axes, "micro_batches": micro_batches, "stages": ["b"], "schedule": "gpipe"}
    verified(rows, model, optimizer, *pairs(10), mesh=mesh, **mode)


@pytest.mark.exhaustive
def test_stages_beside_rows_and_tensors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()
    split = {"*.0.*": {"tp": Shard(0)}, "*.2.weight": {"tp": Shard(1)}, "*.3.*": {"tp": Shard(0)}}
    axes = {"stages": "pp", "batch": "dp", "tensor": "tp", "shard": "dp"}
    mode = {"axes": axes, "parallel_style": "fully_shard", "params": split, "stages": ["3"]}
    x, y = (torch.randn(8, 4).double() for _ in range(2))
    verified(regress, model, torch.optim.AdamW(model.parameters()), x, y, mesh={"pp": 2, "dp": 2, "tp": 2}, **mode)


def regress(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def of_transformers(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "schedule"), [("Llama", "1f1b"), ("T5", "zb-h1")])
def test_models_of_transformers_as_they_are(name: str, schedule: str) -> None:
    """pytorch#184361: positions are buffers that no stage owns, and T5 reads its encoder in all blocks."""
    torch.manual_seed(0)
    entry = next(each for each in ENTRIES if each.name == name)
    model, batch = entry.build(), entry.batch(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    verified(of_transformers, model, optimizer, batch, mesh={"pp": 2}, schedule=schedule)
