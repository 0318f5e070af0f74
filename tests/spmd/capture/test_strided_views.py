"""``as_strided`` becomes views that are the same elements, and steps that use it compute the plain step's numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from spmd.capture.strided_views import strided_view
from spmd.capture.unsupported import Refused
from tests.harness.cases import MLP
from tests.harness.oracle import assert_agrees, random_generator
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts, nodes_of, regression

aten = torch.ops.aten


def _bases() -> Iterator[Tensor]:
    """Tensors whose elements lie in all kinds of order, at an offset, with gaps, or several times."""
    x = torch.arange(3 + 4 * 6 * 5, dtype=torch.float64)[3:].view(4, 6, 5)
    yield from (x, x[1:], x[:, 1:4], x[..., ::2], x.permute(2, 0, 1), x.transpose(0, 1)[2:], x[0, :5, :5].t())
    yield from (x.view(-1), x.view(-1)[4:19], x.view(24, 5), x[:, :1], x[0, 0, 0], x[:1, :, :1].expand(3, 6, 5))
    yield from (x.view(2, 2, 1, 30), torch.zeros(0, 3), x.view(-1).unfold(0, 4, 3))


def _geometries(x: Tensor, draw: random.Random) -> Iterator[tuple[list[int], list[int], int]]:
    """Sizes, strides and an offset: those of random views of ``x``, and random ones."""
    for _ in range(40):
        view = x
        for _ in range(draw.randint(1, 3)):
            view = _some_view(view, draw)
        yield list(view.shape), list(view.stride()), view.storage_offset()
    for _ in range(40):
        ndim = draw.randint(0, 3)
        size, stride = ([draw.randint(low, 6) for _ in range(ndim)] for low in (1, 0))
        yield size, stride, draw.randint(0, 40)


def _some_view(x: Tensor, draw: random.Random) -> Tensor:
    if x.ndim == 0 or not x.numel():
        return x.unsqueeze(0)
    d = draw.randrange(x.ndim)
    n = x.shape[d]
    start = draw.randrange(n)
    kinds = [
        lambda: x.narrow(d, start, draw.randint(1, n - start)),
        lambda: aten.slice.Tensor(x, d, start, n, draw.randint(1, 3)),
        lambda: x.select(d, start),
        lambda: x.transpose(d, draw.randrange(x.ndim)),
        lambda: x.unsqueeze(d).expand(*x.shape[:d], 2, *x.shape[d:]),
        lambda: x.diagonal(0, 0, 1) if x.ndim > 1 else x,
        lambda: x.unfold(d, draw.randint(1, n), draw.randint(1, 3)),
        lambda: x.flatten(0, 1) if x.ndim > 1 and x.stride(0) == x.shape[1] * x.stride(1) else x,
    ]
    return draw.choice(kinds)()


DENSE = (0, 4, 7, 9, 13)


@pytest.mark.parametrize("index", range(len(list(_bases()))))
def test_views_are_the_elements_that_strides_name(index: int) -> None:
    x, draw = list(_bases())[index], random.Random(index)
    refused = []
    for size, stride, offset in _geometries(x, draw):
        try:
            view = strided_view(x, size, stride, offset)
        except Refused:
            refused.append((size, stride, offset))
            continue
        expected = x.as_strided(size, stride, offset)
        assert view.shape == expected.shape and view.equal(expected)
        assert not view.numel() or view.data_ptr() == expected.data_ptr()
    assert len(refused) < 10 or index not in DENSE, "views of a tensor without gaps are nearly all found"


def _terms(h: Tensor, y: Tensor, t: Tensor) -> dict[str, Tensor]:
    """``h``, ``y``: (batch, 6); ``t``: (batch,). Each goes through ``as_strided``, most in code of torch's."""
    z = F.normalize(h, dim=1)
    same = (t[:, None] == t[None, :]).double().fill_diagonal_(0)
    own = (h @ h.T).fill_diagonal_(-1.0)
    columns, parts, doubled = h * 2, h.sin(), h * 2
    columns[:, 0] = 0.5
    columns[:, 1].mul_(y[:, 0])
    parts[:, 1:4].add_(y[:, 1:4])
    parts[:, ::2] *= 3
    before = doubled[:, 1:4]
    doubled.mul_(3)
    wave, window = torch.cat([h, y, h], 1), torch.hann_window(8, dtype=h.dtype)
    return {
        "supervised contrast": (same * (z @ z.T).log_softmax(1)).sum(1) / same.sum(1).clamp(min=1),
        "a filled diagonal": own.logsumexp(1) + own.diagonal(),
        "wrapped": h.detach()[:, :3].contiguous().fill_diagonal_(5.0, wrap=True) * h[:, :3],
        "columns": columns.square() + parts,
        "a view of what changes later": before.sin(),
        "turned": h.as_strided((6, len(h)), (1, 6)).sin(),
        "windows": h.as_strided((len(h), 3, 4), (6, 1, 1)).cos(),
        "copied": torch.as_strided_copy(h, (len(h), 2), (6, 3)).sin(),
        "scattered": torch.as_strided_scatter(h, y[:, :2].contiguous(), (len(h), 2), (6, 3)).cos(),
        "spectrum": torch.stft(wave, 8, 3, window=window, return_complex=True).abs(),
    }


