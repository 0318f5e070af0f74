"""Attention with a mask that is known to be causal runs without one; any other mask stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd

WIDTH, HEADS = 8, 2

pytestmark = pytest.mark.usefixtures("alone")

Mask = Callable[[Tensor, int], Tensor]  # of the scores' dtype or of bools, for a batch and a length


def positions_compared(x: Tensor, n: int) -> Tensor:
    at = torch.arange(n)
    return (at[None, :] <= at[:, None])[None, None].expand(len(x), 1, n, n)


def written_in_place(x: Tensor, n: int) -> Tensor:
    mask = torch.full((n, n), -torch.inf, dtype=x.dtype)
    mask.triu_(1)
    return mask


def one_sequence_by_counts(x: Tensor, n: int) -> Tensor:
    """Rows packed of sequences, of which there is one: as transformers looks for them by positions."""
    at = torch.arange(n)[None]
    packed = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return (packed[:, :, None] == packed[:, None]) & (at[:, None] <= at[:, :, None])


CAUSAL: dict[str, Mask] = {
    "tril": lambda x, n: torch.ones(n, n, dtype=torch.bool).tril(),
    "filled": lambda x, n: x.new_zeros(n, n).masked_fill(torch.ones(n, n).triu(1) == 1, float("-inf")),
    "compared": positions_compared,
    "in place": written_in_place,
    "packed": one_sequence_by_counts,
}
OTHER: dict[str, Mask] = {
    "one later": lambda x, n: torch.ones(n, n, dtype=torch.bool).tril(1),
    "window": lambda x, n: torch.ones(n, n, dtype=torch.bool).tril().triu(-2),
    "hidden": lambda x, n: torch.ones(n, n, dtype=torch.bool).triu(),
    "slopes": lambda x, n: written_in_place(x, n) + 0.1 * torch.arange(n),
    "zeros for ones": lambda x, n: torch.ones(n, n, dtype=x.dtype).tril(),
    "padded": lambda x, n: torch.ones(n, n, dtype=torch.bool).tril() & (x.sum(-1) < 9)[:, None, None],
    "one for all": lambda x, n: torch.ones(1, 1, dtype=torch.bool),
    "zero for all": lambda x, n: x.new_zeros(1, 1, 1, 1),
}


class Net(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.project, self.out = mask, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x, x.shape[1])
        for _ in range(2):
            q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x


class Heads(nn.Module):
    """torch's own module, whose masks of bools are true for what is hidden."""

    def __init__(self, mask: Mask, **more: Any) -> None:
        super().__init__()
        self.mask, self.more = mask, more
        self.heads = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv="bias" in more)

    def forward(self, x: Tensor) -> Tensor:
        options = {"need_weights": self.more.get("need_weights", False)}
        if "padding" in self.more:
            options["key_padding_mask"] = x.sum(-1) > 9
        seen: Tensor = self.heads(x, x, x, attn_mask=self.mask(x, x.shape[1]), **options)[0]
        return x + seen


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), x.roll(1, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def masks_left(model: nn.Module, lengths: tuple[int, ...] = (6, 6)) -> list[bool]:
    """Whether attention has a mask in each program of a compiled step, which is right."""
    model, compiled = model.double(), spmd.compile(step)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for n in lengths:
        x = torch.randn(3, n, WIDTH, dtype=torch.float64)
        got, expected = compiled(model, optimizers[0], x), step(plain, optimizers[1], x)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-12)
    calls = [[n for n in p.graph.nodes if "scaled_dot_product" in str(n.target)] for p in compiled.programs]
    return [any(node.kwargs.get("attn_mask") is not None for node in nodes) or not nodes for nodes in calls]


@pytest.mark.parametrize("name", CAUSAL)
def test_no_causal_mask_is_made(name: str) -> None:
    assert masks_left(Net(CAUSAL[name])) == [False]


def test_at_lengths_for_which_one_program_is_captured_it_stays() -> None:
    """From the second one on: whether it is causal is not known for all of them."""
    assert masks_left(Net(CAUSAL["tril"]), (6, 7, 9, 8)) == [False, True, True, True]


@pytest.mark.parametrize("name", OTHER)
def test_any_other_mask_stays(name: str, request: pytest.FixtureRequest) -> None:
    """And at other lengths, for which one program is captured: there masks are not looked at at all."""
    is_first = name == next(iter(OTHER))
    lengths = (6, 7, 9) if is_first or request.config.getoption("--exhaustive") else (6,)
    assert masks_left(Net(OTHER[name]), lengths) == [True] * len(lengths)


def test_one_query_of_all_keys() -> None:
    """Its mask of one position is as long as the queries, but not as the keys."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(1, 1, dtype=torch.bool)
            return F.scaled_dot_product_attention(self.project(x[:, :1]), x, x, attn_mask=mask).expand_as(x)

    assert masks_left(First()) == [True]


def test_a_mask_that_is_written_between_two_layers() -> None:
    class Rewritten(Net):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            self.mask = lambda x, n: mask
            first = super().forward(x)
            mask[:, 0] = True
            mask[0, 1] = True
            return super().forward(first)

    assert masks_left(Rewritten(CAUSAL["tril"])) == [True]


def test_a_mask_that_was_causal_at_the_first_length_alone() -> None:
    def window(x: Tensor, n: int) -> Tensor:
        return torch.ones(n, n, dtype=torch.bool).tril().triu(-6)

    assert masks_left(Net(window), (6, 7, 9)) == [False, True, True]


def test_one_mask_of_bools_read_in_both_senses() -> None:
    """True is what is seen, for attention, and what is hidden, for torch's module."""

    class Both(Net):
        def __init__(self, mask: Mask) -> None:
            super().__init__(mask)
            self.heads = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = CAUSAL["tril"](x, x.shape[1])
            self.mask = lambda x, n: mask
            x = super().forward(x)
            return x + self.heads(x, x, x, attn_mask=mask, need_weights=False)[0]

    assert masks_left(Both(CAUSAL["tril"])) == [True]


@pytest.mark.parametrize("more", [{}, {"need_weights": True}, {"padding": True}, {"bias": True}], ids=str)
def test_modules_of_torch(more: dict[str, Any]) -> None:
    def of_bools(x: Tensor, n: int) -> Tensor:
        return torch.ones(n, n, dtype=torch.bool).triu(1)

    assert masks_left(Heads(of_bools, **more)) == [bool(more)]
    if not more:
        assert masks_left(Heads(CAUSAL["in place"])) == [False]
        assert masks_left(Heads(CAUSAL["tril"])) == [True]  # each position sees what comes later, alone
