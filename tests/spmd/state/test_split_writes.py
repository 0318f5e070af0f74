"""Split state that is written to outside of steps, or read where ranks have no part: as the plain model, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import spmd
from tests.harness.pool import Ranks

ROWS = 4  # of which the third of three ranks has none
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda t: t.__setitem__(0, 7.0),
    "row of a tensor": lambda t: t.__setitem__(1, torch.ones(3, dtype=torch.float64)),
    "rows": lambda t: t.__setitem__(slice(0, 2), 3.0),
    "column": lambda t: t.__setitem__((slice(None), 0), 9.0),
    "mask": lambda t: t.__setitem__(t > 0, 0.0),
    "row of data": lambda t: t.data.__setitem__(0, 1.5),
    "data": lambda t: setattr(t, "data", t.data * 2),
    "plain data": lambda t: setattr(t, "data", torch.arange(12.0, dtype=torch.float64).view(4, 3)),
    "out": lambda t: nn.init.eye_(t),
    "vector": lambda t: nn.utils.vector_to_parameters(torch.arange(12.0, dtype=torch.float64), [t]),
    "transposed": lambda t: t.t().mul_(2),
    "in place": lambda t: t.mul_(2).clamp_(-0.5, 0.5),
    "plain values": lambda t: t.add_(torch.arange(12.0, dtype=torch.float64).view(4, 3)).data.mul_(torch.ones(3) / 3),
    "a list": lambda t: torch._foreach_mul_([t], [torch.full((4, 3), 0.5, dtype=torch.float64)]),
    "by a function": lambda t: t.data.apply_(lambda x: 2 * x + 1),
    "drawn": lambda t: t.normal_(),
    "drawn by an initialization": lambda t: (nn.init.xavier_uniform_(t), nn.init.kaiming_normal_(t, a=0.1)),
    "initialized": lambda t: (nn.init.orthogonal_(t), nn.init.trunc_normal_(t, std=0.1)),
    "noise": lambda t: t.add_(torch.randn_like(t)),
    "noise of one's own": lambda t: t.data.add_(torch.rand(t.shape, dtype=t.dtype)),
    "dropped": lambda t: t.copy_(nn.functional.dropout(t)),
    "view of a row": lambda t: t[0].zero_(),
    "view of rows": lambda t: t.narrow(0, 1, 1).fill_(4.0),
    "row of a view": lambda t: t.view(-1)[0].fill_(6.0),
    "item of a view": lambda t: t[1].__setitem__(0, 1.0),
    "items of a view": lambda t: t.view(-1).__setitem__(t.abs().flatten().topk(3).indices, 0.0),
    "a row, detached": lambda t: t[0].detach().add_(torch.ones(3, dtype=torch.float64)),
    "a column": lambda t: t.t()[1].copy_(torch.ones(4, dtype=torch.float64)),
    "a row, initialized": lambda t: (nn.init.constant_(t[0], 5.0), nn.init.normal_(t[1:3])),
    "rows, initialized": lambda t: (nn.init.orthogonal_(t[:3]), nn.init.eye_(t[1:3]), nn.init.kaiming_uniform_(t[2:])),
    "other views": lambda t: [v.mul_(3) for v in (t.swapaxes(0, 1), t.ravel())] + [t.data.ravel().add_(1)],
    "views of a row": lambda t: [t[0].expand(3).mul_(3), t[1].contiguous().add_(1), t[2].to(torch.float64).add_(2)],
    "views by shape": lambda t: (t[:1].expand_as(torch.ones(1, 3)).mul_(3), t.as_strided((3,), (1,)).mul_(2)),
    "by keyword": lambda t: torch.select(input=t, dim=0, index=1).mul_(2),
    "no view": lambda t: (t[[0, 2]].mul_(2), t[t > 0].mul_(2), t[1].float().mul_(2)),
    "diagonal": lambda t: t.fill_diagonal_(1.0),
    "dropped in place": lambda t: [nn.functional.dropout(each, inplace=True) for each in (t, t[0])],
    "dropped otherwise": lambda t: torch.dropout_(t.copy_(nn.functional.alpha_dropout(t, 0.5, True)), 0.5, True),
    "out of draws": lambda t: torch.randn(4, 3, dtype=torch.float64, out=t.data),
    "out of a row": lambda t: torch.mul(t[0], 2.0, out=t[1]),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "data of a row": lambda t: t[0].data.zero_(),
    "chunk": lambda t: t.chunk(2)[0].fill_(8.0),
    "rows of sizes": lambda t: t.split_with_sizes([1, 3])[0].fill_(8.0),
    "unbind": lambda t: t.unbind(0)[0].fill_(8.0),
}
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda t: t.abs().max(),
    "least": lambda t: t.min(),
    "where": lambda t: t.argmax(),
    "both": lambda t: torch.stack(list(torch.aminmax(t))),
    "norm": lambda t: t.norm(float("inf")),
}


def made() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, ROWS, bias=False).double()


def whole(value: Any) -> Any:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()


def step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    model.zero_grad()
    return loss


def differences(rank: int, world: int) -> list[str]:
    model, plain, wrong = made(), made(), list[str]()
    spmd.compile(step, parallel_mode="fully_shard")(model, torch.ones(2, 3, dtype=torch.float64) + rank)
    with torch.no_grad():
        for name, read in READS.items():
            if whole(read(model.weight)) != whole(read(plain.weight)):
                wrong.append(name)
        for name, write in WRITES.items():
            for tensor in (model.weight, plain.weight):
                torch.manual_seed(len(name))
                write(tensor)
            if not torch.equal(model.weight.full_tensor(), plain.weight):  # type: ignore[operator]
                wrong.append(name)
        for name, write in REFUSED.items():
            try:
                write(model.weight)
                wrong.append(f"{name} is not refused")
            except spmd.SpmdError as error:
                wrong += [] if "spmd.unshard" in str(error) else [str(error)]
        wrong += [] if torch.equal(model.weight.full_tensor(), plain.weight) else ["a refused write"]  # type: ignore[operator]
    return wrong


def test_writes_reach_the_whole_tensor_or_are_refused(ranks: Ranks) -> None:
    assert ranks.run(3, differences) == [[]] * 3
