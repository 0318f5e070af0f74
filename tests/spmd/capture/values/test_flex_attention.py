"""``flex_attention``: its functions on split batches, heads and sequences, beside the same attention written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import spmd
from passes import CaptureError
from tests.harness.fake import fake_world

LENGTH, WIDTH, HEADS = 8, 16, 4


def attention(q: Tensor, k: Tensor, v: Tensor, mask_mod: Any, score_mod: Any) -> Tensor:
    """By ``flex_attention`` in a compiled step; in a plain one written out, since torch has no backward on the CPU."""
    if torch.compiler.is_compiling():
        mask = create_block_mask(mask_mod, len(q), None, LENGTH, LENGTH, device="cpu")
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)  # type: ignore[return-value]
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    positions = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    scores, seen = score_mod(scores, *positions) if score_mod else scores, mask_mod(*positions)
    weights = torch.where(seen, scores.exp(), 0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v


class Layer(nn.Module):
    def __init__(self, kind: str, kv: int = HEADS) -> None:
        super().__init__()
        self.kind, self.out = kind, nn.Linear(WIDTH, WIDTH)
        self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * kv * WIDTH // HEADS)
        self.table = nn.Parameter(torch.randn(HEADS, 2 * LENGTH))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query(x), *self.keys(x).chunk(2, -1))
        )
        mask_mod, score_mod = {
            "documents": (lambda b, h, i, j: (i >= j) & (documents[b, i] == documents[b, j]), None),
            "windows": (lambda b, h, i, j: (i >= j) & (i - j <= h) & (i > 1), None),  # the first rows see nothing
            "capped": (lambda b, h, i, j: i >= j, lambda s, b, h, i, j: 2 * (s / 2).tanh()),
            "table": (
                lambda b, h, i, j: documents[b, i] == documents[b, j],
                lambda s, b, h, i, j: s + self.table[h, i - j + LENGTH] * (1 + self.table[h, 0]),
            ),
        }[self.kind]
        return x + self.out(attention(q, k, v, mask_mod, score_mod).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind, kv=2 if kind != "windows" else HEADS) for kind in kinds)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, documents)
        return x


def train(model: nn.Module, optimizer: Any, x: Tensor, documents: Tensor) -> Tensor:
    loss = F.mse_loss(model(x, documents), x.roll(1, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(*kinds: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Net(*kinds).double()
    documents = torch.randint(0, 2, (4, LENGTH)).cumsum(1)
    x = torch.randn(4, LENGTH, WIDTH, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), x, documents


needs_log_sum_exps = pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="its fake kernel of attention in float64 gives log-sum-exps in float32"
)


@pytest.mark.slow
@needs_log_sum_exps
@pytest.mark.parametrize("axis, mode, kinds", [
    ("cp", {"axes": {"sequence": "cp"}}, ("windows", "table")),
    ("tp", {"axes": {"tensor": "tp"}}, ("table",)),
    ("dp", {"parallel_style": "fully_shard"}, ("documents", "capped")),
])  # fmt: skip
def test_the_numbers_are_those_of_attention_written_out(axis: str, mode: Any, kinds: Any) -> None:
    step = spmd.compile(train, parallel_mode=spmd.DataParallel(**mode))
    assert spmd.verify(step, *arguments(*kinds), mesh={axis: 2}, world=2, steps=2)


@pytest.mark.slow
def test_a_rank_makes_the_mask_of_its_own_rows_and_communicates_none() -> None:
    with fake_world(2, 1):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, axes={"sequence": "cp"}))
        step(*arguments("windows"))
    values = [(node, node.meta.get("val")) for node in step.program.graph.nodes]
    masks = [x.shape for _, x in values if isinstance(x, Tensor) and x.dtype == torch.bool and x.ndim > 1]
    assert masks
    assert all(shape[-2:].numel() <= LENGTH * LENGTH // 2 for shape in masks)
    assert not any("bool" in t.dtype for t in step.report().traffic)


# Masks from outside

WINDOW = 3


def mask_of(mask_mod: Any) -> BlockMask:
    return create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu")


def infer(q: Tensor, mask: BlockMask) -> Any:
    return flex_attention(q, q, q, block_mask=mask)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_mask_that_changed_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    q, step = torch.randn(2, HEADS, LENGTH, 4, dtype=torch.float64), spmd.compile(infer)
    causal, windows = mask_of(lambda b, h, i, j: i >= j), mask_of(lambda b, h, i, j: (i - j).abs() < WINDOW)

    def check(mask: BlockMask, programs: int) -> None:
        torch.testing.assert_close(step(q, mask), infer(q, mask), rtol=0, atol=1e-12)
        assert len(step.programs) == programs

    check(causal, 1)
    check(windows, 2)
    check(causal, 2)
    monkeypatch.setitem(globals(), "WINDOW", 5)
    check(windows, 3)
    causal.mask_mod = lambda b, h, i, j: i <= j
    check(causal, 4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mask_mod, message", [
    (None, "a BlockMask that lists blocks and has no mask_mod"),
    (lambda b, h, i, j: i >= 0, "a BlockMask whose blocks hide keys that its mask_mod shows"),
])  # fmt: skip
def test_masks_of_blocks_that_are_refused(mask_mod: Any, message: str) -> None:
    """The second of two blocks of keys is not listed."""
    counts, blocks = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    size = (LENGTH, LENGTH // 2)
    mask = BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(LENGTH, LENGTH))
    with pytest.raises(CaptureError, match=message) as raised:
        spmd.compile(infer)(torch.randn(1, HEADS, LENGTH, 4), mask)
    assert "test_flex_attention.py" in str(raised.value)
