"""Lightning with the whole step compiled: ``Strategy`` for its Trainer, and ``Fabric``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.fabric
import lightning.pytorch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from ..annotations.no_sync import no_sync
from ..checkpoints.whole import state_dict
from ..decorator import compile
from ..interpreter.source_lines import warn_user
from ..unsharded import unshard
from .uncompiled import check_compiled

_WITHIN = """backward on_before_backward on_after_backward on_before_optimizer_step on_before_zero_grad
optimizer_zero_grad configure_gradient_clipping""".split()  # hooks at moments that lie within the compiled step


class Strategy(DDPStrategy):  # type: ignore[misc]
    """A strategy of ``Trainer`` with the numbers of one device that holds the batches of all ranks.

    ``compile_options`` go to ``spmd.compile``: ``{"parallel_mode": spmd.DataParallel("fully_shard")}``; the other
    arguments are those of ``DDPStrategy``. ``training_step``, backward, clipping by ``gradient_clip_val`` and the
    update are one program; no model is wrapped. What ``training_step`` logs is that of all ranks' rows; so is what
    evaluation logs with ``sync_dist=True``, and without it a warning says that it is not. Schedulers, callbacks,
    loggers, evaluation, checkpoints and ``ckpt_path=`` work as ever: files hold whole tensors, so that any strategy,
    mode or number of ranks reads them.

    With manual optimization, compile a method of your own that has forward, ``manual_backward`` and the update. On more
    than one rank, ``manual_backward`` outside of a compiled step raises ``SpmdError``: nothing would average the
    gradients. A bare ``loss.backward()`` cannot be seen, and ranks that call it train apart.

    To compute with the model after ``fit``, enter ``with spmd.unshard(model):`` on all ranks. Raises ``ValueError`` for
    ``precision="16-mixed"``, whose scaler would stay outside of the step, where the module or a callback has a hook at
    a moment within it, such as ``on_before_optimizer_step``, for ``StochasticWeightAveraging``, and where
    ``training_step`` updates a metric of torchmetrics, which would add up over ranks what is of all ranks' rows.
    """

    def __init__(self, *, compile_options: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        options = compile_options or {}
        self.accumulates, self.trains = compile(accumulate_batch, **options), compile(train_batch, **options)
        self._updates = False  # whether the training step that comes next is the last one before an update
        self._whole = ExitStack()  # while evaluation sees the whole model
        self._named: set[str] = set()  # values that were warned of

    def setup(self, trainer: lightning.pytorch.Trainer) -> None:
        """Move the model to its device, and make the optimizers; nothing is wrapped."""
        module = self.lightning_module
        if module.automatic_optimization:
            _check_hooks(module, trainer.callbacks)
        _check_precision(self.precision_plugin)
        super(DDPStrategy, self).setup(trainer)
        if not trainer.training and not any(isinstance(each, DTensor) for each in module.parameters()):
            for each in module.state_dict().values():
                dist.broadcast(each, 0)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def on_train_start(self) -> None:
        """Leave backward and zeroing to the compiled step."""
        self.lightning_module.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward = True

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        """Run the training step that updates; a module of manual optimization updates as ever."""
        if not self.lightning_module.automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._updates = True
        try:
            return closure()
        finally:
            self._updates = False

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward of manual optimization. Raises ``SpmdError`` outside of a compiled step, on many ranks."""
        check_compiled("self.manual_backward", self.world_size, "self.step = spmd.compile(self.step)")
        return super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, *batch_idx: int) -> Any:
        """Run one compiled step, and log what it has logged; returns what ``training_step`` returned."""
        module, precision = self.lightning_module, self.precision_plugin
        if not module.automatic_optimization:
            return super().training_step(batch, *batch_idx)
        trainer, metrics = module.trainer, [each for each in module.modules() if isinstance(each, Metric)]
        updates, count = [each.update_count for each in metrics], trainer.accumulate_grad_batches
        if self._updates:
            clip = trainer.gradient_clip_val or 0.0, trainer.gradient_clip_algorithm or "norm"
            output, logged = self.trains(module, self.optimizers[0], precision, batch, batch_idx, count, *clip)
        else:
            output, logged = self.accumulates(module, precision, batch, batch_idx, count)
        if updates != [each.update_count for each in metrics]:
            raise ValueError(
                "training_step updates a metric of torchmetrics, which would add up over the ranks what is of all rows "
                "already: log a tensor, or return the scores, and update the metric in on_train_batch_end"
            )
        for name, value, given, options in logged:
            module.log(name, value, *given, **options)
        return output

    def _show_whole(self) -> None:
        self._whole.enter_context(unshard(self.lightning_module, writeback=False))
        self._whole.enter_context(_own_rows_named(self.lightning_module, self._named))

    def _hide_whole(self) -> None:
        self._whole.close()

    on_validation_start = on_test_start = on_predict_start = _show_whole
    on_validation_end = on_test_end = on_predict_end = _hide_whole

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as the base class does, without cutting a mean of whole numbers, as of rows that weigh means."""
        counts = isinstance(tensor, Tensor) and reduce_op in ("mean", "avg") and not tensor.is_floating_point()
        return super().reduce(tensor.double() if counts else tensor, group, reduce_op)

    def on_exception(self, exception: BaseException) -> None:
        """Split the model again, if evaluation raised."""
        self._hide_whole()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors, on every rank."""
        return state_dict(self.lightning_module)  # type: ignore[no-any-return]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole tensors, on every rank."""
        return state_dict(self.lightning_module, getattr(optimizer, "_optimizer", optimizer))[1]  # type: ignore[no-any-return]


