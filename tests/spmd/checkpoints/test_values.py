"""What a checkpoint holds: optimizers by name, schedulers, scalers, plain values; and what it refuses."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import spmd
from spmd.checkpoints import values
from spmd.checkpoints.trees import IN_FILES
from tests.harness.cases import mlp

from .runs import unequal

pytestmark = pytest.mark.usefixtures("alone")


class Sampler:
    """The place in a data set, with a tensor, and containers of several kinds."""

    def __init__(self, place: int) -> None:
        self.state: dict[str, Any] = {
            "place": place,
            "order": torch.arange(place, place + 6),
            "seen": {place, "a"},
            3: (1.5, None, [torch.tensor(2.5), float("inf")]),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def trained(kind: Any = torch.optim.AdamW, reverse: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    """A plain model and its optimizer, with two groups, after two steps."""
    model = mlp(3, 4, 2)
    groups = [{"params": list(model[0].parameters()), "lr": 0.3}, {"params": list(model[2].parameters())}]
    optimizer = kind(groups[::-1] if reverse else groups, lr=0.1, **options)
    for _ in range(2):
        model(torch.randn(5, 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {
        f"{names[id(p)]}.{key}": value for p, entries in optimizer.state.items() for key, value in entries.items()
    }
    return found | {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


def test_everything_with_state_comes_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 10)
    optimizer.step()
    scheduler.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    given = {"average": torch.randn(3), "progress": {"epoch": 3, "best": 0.5}, "losses": [1.0, 2.0], "name": "first"}
    spmd.save(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=Sampler(5), **given)

    other, its_optimizer = trained()
    its_scheduler = torch.optim.lr_scheduler.OneCycleLR(its_optimizer, 0.5, 10)
    its_scaler, data = torch.amp.GradScaler("cpu"), Sampler(0)
    got: dict[str, Any] = {"average": torch.zeros(3), "progress": {}, "losses": [], "name": "first"}
    its = {"model": other, "optimizer": its_optimizer, "scheduler": its_scheduler, "scaler": its_scaler, "data": data}
    assert spmd.load(tmp_path, **its, **got) is None
    assert unequal(dict(model.state_dict()), dict(other.state_dict())) == []
    assert unequal(by_name(model, optimizer), by_name(other, its_optimizer)) == []
    assert its_scheduler.state_dict() == scheduler.state_dict()
    assert its_scaler.state_dict() == scaler.state_dict()
    assert unequal(given, got) == []
    order = data.state.pop("order")
    assert torch.equal(order, torch.arange(5, 11))
    assert data.state == {key: value for key, value in Sampler(5).state.items() if key != "order"}


@pytest.mark.parametrize("kind, options", [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})])
def test_optimizer_state_goes_by_name_whatever_the_order_of_groups(
    kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    model, optimizer = trained(kind, **options)
    spmd.save(tmp_path, model=model, optimizer=optimizer)
    other, its_optimizer = trained(kind, reverse=True, **options)
    spmd.load(tmp_path, model=other, optimizer=its_optimizer)
    assert unequal(by_name(model, optimizer), by_name(other, its_optimizer)) == []
    fresh = mlp(3, 4, 2)
    its_optimizer = kind([{"params": [p]} for p in reversed([*fresh.parameters()])], **options)
    spmd.load(tmp_path, model=fresh, optimizer=its_optimizer)
    assert unequal(by_name(model, optimizer), by_name(fresh, its_optimizer)) == []


def test_state_keeps_its_dtype_where_torch_would_cast_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
    spmd.save(tmp_path, model=model, optimizer=optimizer)
    other = nn.Linear(3, 2).bfloat16()
    its_optimizer = torch.optim.SGD(other.parameters(), momentum=0.9)
    spmd.load(tmp_path, model=other, optimizer=its_optimizer)
    assert unequal(by_name(model, optimizer), by_name(other, its_optimizer)) == []


@pytest.mark.filterwarnings("ignore:Casting complex")  # torch casts first, and gets back what it replaces
def test_tensors_of_any_strides_and_dtypes_come_back(tmp_path: Path) -> None:
    """Dense in the file, whatever they are in memory; what shares memory is refused as a place to load into."""
    ten, whole = torch.arange(10.0), torch.arange(1.0, 7.0)
    layouts = {
        "one element": ten.as_strided((1,), (0,)),
        "one row": ten.as_strided((1, 1), (0, 7)),
        "expanded": ten[:4].view(1, 4).expand(3, 4),
        "transposed": ten.view(2, 5).t(),
        "overlapping": ten.as_strided((4, 3), (1, 1)),
        "empty": torch.empty(0).as_strided((0, 3), (0, 5)),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    }
    layouts |= {str(dtype): whole.to(dtype) for dtype in (torch.complex64, torch.complex128, torch.float8_e4m3fn)}
    model, optimizer = trained(torch.optim.SGD, momentum=0.9)
    optimizer.state[model[0].weight] |= layouts
    spmd.save(tmp_path, model=model, optimizer=optimizer, others=layouts)
    got: dict[str, Any] = {}
    other, its_optimizer = trained(torch.optim.SGD, momentum=0.9)
    its_optimizer.state[other[0].weight] |= {name: each.clone().zero_() for name, each in layouts.items()}
    its_optimizer.state[other[0].weight]["expanded"] = torch.zeros(1, 4).expand(3, 4)
    spmd.load(tmp_path, model=other, optimizer=its_optimizer, others=got)
    for found in (got, its_optimizer.state[other[0].weight]):
        for name, want in layouts.items():
            assert found[name].dtype == want.dtype
            assert found[name].tolist() == want.tolist(), name
    model.register_buffer("shared", torch.zeros(1).expand(4))
    spmd.save(tmp_path, model=model)
    with pytest.raises(ValueError, match=r"model.shared: expanded here.*clone"):
        spmd.load(tmp_path, model=model)


def test_groups_that_cannot_be_joined_are_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    spmd.save(tmp_path, model=model, optimizer=optimizer)
    one = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="group 0 has parameters of groups that were saved with different lr"):
        spmd.load(tmp_path, model=model, optimizer=one)


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(200, 30), "head": nn.Linear(30, 200, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, other = tied(), tied()
    spmd.save(tmp_path, model=model)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) < 200 * 30 * 4 + 1000
    spmd.load(tmp_path, model=other)
    assert other["head"].weight is other["embed"].weight and torch.equal(other["head"].weight, model["head"].weight)
    untied = nn.ModuleDict({"embed": nn.Embedding(200, 30), "head": nn.Linear(30, 200, bias=False)})
    spmd.load(tmp_path, model=untied)
    assert torch.equal(untied["head"].weight, model["head"].weight)
    with torch.no_grad():
        untied["head"].weight.zero_()
    spmd.save(tmp_path, model=untied)
    with pytest.raises(ValueError, match=r"model.head.weight: tied to model.embed.weight here, and not in the check"):
        spmd.load(tmp_path, model=other)


def test_memory_that_tensors_share_is_stored_for_each(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    state = {"whole": whole, "again": whole, "part": whole[3:7], "column": whole.view(3, 4)[:, 1], "none": whole[:0]}
    spmd.save(tmp_path, state=state)
    got: dict[str, Any] = {}
    spmd.load(tmp_path, state=got)
    assert unequal(state, got) == []


def test_random_numbers_go_on(tmp_path: Path) -> None:
    spmd.seed(3, invariant=True)
    expected = spmd.rng_state()
    spmd.save(tmp_path)
    spmd.seed(None)
    spmd.load(tmp_path)
    assert spmd.rng_state() == expected


class Evil:
    """To unpickle it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_file_that_would_execute_code_is_refused(tmp_path: Path) -> None:
    spmd.save(tmp_path, value={"a": 1})
    (values,) = tmp_path.rglob("values.pt")
    length = values.stat().st_size
    values.write_bytes(pickle.dumps(Evil(tmp_path / "executed"), 2).ljust(length, b"."))
    with pytest.raises(spmd.SpmdError, match=r"values.pt is damaged"):
        spmd.load(tmp_path, value={})
    assert not (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_pickle_of_another_tool_is_read(tmp_path: Path) -> None:
    """Torch's own distributed checkpoints have one."""
    dcp.save({"model": nn.Linear(2, 3).state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
    with pytest.raises(FileNotFoundError, match=r"there is no complete checkpoint in .*, and no safetensors file"):
        spmd.load(tmp_path, model=nn.Linear(2, 3))
    assert not (tmp_path / "executed").exists()


def refusals() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    linear = nn.Linear(2, 3)
    return {
        "object": ({"data": {"a": [object()]}}, TypeError, "data.a.0 cannot be saved"),
        "module in a list": ({"models": [linear]}, TypeError, "models.0 cannot be saved"),
        "meta": ({"model": nn.Linear(2, 3, device="meta")}, ValueError, "model.weight is on the meta device"),
        "stranger": ({"opt": torch.optim.SGD(linear.parameters())}, ValueError, "no model given here has"),
        "names": ({"data": {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}}, ValueError, "two tensors have the name"),
        "step": ({"step": -1}, ValueError, "expected step to be at least 0"),
        "float step": ({"step": 1.0}, TypeError, "expected step to be an int"),
        "keep": ({"keep": 2}, ValueError, "give the step, too"),
        "keep none": ({"step": 1, "keep": 0}, ValueError, "expected keep to be at least 1"),
        "wait as text": ({"wait": "no"}, TypeError, "expected wait to be True or False, got 'no'"),
    }


def test_a_folder_is_one_of_a_file_system(tmp_path: Path) -> None:
    for call in (spmd.save, spmd.load, lambda folder: spmd.export(folder, nn.Linear(2, 3))):
        with pytest.raises(TypeError, match="expected folder to be a path, got 3"):
            call(3)
        with pytest.raises(ValueError, match="a path of a file system"):
            call("s3://bucket/run")


def test_a_step_does_not_save(tmp_path: Path) -> None:
    @spmd.compile
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        spmd.save(tmp_path, model=model)
        return model(x).sum()  # type: ignore[no-any-return]

    with pytest.raises(spmd.SpmdError, match="inside of a compiled step: do so between its calls"):
        step(nn.Linear(2, 3), torch.ones(4, 2))


@pytest.mark.parametrize("case", refusals())
def test_what_cannot_be_saved_is_refused(case: str, tmp_path: Path) -> None:
    given, kind, sentence = refusals()[case]
    with pytest.raises(kind, match=sentence):
        spmd.save(tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


def test_all_that_does_not_fit_is_listed_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer = trained()
    spmd.save(tmp_path, model=model, optimizer=optimizer, name="first")
    other = nn.ModuleDict({"0": nn.Linear(3, 5), "2": nn.Linear(4, 2).double(), "3": nn.Linear(2, 2)})
    its_optimizer = torch.optim.AdamW(other.parameters())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError) as raised:
        spmd.load(tmp_path, model=other, optimizer=its_optimizer, name="second", lost={})
    for line in (
        "model.3.weight: missing in the checkpoint",
        "model.0.weight: shape [4, 3] in the checkpoint, [5, 3] here",
        "optimizer.model.3.bias: missing in the checkpoint",
        "name: 'first' in the checkpoint, 'second' here, which cannot change",
        "lost: missing in the checkpoint, which has model, optimizer, name",
    ):
        assert line in str(raised.value)
    assert unequal(before, dict(other.state_dict())) == [] and not its_optimizer.state

    smaller = nn.ModuleDict({"0": nn.Linear(3, 4)})
    with pytest.raises(ValueError) as raised:
        spmd.load(tmp_path, model=smaller)
    assert "model.2.weight: unexpected, only in the checkpoint" in str(raised.value)
    assert "model.0.weight: torch.float64 in the checkpoint, torch.float32 here" in str(raised.value)
    spmd.load(tmp_path, model=smaller, strict=False)
    assert torch.equal(smaller["0"].weight, model[0].weight.float())


def test_a_model_on_meta_needs_a_layout_first(tmp_path: Path) -> None:
    model, _ = trained()
    spmd.save(tmp_path, model=model)
    with pytest.raises(ValueError, match=r"model.0.weight.* on the meta device: .*spmd.materialize"):
        spmd.load(tmp_path, model=mlp(3, 4, 2).to("meta"))


def test_a_folder_that_is_a_checkpoint_and_has_some_is_not_guessed(tmp_path: Path) -> None:
    plain = {"n": 0}
    spmd.save(tmp_path, plain=plain)
    spmd.save(tmp_path, step=100, plain=plain)
    with pytest.raises(ValueError, match=r"is a checkpoint, and has those of steps \[100\], too"):
        spmd.load(tmp_path, plain=plain)
    assert spmd.load(tmp_path / "step-100", plain=plain) == 100


class Number(int):
    """A class that a checkpoint does not know."""


def test_values_that_are_not_tried_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known to be loaded again is not written and read for trial; all else is."""
    plain = {
        "a": [1, -(2**63) + 1, True, None, "\ud800\n", float("nan"), (OrderedDict({(1, "b"): ()}),)],
        1.5: torch.empty(3, device="meta"),
        "tensors": [torch.empty(2, dtype=dtype) for dtype in IN_FILES],
    }
    assert values._is_plain(plain) and values._saved(plain) is not None
    for other in ({1, 2}, 2**63, Number(1), nn.Parameter(torch.ones(1)), {Number(1): 2}, nn.Linear, b"", 1j):
        assert not values._is_plain({"a": [other]})
    tried: list[object] = []
    monkeypatch.setattr(values, "_saved", lambda value: tried.append(value) or b"")
    values.check(plain)
    assert not tried
    values.check({"a": {1, 2}})
    assert tried
