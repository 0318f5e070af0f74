"""transformers' Trainer over compiled steps has the numbers of its own on one device with the batches of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spmd

from ...harness.pool import Ranks
from .launched import launched

pytest.importorskip("accelerate")
pytestmark = pytest.mark.processes

ROWS, TRAINED, WIDTH, CLASSES = 46, 22, 6, 5
State = dict[str, Tensor]


class Net(nn.Module):
    """Takes transformers' count of labels, which has the first of each row, too; the loss has not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, CLASSES))

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        scores = self.net(x)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(scores[:, 1:].transpose(1, 2), labels[:, 1:], reduction=reduction)
        return {"loss": loss / (1 if num_items_in_batch is None else num_items_in_batch), "logits": scores}


def rows() -> list[dict[str, Tensor]]:
    """Rows of 3 labels, of which some do not count: unequally many on each rank."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 3, WIDTH, generator=random, dtype=torch.float64)
    labels = torch.randint(CLASSES, (ROWS, 3), generator=random)
    labels[torch.rand(ROWS, 3, generator=random) < 0.4] = -100
    return [{"x": each, "labels": label} for each, label in zip(x, labels, strict=True)]


def train(
    folder: Path, world: int, mode: spmd.ParallelMode | None, resume: str | None = None, **settings: Any
) -> tuple[State, list[float]]:
    """The weights after two epochs, of which the second ends with a short batch, and all losses that were logged."""
    import transformers

    from spmd.integrations.transformers import Trainer

    torch.manual_seed(0)
    settings |= {"per_device_train_batch_size": 8 // world, "num_train_epochs": 2, "learning_rate": 0.05}
    settings |= {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_steps": 1, "max_grad_norm": 0.3}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "per_device_eval_batch_size": 16 // world}
    arguments = transformers.TrainingArguments(str(folder), **settings)
    given: dict[str, Any] = {"model": Net().double(), "args": arguments, "train_dataset": rows()[:TRAINED]}
    given["eval_dataset"] = rows()[:16]
    options = {"compile_options": {"parallel_mode": mode}}
    trainer = Trainer(**given, **options) if mode is not None else transformers.Trainer(**given)
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    with spmd.unshard(trainer.model, writeback=False):
        weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    keys = ("loss", "grad_norm", "eval_loss")
    return weights, [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


def job(rank: int, world: int, folder: Path, style: str, resume: str | None, settings: dict[str, Any]) -> Any:
    with launched(rank, world):
        mode = spmd.DataParallel("replicate", shard_optimizer=True) if style == "zero1" else spmd.DataParallel(style)
        return train(folder, world, mode, resume, **settings)


def assert_equal(found: tuple[State, list[float]], expected: tuple[State, list[float]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-11)
    assert len(found[1]) == len(expected[1])
    assert found[1] == pytest.approx(expected[1], rel=1e-6)  # Trainer sums losses in fp32


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "style, other, settings",
    [
        pytest.param("fully_shard", "replicate", {"optim": "sgd"}, marks=pytest.mark.exhaustive),
        # 3 batches: the last accumulation of an epoch has one
        ("zero1", "fully_shard", {"optim": "sgd", "gradient_accumulation_steps": 2}),
        pytest.param("zero1", "replicate", {"optim": "adamw_torch"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_trainer_trains_evaluates_saves_and_resumes_as_on_one_device(
    ranks: Ranks, tmp_path: Path, style: str, other: str, settings: dict[str, Any]
) -> None:
    settings = {**settings, "accelerator_config": {"even_batches": False}}  # no row twice
    expected = train(tmp_path / "plain", 1, None, **settings)
    folder = tmp_path / "ranks"
    for found in ranks.run(2, job, folder, style, None, settings):
        assert_equal(found, expected)
    first = min(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for found in ranks.run(1, job, folder, other, first.name, settings):  # of two
        assert_equal(found, expected)


def uneven_job(rank: int, world: int, folder: Path) -> None:
    import transformers

    from spmd.integrations.transformers import Trainer

    with launched(rank, world):
        settings: dict[str, Any] = {"accelerator_config": {"even_batches": False}, "use_cpu": True, "report_to": []}
        arguments = transformers.TrainingArguments(str(folder), per_device_train_batch_size=4, **settings)
        with pytest.raises(ValueError, match=r"some of 2 ranks get a batch more .*\(it has 11 batches\)"):
            Trainer(model=Net(), args=arguments, train_dataset=rows()[:44]).get_train_dataloader()


def test_a_data_loader_with_a_batch_more_for_some_ranks_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, uneven_job, tmp_path)


@pytest.mark.usefixtures("alone")
def test_what_trainer_would_do_outside_of_the_step_is_refused(tmp_path: Path) -> None:
    import transformers

    from spmd.integrations.transformers import Trainer

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    arguments.fp16 = True
    with pytest.raises(ValueError, match=r"TrainingArguments\(fp16=...\) does outside of the step"):
        Trainer(model=Net(), args=arguments)
