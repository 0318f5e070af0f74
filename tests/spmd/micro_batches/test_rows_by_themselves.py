"""Ops that work within each row of the batch, and losses of each row, in spellings of others, beside the plain step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

LENGTH, WIDTH, EXPERTS, TOKENS, PICTURE, PATCHES = 6, 8, 4, 11, 10, 2

Terms = Callable[[nn.ModuleDict, Tensor, Tensor, Tensor], dict[str, Tensor]]
GROUPS: dict[str, Terms] = {}


def group(terms: Terms) -> Terms:
    """``ids``: (rows, LENGTH), ``h``: (rows, LENGTH, WIDTH), ``given``: (rows, LENGTH, WIDTH). The loss is the sum."""
    GROUPS[terms.__name__] = terms
    return terms


@group
def tokens(m: nn.ModuleDict, ids: Tensor, h: Tensor, given: Tensor) -> dict[str, Tensor]:
    """Prefix sums, sorts and the best tokens of each row."""
    score = h.sum(-1)
    weight, best = score.topk(3, dim=1)
    columns = best[..., None].expand(-1, -1, WIDTH)
    order = given[..., 0].argsort(1)
    kept = torch.take_along_dim(h, order[:, :4, None], 1)
    back = order.argsort(1)[..., None].expand(-1, -1, WIDTH)
    likely, of = m["head"](h).flatten(0, 1).softmax(-1).sort(-1, descending=True)
    beyond = (likely.cumsum(-1) - likely > 0.9).scatter(-1, of, likely.cumsum(-1) - likely > 0.9)
    segments = (ids == 0).cumsum(-1)
    same = (segments[:, :, None] == segments[:, None]).tril()
    rows = torch.arange(len(ids))[:, None]
    placed = h.clone()
    placed[rows, best] = m["mix"](h[rows, best])
    in_expert = F.one_hot(m["gate"](h).argmax(-1), EXPERTS).cumsum(1)
    return {
        "mixture of depths": h.scatter_add(1, columns, m["mix"](h.gather(1, columns)) * weight[..., None].sigmoid()),
        "placed": placed,
        "masked autoencoder": m["mix"](kept),
        "sorted and back": h.gather(1, order[..., None].expand(-1, -1, WIDTH)).cumsum(1).gather(1, back),
        "nucleus": likely.masked_fill(beyond, 0.0),
        "packed": F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], same[:, None]),
        "capacity": (in_expert <= 2) * m["gate"](h).sigmoid(),
        "each by itself": torch.vmap(lambda row, key: row[key.argsort()].cumsum(0))(h, given[..., 1]),
    }


@group
def pictures(m: nn.ModuleDict, ids: Tensor, h: Tensor, given: Tensor) -> dict[str, Tensor]:
    """Features of each row's picture in the place of its tokens."""
    features, mask = m["mix"](given[:, :PATCHES]), ids == PICTURE
    at = (mask.long().cumsum(1) - 1).clamp(min=0)
    found = features[torch.arange(len(ids))[:, None], at]
    flat = h.flatten(0, 1).masked_scatter(mask.flatten()[:, None], features.flatten(0, 1))
    return {
        "of each row": h.masked_scatter(mask[..., None], features),
        "in one dim": h.masked_scatter(mask[..., None].expand_as(h), features.flatten(0, 1)),
        "joined": h.masked_scatter(mask.unsqueeze(-1), torch.cat(list(features), 0)),
        "in place": h.clone().masked_scatter_(mask.unsqueeze(-1), torch.stack(features.unbind())),
        "flattened": flat.view_as(h),
        "by prefix sums": torch.where(mask[..., None], found, h),
    }


@group
def balance(m: nn.ModuleDict, ids: Tensor, h: Tensor, given: Tensor) -> dict[str, Tensor]:
    """The auxiliary loss of each sequence, as mixtures with few or many experts write it."""
    rows, length = ids.shape
    scores = m["gate"](h.view(-1, WIDTH)).softmax(-1)
    of = torch.topk(scores, 2, dim=-1, sorted=False).indices
    counts = torch.zeros(rows, EXPERTS, dtype=h.dtype)
    counts.scatter_add_(1, of.view(rows, -1), torch.ones(rows, length * 2, dtype=h.dtype)).div_(length * 2 / EXPERTS)
    of_row = scores.view(rows, length, -1)
    chosen = F.one_hot(of, EXPERTS).sum(1).view(rows, length, EXPERTS).double()
    sigmoids = m["gate"](h).sigmoid()
    shares = (sigmoids / sigmoids.sum(-1, keepdim=True)).mean(1)
    return {
        "scattered": (counts * of_row.mean(dim=1)).sum(dim=1).mean(),
        "one hot": (chosen.mean(1) * (EXPERTS / 2) * shares).sum(-1).mean(),
        "einsum": torch.einsum("bte,bse->b", chosen, of_row).mean() / length**2,
    }