@dataclass(frozen=True)
class Strided(MLP):
    """A 4-3-6 model; in a bucket the second weight begins at the 15th element."""

    sizes: tuple[int, ...] = (4, 3, 6)
    rows: int = 6

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = super().part(rank, step)  # type: ignore[misc]
        return x, y, torch.randint(5, (self.rows,), generator=random_generator(rank, step))

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, t: Tensor) -> Any:  # type: ignore[override]
        weight, other = model[0].weight, model[2].weight
        weight.detach().as_strided((3,), (5,), 0).mul_(0.9)  # in place, in state
        terms = _terms(model(x), y, t) | {
            "state": weight.as_strided((4, 3), (1, 4)).square(),
            "complex": torch.view_as_real(torch.view_as_complex(other.view(9, 2)).square()),
        }
        torch.stack([term.mean() for term in terms.values()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {name: term.detach() for name, term in terms.items()}


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_strides_are_those_of_the_plain_step(ranks: Ranks, style: str) -> None:
    assert_agrees(ranks, 2, Strided(), style, steps=3)


def _filled_diagonal(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = model(x)
    loss = (z @ z.T).fill_diagonal_(-9).logsumexp(1).mean()
    loss.backward()
    return loss


def test_a_matrix_whose_diagonal_is_filled_stays_split() -> None:
    """Each rank has rows of it; only the activations that all rows are compared with are gathered."""
    model, _, x, y = regression(5, 6, rows=4)
    compiled = compile_on_fake_ranks(2, _filled_diagonal, (model,), x, y, passes=())
    assert counts(compiled)["all_gather"] == 1
    assert {tuple(node.meta["val"].shape) for node in nodes_of(compiled, aten.diagonal_scatter.default)} == {(4, 8)}


REFUSED = {
    "outside": (lambda x: x[1:].as_strided((3,), (1,), 0), r"takes \[3\] elements with strides \[1\].*unfold"),
    "in place": (lambda x: x.clone().as_strided_((3,), (1,)), "another shape or other strides by as_strided_"),
    "resized": (lambda x: torch.zeros(3, 4).resize_(4, 3), "by resize_, which shows its memory anew"),
    "resized as": (lambda x: torch.zeros(3, 4).resize_as_(x), "by resize_, which shows its memory anew"),
    "set": (lambda x: torch.zeros(3, 4).set_(x.clone()), "puts a tensor into other memory by set_"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", REFUSED)
def test_memory_that_is_no_tensors_own_is_refused_at_its_line(what: str) -> None:
    use, sentence = REFUSED[what]
    step = spmd.compile()(lambda model, x: (model(x) * use(x).sum()).sum())
    with pytest.raises(spmd.CaptureError, match=rf"(?s){sentence}.*test_strided_views.py:\d+"):
        step(nn.Linear(4, 4), torch.randn(5, 4))
