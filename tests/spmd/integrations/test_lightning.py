"""Lightning over compiled steps has the numbers of its own Trainer on one device with the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spmd

from ...harness.pool import Ranks
from .launched import launched

# Ranks import it, and no process that collects tests: that takes seconds.
pytestmark = [pytest.mark.processes, pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is missing")]

ROWS, BY_HAND = 22, 30  # the last batch is short
Found = tuple[dict[str, Tensor], list[float]]


def train(folder: Path, world: int, mode: spmd.ParallelMode | None, resume: Path | None, kind: str) -> Found:
    """The weights after two epochs, and what was logged: of each batch, and of each evaluation."""
    import lightning.pytorch as lightning
    import lightning_trainer as example
    from torch.utils.data import DataLoader, DistributedSampler

    from spmd.integrations.lightning import Strategy

    logged: list[float] = []

    class Accumulating(example.Classifier):
        """Its steps return rows, too."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            scores = self.net(batch[0])
            loss = F.cross_entropy(scores, batch[1])
            self.log_dict({"train_loss": loss, "index": batch_idx})
            return {"loss": loss, "scores": scores}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]

    class Log(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            logged.extend(
                float(value) for name, value in sorted(trainer.callback_metrics.items()) if name != "accuracy"
            )

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            logged.append(float(trainer.callback_metrics["accuracy"]))

    data = example.loader(ROWS, dtype=torch.float64).dataset
    sampler = DistributedSampler(data, world, spmd.world().get_rank(), shuffle=False)  # Lightning's own would shuffle
    loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
    uneven = DataLoader(data, batch_size=8 // world, sampler=range(spmd.world().get_rank(), ROWS - 1, world))
    checkpoints = lightning.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    settings: dict[str, Any] = {"max_epochs": 2, "callbacks": [Log(), checkpoints], "enable_checkpointing": True}
    settings |= {"num_sanity_val_steps": 0, "use_distributed_sampler": False}
    settings |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1} if kind == "sgd" else {}
    strategy: Any = "auto" if mode is None else Strategy(compile_options={"parallel_mode": mode})
    trainer = example.make(folder, strategy=strategy, **settings)
    torch.manual_seed(0)
    module = (Accumulating() if kind == "sgd" else example.Classifier()).double()
    trainer.fit(module, loader, uneven, ckpt_path=resume)
    logged += [trainer.validate(module, uneven, verbose=False)[0]["accuracy"], trainer.global_step]
    return spmd.state_dict(module), logged


def by_itself(rank: int, world: int, run: Callable[..., Any], *args: Any) -> Any:
    """``run(*args)`` in a process that is no rank."""
    return run(*args)


def job(rank: int, world: int, folder: Path, mode: spmd.ParallelMode, resume: Path | None, kind: str) -> Found:
    with launched(rank, world):
        return train(folder, world, mode, resume, kind)


def assert_equal(found: Found, expected: Found) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-11)
    assert len(found[1]) == len(expected[1])
    assert found[1] == pytest.approx(expected[1], rel=1e-6)  # Lightning sums metrics in fp32


MODES = {
    "fully_shard": spmd.DataParallel("fully_shard"),
    "replicate": spmd.DataParallel("replicate"),
    "zero1": spmd.DataParallel("replicate", shard_optimizer=True),
}


@pytest.mark.parametrize(
    "kind, mode, other",
    [
        ("sgd", "fully_shard", "replicate"),
        pytest.param("adamw", "zero1", "fully_shard", marks=pytest.mark.exhaustive),
    ],
)
def test_a_trainer_trains_evaluates_saves_and_resumes_as_on_one_device(
    kind: str, mode: str, other: str, ranks: Ranks, tmp_path: Path
) -> None:
    (expected,) = ranks.run(1, by_itself, train, tmp_path / "plain", 1, None, None, kind, process_group=False)
    for found in ranks.run(2, job, tmp_path, MODES[mode], None, kind):
        assert_equal(found, expected)
    after_one = 3 * 2 + 1  # numbers that the first epoch logs
    for found in ranks.run(1, job, tmp_path / "resumed", MODES[other], tmp_path / "epoch=0.ckpt", kind):  # of two
        assert_equal(found, (expected[0], expected[1][after_one:]))
    resumed = tmp_path, 1, None, tmp_path / "epoch=0.ckpt", kind
    (found,) = ranks.run(1, by_itself, train, *resumed, process_group=False)
    assert_equal(found, (expected[0], expected[1][after_one:]))


def named_once() -> None:
    from spmd.integrations.lightning import _own_rows_named

    logged: list[Any] = []

    class Module(nn.Module):
        def log(self, name: str, value: Any, **options: Any) -> None:
            logged.append(name)

    module, named = Module(), set[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 0}.items():
            patch.setattr(torch.distributed, name, lambda value=value: value)
        with pytest.warns(UserWarning) as caught, _own_rows_named(module, named):
            for _ in range(2):
                module.log("own", 1.0)
                module.log("all", 1.0, sync_dist=True)
    (warning,) = caught
    assert "own is logged of the rows of one rank" in str(warning.message) and warning.filename == __file__
    assert logged == ["own", "all"] * 2 and "log" not in vars(module)


def test_what_evaluation_logs_of_the_rows_of_one_rank_is_named_once(ranks: Ranks) -> None:
    ranks.run(1, by_itself, named_once, process_group=False)