@group
def policy(m: nn.ModuleDict, ids: Tensor, h: Tensor, given: Tensor) -> dict[str, Tensor]:
    """Losses of tokens that count, over each row and over the batch."""
    log = m["head"](h).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    keep = (ids > 3).double()
    keep[:, 0] = 1
    ratio, gain = (log - log.detach()).exp(), given[..., 0]
    each = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * keep
    rewards = (given[..., 2] * keep).flip(1).cumsum(1).flip(1)
    mean = (rewards * keep).sum() / keep.sum()
    spread = ((rewards - mean).square() * keep).sum() / keep.sum()
    whitened = (rewards - mean) * torch.rsqrt(spread + 1e-8)
    score = given[:, 0, 1]
    last = (ids > 3).sum(1).clamp(min=1) - 1
    return {
        "rows and tokens": (each.sum(1) / keep.sum(1)).mean() + each.sum() / keep.sum(),
        "clamped": ((each.sum(-1) / keep.sum(-1).clamp(min=1.0)).mean() + each.sum() / keep.sum().clamp(min=1.0)),
        "by length": (each.sum(-1) / LENGTH).mean(),
        "normalized": -(log * keep * ((score - score.mean()) / (score.std() + 1e-4))[:, None]).mean(),
        "of a value": 0.1 * ((h.sum(-1) - given[..., 3]).square() * keep).sum() / keep.sum(),
        "value of the last": log[torch.arange(len(ids)), last].mean(),
        "whitened": -(log * whitened * keep).sum() / keep.sum(),
    }


@group
def margins(m: nn.ModuleDict, ids: Tensor, h: Tensor, given: Tensor) -> dict[str, Tensor]:
    """Classes that should stay a margin below that of their token."""
    score, label = m["head"](h).flatten(0, 1), ids.flatten()
    weight = torch.arange(1.0, TOKENS + 1, dtype=h.dtype)
    return {
        "mean": F.multi_margin_loss(score, label),
        "squares": F.multi_margin_loss(score, label, p=2, margin=0.5, weight=weight, reduction="sum") / len(label),
        "each": F.multi_margin_loss(score, label, weight=weight, reduction="none") * given[..., 0].flatten(),
    }


@dataclass(frozen=True)
class Rows(Case):
    """A model of tokens whose output goes through one of the groups; each rank has four rows of its own."""

    group: str
    rows: int = 4

    def build(self) -> tuple[Any, ...]:
        torch.manual_seed(0)
        sizes = {"mix": (WIDTH, WIDTH), "gate": (WIDTH, EXPERTS), "head": (WIDTH, TOKENS)}
        parts = {name: nn.Linear(*size) for name, size in sizes.items()}
        model = nn.ModuleDict({"tokens": nn.Embedding(TOKENS, WIDTH), "layer": nn.Linear(WIDTH, WIDTH), **parts})
        return model.double(), torch.optim.SGD(model.parameters(), lr=0.1), self.group

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        ids = torch.randint(PICTURE, (self.rows, LENGTH), generator=random)
        at = torch.rand(self.rows, LENGTH, generator=random).argsort(1)[:, :PATCHES]
        given = torch.randn(self.rows, LENGTH, WIDTH, generator=random, dtype=torch.float64)
        return ids.scatter(1, at, PICTURE), given

    @staticmethod
    def step(model: nn.ModuleDict, optimizer: Any, group: str, ids: Tensor, given: Tensor) -> Any:  # type: ignore[override]
        h = model["layer"](model["tokens"](ids)).tanh()
        terms = GROUPS[group](model, ids, h, given)
        loss = torch.stack([term.square().mean() if term.ndim else term for term in terms.values()]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, {name: term.detach() for name, term in terms.items()}


@pytest.mark.parametrize("name", GROUPS)
def test_on_two_ranks_in_micro_batches(ranks: Ranks, name: str) -> None:
    assert_agrees(ranks, 2, Rows(name), {"parallel_style": "fully_shard", "micro_batches": 2}, steps=2)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"axes": {"stages": "dp"}, "stages": ["layer"], "micro_batches": 2}, id="stages"),
        pytest.param({"shard_optimizer": True}, id="ranks", marks=pytest.mark.exhaustive),  # above, on real ones
    ],
)
@pytest.mark.parametrize(
    "name",
    # In a stage, the others are computed as these are; their numbers are above.
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in ("tokens", "balance"))) for name in GROUPS],
)
def test_beside_the_plain_step(name: str, options: dict[str, Any]) -> None:
    case = Rows(name, rows=8)
    compiled = spmd.compile(case.step, parallel_mode=spmd.DataParallel(**options), passes=())
    verdict = spmd.verify(compiled, *case.build(), *case.part(0, 0), world=2, steps=1)
    assert verdict, verdict


# Where rows meet


def flat_sums(h: Tensor, score: Tensor) -> Tensor:
    return h.flatten(0, 1).cumsum(0)


