"""Policies of an annotated module: the dtypes that it computes and communicates in, the memory that its state is in."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from passes import Memory


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a module's forward and backward, and of its communication; None leaves each as it is.

    Parameters, their gradients and optimizer state stay in their own dtype, such as fp32; casts are nodes of the graph.

    - ``param_dtype``: forward and backward compute with parameters cast to it, and split parameters are gathered in it.
    - ``reduce_dtype``: gradients are reduced in it; None means ``param_dtype``.
    - ``output_dtype``: what the module returns is cast to it.
    - ``buffer_dtype``: forward computes with buffers cast to it; what it writes to them is cast back.
    - ``cast_forward_inputs``: floating-point arguments of the module are cast to ``param_dtype``.
    - ``full_precision_in_eval``: in ``eval()`` mode the module computes without casts. Its gradients, if there are any,
      are reduced as in training.
    - ``keep_low_precision_grads``: refused, gradients have the dtype of their parameters.

    Only floating-point tensors are cast. Raises ``ValueError`` for a dtype that is not floating-point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    full_precision_in_eval: bool = False
    keep_low_precision_grads: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if field.name.endswith("dtype"):
                if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
                    raise ValueError(f"expected {field.name} to be a floating-point dtype or None, got {given!r}")
            elif not isinstance(given, bool):
                raise TypeError(f"expected {field.name} to be True or False, got {given!r}")
        if self.keep_low_precision_grads:
            raise ValueError(
                "expected no keep_low_precision_grads=True: gradients have the dtype of their parameters, and torch "
                "refuses others in .grad. reduce_dtype reduces them in low precision; parameters that are in low "
                "precision themselves (model.bfloat16()) have such gradients"
            )

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced, None for their own."""
        return self.reduce_dtype or self.param_dtype


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep a module's parameters, their gradients and optimizer state in host memory.

    Where forward or backward reads a parameter, its part is copied to the device, and then cast and gathered; a
    gradient is copied to the host once it is reduced, and the optimizer runs there. The copies are nodes of the graph.
    On CUDA the parameters must be on the CPU, or on the meta device, before the first step.

    ``pin_memory``: on CUDA, pin what is copied, so that copies run beside compute. Raises ``TypeError`` unless it is a
    bool.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise TypeError(f"expected pin_memory to be True or False, got {self.pin_memory!r}")

    @property
    def memory(self) -> Memory:
        """The memory that parameters are in."""
        return Memory.PINNED if self.pin_memory else Memory.HOST
