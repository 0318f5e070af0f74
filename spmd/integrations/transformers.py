"""``Trainer`` of transformers with the whole step compiled: forward, backward, clipping and the update."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..annotations.no_sync import no_sync
from ..checkpoints.load import load
from ..checkpoints.save import save
from ..decorator import compile
from ..unsharded import unshard
from .uneven import check_even

_STATE = "spmd"  # the folder in a checkpoint of Trainer's that has model, optimizer and scheduler, in parts


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Transformers' ``Trainer``, with the numbers of one device that holds the batches of all ranks.

    ``compile_options`` go to ``spmd.compile``: ``{"parallel_mode": spmd.DataParallel("fully_shard")}``. Callbacks,
    logging, evaluation, prediction, checkpoints and resuming work as ever; a checkpoint can be resumed with another
    mode or number of ranks. The update is a part of the step: ``on_pre_optimizer_step`` comes after it.

    To compute with the model outside of the loop (``generate``), enter ``with spmd.unshard(model):`` on all ranks.
    Raises ``ValueError`` for ``fp16=True``, whose scaler would stay outside of the step, for ``fsdp=`` and
    ``deepspeed=``, which place the model themselves, and for a data loader of which some ranks would get a batch more
    than others (``accelerator_config={"even_batches": False}``).
    """

    def __init__(self, *args: Any, compile_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("fp16", "fsdp", "deepspeed"):
            if getattr(self.args, name, None):
                raise ValueError(
                    f"TrainingArguments({name}=...) does outside of the step what the compiled step does: use bf16=True"
                    ' or fp32, and compile_options={"parallel_mode": spmd.DataParallel("fully_shard")}'
                )
        options = compile_options or {}
        self._accumulates = compile(self._accumulate_pending, **options)
        self._trains = compile(self._train, **options)
        self._norm: Tensor | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; it wraps no model in DDP, since the step communicates."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the scheduler; the loop's own update, after the step has updated, does nothing from here on."""
        self.optimizer.step = MethodType(_updated, self.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_train_dataloader(self) -> Any:
        """Make the data loader for training. Raises ``ValueError`` if some ranks would get a batch more than others."""
        loader = super().get_train_dataloader()
        check_even(loader, 'TrainingArguments(accelerator_config={"even_batches": True})')
        return loader

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run one compiled step; returns the loss over the batches of all ranks."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        count = self._items(num_items_in_batch)
        if self.accelerator.sync_gradients:
            loss, self._norm = self._trains(model, self.optimizer.optimizer, inputs, count)
        else:
            loss = self._accumulates(model, inputs, count)
        return loss

    def _items(self, count: Tensor | int | None) -> Tensor | None:
        """The number of items to divide a sum over all ranks by; None for a mean, which the step takes over all."""
        if count is None:
            return None
        count = torch.as_tensor(count, device=self.args.device)
        if not self.args.average_tokens_across_devices:
            return self.accelerator.reduce(count)  # type: ignore[no-any-return]
        scale: int = self.accelerator.num_processes
        return count * scale  # ``compute_loss`` scales by it, for the averages of DDP

    def _accumulate(self, model: nn.Module, inputs: dict[str, Any], count: Tensor | None) -> Tensor:
        loss = self.compute_loss(model, inputs, num_items_in_batch=count)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and count is not None)
        if not is_scaled:
            loss = loss / self.current_gradient_accumulation_steps
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def _accumulate_pending(self, model: nn.Module, inputs: dict[str, Any], count: Tensor | None) -> Tensor:
        with no_sync(model):
            return self._accumulate(model, inputs, count)

    def _train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any], count: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        loss = self._accumulate(model, inputs, count)
        limit = self.args.max_grad_norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit if limit and limit > 0 else float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | None:
        return self._norm

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with whole parameters; all ranks enter it."""
        with unshard(self.model, writeback=False):
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the whole model for ``from_pretrained``; all ranks call it, and the first one writes."""
        with unshard(self.model, writeback=False):
            super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(os.path.join(output_dir, _STATE), **self._state())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load(os.path.join(checkpoint, _STATE), **self._state())

    def _state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer.optimizer, "scheduler": self.lr_scheduler}


def _updated(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
    """Leave all as it is: the compiled step has updated."""