class Fabric(lightning.fabric.Fabric):  # type: ignore[misc]
    """Lightning's ``Fabric``, for train steps that ``spmd.compile`` compiles.

    ``setup`` moves models to the device, and returns them and their optimizers as they are, so that a step may take
    them as arguments. ``launch``, ``setup_dataloaders``, ``print``, ``all_reduce`` and loggers work as ever.
    ``backward``, ``clip_gradients`` and ``no_backward_sync`` stand in the step; the last one leaves gradients pending
    sums (``spmd.no_sync``). ``save`` writes whole tensors, and ``load`` reads them in any placement; all ranks call
    them.

    On more than one rank, ``backward`` outside of a compiled step raises ``SpmdError``: nothing would average the
    gradients. A bare ``loss.backward()`` cannot be seen, and ranks that call it train apart. Raises ``ValueError`` for
    a precision other than ``"32-true"``: use ``torch.autocast`` in the step, or ``spmd.MixedPrecisionPolicy``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._precision.precision != "32-true":
            raise ValueError(
                f"precision={self._precision.precision!r} wraps the forward of models, and this Fabric leaves them as "
                "they are: use torch.autocast in the step, or spmd.MixedPrecisionPolicy"
            )

    def setup(self, module: nn.Module, *optimizers: Optimizer, move_to_device: bool = True, **_: Any) -> Any:
        """Move a model to the device, and return it and its optimizers."""
        if move_to_device:
            module = self.to_device(module)
        return (module, *optimizers) if optimizers else module

    setup_module = setup

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Return the optimizers."""
        return optimizers if len(optimizers) > 1 else optimizers[0]

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Run the backward pass of ``tensor``. Raises ``SpmdError`` outside of a compiled step, on many ranks."""
        check_compiled("fabric.backward", self.world_size)
        tensor.backward(*args, **kwargs)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Leave gradients of ``module`` pending sums over the ranks, in the compiled step."""
        return no_sync(module) if enabled and self.world_size > 1 else nullcontext()

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Clip the gradients of ``optimizer`` by value, or by their norm, which is returned; in the compiled step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if clip_val is not None and max_norm is None:
            nn.utils.clip_grad_value_(parameters, clip_val)
            return None
        if clip_val is not None or max_norm is None:
            raise ValueError(f"expected clip_val or max_norm, got clip_val={clip_val} and max_norm={max_norm}")
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def save(self, path: Any, state: dict[str, Any], filter: dict[str, Any] | None = None) -> None:
        """Save models and optimizers whole; those of an optimizer under torch's numbers."""
        super().save(path, {name: _whole(each) for name, each in state.items()}, filter=filter)