def flat_choice(h: Tensor, score: Tensor) -> Tensor:
    best = score.argmax(1) + torch.arange(len(h)) * LENGTH
    return h.flatten(0, 1)[best]


def flat_counts(h: Tensor, score: Tensor) -> Tensor:
    of = (h[..., :EXPERTS].argmax(-1) + torch.arange(len(h))[:, None] * EXPERTS).flatten()
    counts = torch.zeros(len(h) * EXPERTS, dtype=h.dtype).scatter_add(0, of, torch.ones_like(of, dtype=h.dtype))
    return counts.view(-1, EXPERTS) * h[..., :EXPERTS].mean(1)


def shares(h: Tensor, score: Tensor) -> Tensor:
    chosen = F.one_hot(h[..., :EXPERTS].argmax(-1), EXPERTS).double()
    return chosen.flatten(0, 1).mean(0) * h[..., :EXPERTS].flatten(0, 1).mean(0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (flat_sums, r"^cumsum \(test_rows_by.*h\.flatten\(0, 1\)\.cumsum.*as in x\.view\(rows, -1\)\.cumsum\(1\)"),
        (flat_choice, r"^index \(test_rows_by.*h\.flatten\(0, 1\)\[best\].*gather\(x, 1, index\)"),
        (
            flat_counts,
            r"^scatter_add \(test_rows_by.*scatter_add\(0.*zeros\(rows, n\)\.scatter_add\(1, index, values\)",
        ),
        (shares, r"test_rows_by.*mean\(0\).*known only when all have run.*for each sequence: \(chosen\.mean\(1\)"),
    ],
)
def test_an_error_names_the_op_its_line_and_how_to_write_it_for_each_row(terms: Any, expected: str) -> None:
    def step(model: nn.ModuleDict, ids: Tensor) -> None:
        h = model["tokens"](ids)
        terms(h, h.sum(-1)).square().sum().backward()

    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(micro_batches=2))
    with pytest.raises(spmd.PartitionError, match=f"(?s){expected}"):
        compiled(Rows("").build()[0], Rows("").part(0, 0)[0])


@pytest.mark.usefixtures("alone")
def test_patches_that_are_packed_are_to_be_passed_as_rows() -> None:
    """As those of Qwen2-VL are, whose pictures have patches in one dim."""
    compiled = spmd.compile(lambda patches, ids: patches.sum() + ids.sum())
    with pytest.raises(
        spmd.PlacementError, match=r"if patches packs 16 .* 4 rows.*\.view\(4, 16, \.\.\.\).*flatten\(0, 1\)"
    ):
        compiled(torch.ones(64, 3), torch.ones(4, 2))


# Where values decide whether rows meet


def scatters(model: nn.ModuleDict, optimizer: Any, ids: Tensor, given: Tensor) -> Tensor:
    """A mask that may count more or fewer tokens than the features of its part of the batch."""
    h = model["tokens"](ids)
    loss = (
        model["head"](h.masked_scatter((ids == PICTURE)[..., None], model["mix"](given[:, :PATCHES]))).square().mean()
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def unequal(*counts: int) -> Tensor:
    """Tokens, of which rows have unequal numbers for their pictures."""
    return torch.where(torch.arange(LENGTH) < torch.tensor(counts)[:, None], PICTURE, 1)


@pytest.mark.usefixtures("alone")
def test_rows_that_take_from_others_cost_the_call_alone() -> None:
    """Parts of two rows: within one, rows may take of each other."""
    case = Rows("", rows=4)
    given = case.part(0, 0)[1]
    compiled = spmd.compile(scatters, parallel_mode=spmd.DataParallel(micro_batches=2))
    (model, optimizer, _), (plain, plain_optimizer, _) = case.build(), case.build()
    for ids in (unequal(2, 2, 2, 2), unequal(1, 3, 4, 0)):
        torch.testing.assert_close(compiled(model, optimizer, ids, given), scatters(plain, plain_optimizer, ids, given))
    with pytest.raises(ValueError, match=r"(?s)masked_scatter \(test_rows.*all 4 rows.*one takes 3.*one picture each"):
        compiled(model, optimizer, unequal(1, 2, 2, 3), given)
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.usefixtures("alone")
def test_ranks_take_from_others() -> None:
    """Without micro-batches, and with elements that nothing takes."""
    compiled = spmd.compile(scatters, parallel_mode=spmd.DataParallel())
    model, optimizer, _ = Rows("").build()
    verdict = spmd.verify(compiled, model, optimizer, unequal(1, 2, 0, 3), Rows("").part(0, 0)[1], world=2, steps=1)
    assert verdict, verdict


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_certificate_knows_whose_rows_are_taken(count: int) -> None:
    compiled = spmd.compile(scatters, parallel_mode=spmd.DataParallel(micro_batches=count))
    model, optimizer, _ = Rows("").build()
    found = spmd.certify(compiled, model, optimizer, *Rows("").part(0, 0), world=2)
    assert found, found
