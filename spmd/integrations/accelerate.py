"""``Accelerator`` of accelerate for compiled steps: the program communicates, so that no model is wrapped in DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .._torch import tree_flatten
from ..annotations.no_sync import no_sync
from ..checkpoints.load import load
from ..checkpoints.save import save
from ..unsharded import unshard
from .uncompiled import check_compiled, is_traced
from .uneven import check_even


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's ``Accelerator``, for train steps that ``spmd.compile`` compiles.

    ``prepare`` wraps no model in DDP; optimizers, schedulers and data loaders it wraps as accelerate does, and a step
    takes them as arguments or from where it is written. ``accumulate``, ``gather_for_metrics``, ``print`` and trackers
    work as ever; ``accumulate`` may stand in the step or around its call, and in the step it leaves gradients pending
    sums (``spmd.no_sync``) until the micro-batch that updates. ``backward`` and clipping stand in the step.
    ``save_state`` and ``load_state`` use ``spmd.save`` and ``spmd.load``: any placement, any number of ranks, and the
    number of the micro-batch; as with accelerate, gradients are not saved. All ranks call them, and
    ``get_state_dict``, whose tensors are whole.

    On more than one rank, ``backward`` outside of a compiled step raises ``SpmdError``: nothing would average the
    gradients. A bare ``loss.backward()`` cannot be seen, and ranks that call it train apart. A data loader of which
    some ranks get a batch more than others (``even_batches=False``) raises ``ValueError`` where a model trains on it.

    Raises ``ValueError`` for ``mixed_precision="fp16"``, whose scaler would stay outside of the step: pass a
    ``torch.amp.GradScaler`` to the step instead; and for the plugins of DeepSpeed, FSDP and Megatron.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scaler is not None:
            raise ValueError(
                'mixed_precision="fp16" keeps its GradScaler outside of the compiled step: use "bf16", or pass a '
                "torch.amp.GradScaler of your own to the step"
            )
        if str(self.distributed_type).rpartition(".")[2] in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP"):
            raise ValueError(
                f"{self.distributed_type} places the model itself: leave its plugin out, and name the placement in "
                'spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))'
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move the model to this rank's device and add autocast, as accelerate does; no DDP."""
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)  # type: ignore[no-any-return]

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Cut a data loader for the ranks, as accelerate does, and check that these get as many batches to train on."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        prepared.begin = partial(self._begin, prepared)
        return prepared  # type: ignore[no-any-return]

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Make a data loader without the first batches, as accelerate does, of which ranks get as many as before."""
        skipped = super().skip_first_batches(dataloader, num_batches)
        skipped.begin = partial(self._begin, skipped, dataloader)
        return skipped  # type: ignore[no-any-return]

    def _begin(self, loader: Any, whole: Any = None) -> None:
        """Begin an epoch; with a model that trains, every rank has to have as many batches.

        ``whole``: the data loader of whose batches ``loader`` leaves out the first.
        """
        if torch.is_grad_enabled() and any(model.training for model in self._models):
            check_even(whole or loader, "Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=True))")
        type(loader).begin(loader)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass as accelerate does. Raises ``SpmdError`` outside of a compiled step on many ranks."""
        check_compiled("accelerator.backward", self.num_processes)
        super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave gradients of ``model`` pending sums over the ranks, in a compiled step; elsewhere nothing changes."""
        if self.num_processes > 1 and is_traced():
            with no_sync(model):
                yield
        else:
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Raise ``ValueError`` on many ranks: a compiled step needs every rank, also one that has no batch left."""
        if self.num_processes > 1:
            raise ValueError(
                "join_uneven_inputs lets ranks go on whose peers have no batch left, and a compiled step needs every "
                "rank: leave it out, and keep even_batches=True, or a number of batches that the ranks divide"
            )
        yield

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all ranks, as accelerate does. Raises ``ValueError`` for shapes that differ."""
        if self.num_processes > 1 and not self.even_batches:
            own = [tuple(each.shape) for each in tree_flatten(tensor)[0] if isinstance(each, Tensor)]
            shapes = gather_object([own])
            if any(each != own for each in shapes):
                raise ValueError(
                    f"gather needs tensors of equal shapes, and ranks have {shapes}, as the last batch with "
                    "even_batches=False: pad them first (accelerator.pad_across_processes), or prepare the loader of "
                    "an evaluation with accelerator.even_batches = True, whose repeated rows gather_for_metrics drops"
                )
        return super().gather(tensor)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors, copied, on every rank."""
        with unshard(model, writeback=False):
            return {name: _copied(value) for name, value in model.state_dict().items()}

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, **others: Any) -> str:
        """Save what was prepared or registered to ``output_dir``. Raises ``TypeError`` for options of accelerate's."""
        save(_folder(output_dir, others), **self._prepared())
        return str(output_dir)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, **others: Any) -> None:
        """Load what ``save_state`` wrote, in any placement. Raises ``TypeError`` for options of accelerate's."""
        folder, prepared = _folder(input_dir, others), self._prepared()
        accumulation = {name: prepared.pop(name) for name in [*prepared] if name.startswith("accumulation")}
        load(folder, **prepared)
        load(folder, strict=False, **accumulation)  # checkpoints of before have none

    def _prepared(self) -> dict[str, Any]:
        optimizers = [each.optimizer for each in self._optimizers]
        schedulers = [each.scheduler for each in self._schedulers]
        kinds = {"model": self._models, "optimizer": optimizers, "scheduler": schedulers}
        kinds |= {"custom": self._custom_objects, "accumulation": [_Accumulation(self)]}
        return {f"{kind}_{k}": each for kind, found in kinds.items() for k, each in enumerate(found)}


@dataclass(frozen=True)
class _Accumulation:
    """The number of the micro-batch in an accumulation, for checkpoints."""

    accelerator: Accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self.accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.accelerator.step = state["step"]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _folder(folder: str | os.PathLike[str] | None, others: dict[str, Any]) -> Path:
    if folder is None or others:
        raise TypeError(f"expected a folder and nothing else, got {folder!r} and {sorted(others)}: see spmd.save")
    return Path(folder)