def _whole(thing: Any) -> Any:
    if isinstance(thing, nn.Module):
        return state_dict(thing)
    return state_dict(nn.Module(), thing)[1] if isinstance(thing, Optimizer) else thing


def accumulate_batch(
    module: Any, precision: Precision, batch: Any, batch_idx: tuple[int, ...], count: int
) -> tuple[Any, Any]:
    """The step of a batch before the last one of an update: gradients add up on each rank."""
    with no_sync(module):
        return _forward_and_backward(module, precision, batch, batch_idx, count)


def train_batch(
    module: Any,
    optimizer: Optimizer,
    precision: Precision,
    batch: Any,
    batch_idx: tuple[int, ...],
    count: int,
    clip: float,
    algorithm: Any,
) -> tuple[Any, Any]:
    """The step that updates."""
    output, logged = _forward_and_backward(module, precision, batch, batch_idx, count)
    precision.clip_gradients(optimizer, clip, algorithm)
    optimizer.step()
    optimizer.zero_grad()
    return output, logged


def _forward_and_backward(
    module: Any, precision: Precision, batch: Any, batch_idx: tuple[int, ...], count: int
) -> tuple[Any, Any]:
    with _recorded(module) as logged, precision.train_step_context():
        output = module.training_step(batch, *batch_idx)
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise TypeError(f"expected training_step to return a loss, or a dict with one, got {output!r}")
    (loss / count).backward()
    return output, logged


@contextmanager
def _recorded(module: nn.Module) -> Iterator[list[tuple[Any, ...]]]:
    """Record calls of ``module.log``; only Lightning's loop, outside of the step, can carry them out."""
    logged: list[tuple[Any, ...]] = []
    vars(module)["log"] = lambda name, value, *given, **options: logged.append((name, value, given, options))
    try:
        yield logged
    finally:
        del vars(module)["log"]


@contextmanager
def _own_rows_named(module: Any, named: set[str]) -> Iterator[None]:
    """Warn, once for each name, of what evaluation logs of this rank's rows alone."""
    log = module.log

    def checked(name: str, value: Any, *given: Any, **options: Any) -> None:
        is_own = not (options.get("sync_dist") or options.get("rank_zero_only") or isinstance(value, Metric))
        warns = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0  # of ranks that all log it
        if is_own and warns and name not in named:
            named.add(name)
            warn_user(
                f"{name} is logged of the rows of one rank: self.log({name!r}, ..., sync_dist=True) logs the mean over "
                "the rows of all ranks, each batch weighed by its rows"
            )
        log(name, value, *given, **options)

    vars(module)["log"] = checked
    try:
        yield
    finally:
        del vars(module)["log"]


def _check_hooks(module: Any, callbacks: list[Any]) -> None:
    if any(isinstance(each, lightning.pytorch.callbacks.StochasticWeightAveraging) for each in callbacks):
        raise ValueError("StochasticWeightAveraging runs epochs without backward: update an average in training_step")
    for each, base in [
        (module, lightning.pytorch.LightningModule),
        *((c, lightning.pytorch.Callback) for c in callbacks),
    ]:
        for name in _WITHIN:
            if getattr(type(each), name, None) is not getattr(base, name, None):
                raise ValueError(
                    f"{type(each).__name__}.{name} would run within the compiled step: do it in training_step, or with "
                    "manual optimization in a method that you compile"
                )


def _check_precision(plugin: Any) -> None:
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise ValueError('precision="16-mixed" keeps its GradScaler outside of the compiled step: use "bf16-mixed"')
