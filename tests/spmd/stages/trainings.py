"""Trainings that pipelines run, as cases of the oracle: models with skips, ties, two optimizers, and their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.oracle import Case, random_generator

TOKENS, WIDTH, LENGTH = 13, 8, 6


class Layer(nn.Module):
    """Attention and two linear layers, each with a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Dense(nn.Module):
    """One linear layer with a residual, where a test is not about what a layer computes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class Gpt(nn.Module):
    """``tied``: the head is the embedding."""

    def __init__(
        self, layers: int = 2, tied: bool = False, dropout: float = 0.0, layer: type[nn.Module] = Layer
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(layer(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def rotary(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for each position, (length, WIDTH)."""
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


def masked(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over tokens that count, divided by their number before backward; clipped by the norm of all stages."""
    counts = y > 3
    losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
    loss = (losses * counts).sum() / counts.sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def metrics(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Gradients stay for the next call to clear; metrics and rows of the batch besides the loss."""
    optimizer.zero_grad()
    logits = model(x)
    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)
    each.mean().backward()
    optimizer.step()
    right = logits.argmax(-1) == y
    return {"logits": logits.detach(), "each": each.detach(), "right": right.sum(), "where": right, "rows": len(x)}


def translate(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(x, y).transpose(1, 2), torch.where(y > 2, y, -100))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


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


def of_transformers(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def of_decoder(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss is the user's: that of transformers is computed in fp32."""
    logits = model(input_ids=batch["input_ids"]).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def by_groups(model: nn.Module) -> torch.optim.Optimizer:
    """No weight decay for vectors, as everybody has it; the rates follow a scheduler."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    optimizer.rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)  # type: ignore[attr-defined]
    return optimizer


def with_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def without_state(model: nn.Module) -> torch.optim.Optimizer:
    """All calls of a step run one program: of an optimizer with state the first call has another."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def unet() -> tuple[Any, ...]:
    model = UNet().double()
    early, late = list(model.parameters())[:4], list(model.parameters())[4:]
    optimizers = [torch.optim.SGD(early, lr=0.1, momentum=0.9), torch.optim.AdamW(late, lr=0.01)]
    return model, optimizers, torch.amp.GradScaler("cpu", init_scale=4.0)


def hugging_face(name: str) -> Callable[[], tuple[Any, ...]]:
    def build() -> tuple[Any, ...]:
        from tests.models.catalog import ENTRIES

        model = next(each for each in ENTRIES if each.name == name).build().double().eval()
        return model, torch.optim.AdamW(model.parameters(), lr=0.001)

    return build


def _with(model: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Any]) -> Callable[[], tuple[Any, ...]]:
    def build() -> tuple[Any, ...]:
        made = model().double()
        return made, optimizer(made)

    return build


KINDS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], int]] = {  # the step, objects, rows of a part
    "masked": (masked, _with(Gpt, without_state), 8),
    "tied": (masked, _with(lambda: Gpt(tied=True), by_groups), 8),
    "dense": (masked, _with(lambda: Gpt(layer=Dense), without_state), 8),
    "dense, tied": (masked, _with(lambda: Gpt(tied=True, layer=Dense), by_groups), 8),
    "deep": (masked, _with(lambda: Gpt(4, tied=True), by_groups), 8),  # for four stages
    "rows": (metrics, _with(lambda: Gpt(4, layer=Dense), without_state), 18),  # 4 micro-batches become 6
    "encoder-decoder": (translate, _with(EncoderDecoder, without_state), 8),
    "unet": (two_optimizers, unet, 8),
    "Llama": (of_decoder, hugging_face("Llama"), 4),
    "T5": (of_transformers, hugging_face("T5"), 4),
}
HUGGING_FACE = ("Llama", "T5")


@dataclass(frozen=True)
class Training(Case):
    """One of ``KINDS``. The rows of one part of the batch are equal on all stages; ``rows``: others than it has."""

    kind: str
    rows: int = 0
    lengths: tuple[int, ...] = (LENGTH,)  # of the tokens, in turn

    @property
    def rtol(self) -> float:  # type: ignore[override]
        """Sums of transformers run over more terms."""
        return 1e-7 if self.kind in HUGGING_FACE else 1e-9

    def build(self) -> tuple[Any, ...]:
        return KINDS[self.kind][1]()

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        draw, rows = random_generator(rank, step), self.rows or KINDS[self.kind][2]
        if self.step is two_optimizers:
            return tuple(torch.randn(rows, 1, 4, 4, generator=draw, dtype=torch.float64) for _ in range(2))
        if self.kind in HUGGING_FACE:
            from tests.models.catalog import ENTRIES

            batch = next(each for each in ENTRIES if each.name == self.kind).batch(draw)
            return ({name: torch.cat([value, value])[:8] for name, value in batch.items()},)  # two for each micro-batch
        x, y = (torch.randint(TOKENS, (rows, self.lengths[step % len(self.lengths)]), generator=draw) for _ in range(2))
        y[1 + rank : rows // 2] = 0  # tokens that do not count, unequally many in each micro-batch and part
        return x, y

    @property
    def step(self) -> Any:  # type: ignore[override]
        return KINDS[self.kind][0]

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        rates = getattr(objects[1], "rates", None)
        if rates is not None:
            rates.step()
