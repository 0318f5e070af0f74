"""``Accelerator`` of accelerate for compiled steps: the program communicates, so that no model is wrapped in DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import nn

from ..checkpoints.load import load
from ..checkpoints.save import save
from ..unsharded import unshard


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """As accelerate's, for train steps that ``spmd.compile`` compiles.

    ``prepare`` returns models and optimizers as they are, so that a step may take them as arguments. Data loaders are
    cut for the ranks, ``accumulate``, ``gather_for_metrics``, ``print`` and trackers work as ever. ``backward`` and
    ``clip_grad_norm_`` may stand in the step. ``save_state`` and ``load_state`` use ``spmd.save`` and ``spmd.load``:
    any placement, any number of ranks. All ranks call them, and ``get_state_dict``, whose tensors are whole.

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

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Note the optimizer, and return itself: the step updates, or not, and needs no wrapper that decides."""
        wrapped = super().prepare_optimizer(optimizer, device_placement=device_placement)
        return wrapped.optimizer  # type: ignore[no-any-return]

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
        load(_folder(input_dir, others), **self._prepared())

    def _prepared(self) -> dict[str, Any]:
        optimizers = [each.optimizer for each in self._optimizers]
        schedulers = [each.scheduler for each in self._schedulers]
        kinds = {"model": self._models, "optimizer": optimizers, "scheduler": schedulers}
        kinds["custom"] = self._custom_objects
        return {f"{kind}_{k}": each for kind, found in kinds.items() for k, each in enumerate(found)}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _folder(folder: str | os.PathLike[str] | None, others: dict[str, Any]) -> Path:
    if folder is None or others:
        raise TypeError(f"expected a folder and nothing else, got {folder!r} and {sorted(others)}: see spmd.save")
    return Path(folder)