def fit_by_hand(folder: Path, world: int, mode: spmd.ParallelMode | None, resume: bool) -> Found:
    """The weights and losses of a loop by hand; ``mode`` None: Lightning's own Fabric."""
    import lightning.fabric
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from spmd.integrations.lightning import Fabric

    kind: Any = lightning.fabric.Fabric if mode is None else Fabric
    fabric = kind(accelerator="cpu", devices=world)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(BY_HAND, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = TensorDataset(x)
    sampler = DistributedSampler(rows, world, fabric.global_rank, shuffle=False)
    loader = fabric.setup_dataloaders(DataLoader(rows, 8 // world, sampler=sampler), use_distributed_sampler=False)

    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, updates: bool) -> Tensor:
        with fabric.no_backward_sync(model, enabled=not updates):
            loss = F.softplus(model(x)).mean()
            fabric.backward(loss / 3)
        if updates:
            fabric.clip_gradients(model, optimizer, max_norm=0.02)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def scores(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    train = step if mode is None else spmd.compile(step, parallel_mode=mode)
    predict = scores if mode is None else spmd.compile(scores, parallel_mode=mode)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batch": -1}
    found = []
    if resume:
        fabric.load(folder / "state.ckpt", state)
    for k, (x,) in enumerate(loader):
        if resume and k <= state["batch"]:
            continue
        updates = k in (2, 3)  # the last accumulation has one batch
        found.append(train(model, optimizer, x, updates).item())
        if updates:
            scheduler.step()
        if k == 1:
            fabric.save(folder / "state.ckpt", {**state, "batch": k})
    found += [fabric.all_gather(predict(model, x)).sum().item() for (x,) in loader] + scheduler.get_last_lr()
    return spmd.state_dict(model), found


def job_by_hand(rank: int, world: int, folder: Path, mode: spmd.ParallelMode, resume: bool) -> Found:
    with launched(rank, world):
        return fit_by_hand(folder, world, mode, resume)


def test_fabric_trains_saves_and_resumes_as_on_one_device(ranks: Ranks, tmp_path: Path) -> None:
    for mode, resume in (("fully_shard", False), ("replicate", True)):  # from the middle of an accumulation
        plain = tmp_path / "plain", 1, None, resume
        (expected,) = ranks.run(1, by_itself, fit_by_hand, *plain, process_group=False)
        for found in ranks.run(2, job_by_hand, tmp_path / "ranks", MODES[mode], resume):
            assert_equal(found, expected)


def apart_job(rank: int, world: int, folder: Path) -> None:
    import lightning.pytorch as lightning
    from torch.utils.data import DataLoader, TensorDataset

    from spmd.integrations.lightning import Fabric, Strategy

    class ByHand(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = nn.Linear(3, 2), False

        def training_step(self, batch: Any) -> None:
            self.manual_backward(self.net(batch[0]).sum())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with launched(rank, world):
        fabric = Fabric(accelerator="cpu", devices=world)
        fabric.launch()
        with pytest.raises(spmd.SpmdError, match=r"fabric.backward ran on 2 ranks outside of a compiled step"):
            fabric.backward(nn.Linear(3, 1)(torch.ones(2, 3)).sum())
        model = fabric.setup(nn.Linear(3, 1))
        with (
            pytest.raises(spmd.SpmdError, match=r"was called inside of spmd.no_sync: enter it in the step"),
            fabric.no_backward_sync(model),
        ):
            spmd.compile(lambda model, x: fabric.backward(model(x).sum()))(model, torch.ones(2, 3))
        settings = {"accelerator": "cpu", "devices": world, "default_root_dir": folder, "max_steps": 2}
        settings |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(strategy=Strategy(), enable_checkpointing=False, **settings)
        with pytest.raises(
            spmd.SpmdError, match=r"manual_backward ran on 2 ranks .* self.step = spmd.compile\(self.step\)"
        ):
            trainer.fit(ByHand(), DataLoader(TensorDataset(torch.ones(4, 3))))


def test_ranks_that_would_train_apart_get_the_line_to_add(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, apart_job, tmp_path)


def refused(folder: Path) -> None:
    import lightning.pytorch as lightning
    from torch.utils.data import DataLoader, TensorDataset
    from torchmetrics.classification import MulticlassAccuracy

    from spmd.integrations.lightning import Fabric, Strategy

    class Module(lightning.LightningModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None: ...
        def training_step(self, batch: Any) -> Any: ...
        def configure_optimizers(self) -> Any: ...

    class Measuring(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.right = nn.Linear(3, 2), MulticlassAccuracy(2)

        def training_step(self, batch: Any) -> Any:
            scores = self.net(batch[0])
            self.right.update(scores, batch[1])
            return F.cross_entropy(scores, batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(module: lightning.LightningModule, *callbacks: lightning.Callback) -> None:
        settings = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "max_steps": 2}
        settings |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(strategy=Strategy(), callbacks=list(callbacks), **settings)
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))))

    with pytest.raises(ValueError, match=r"Module.on_before_optimizer_step would run within the compiled step"):
        fit(Module())
    with pytest.raises(ValueError, match="training_step updates a metric of torchmetrics"):
        fit(Measuring())
    with pytest.raises(ValueError, match="StochasticWeightAveraging runs epochs without backward"):
        fit(Measuring(), lightning.callbacks.StochasticWeightAveraging(0.1))
    with pytest.raises(ValueError, match="precision='bf16-mixed' wraps the forward of models"):
        Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")


def test_what_would_run_within_the_step_or_beside_it_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, by_itself, refused, tmp_path, process_group=False)
