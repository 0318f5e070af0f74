"""Tell a backward pass in a compiled step from one outside, where nothing would average gradients over the ranks."""

from __future__ import annotations

import torch.distributed as dist

from passes import SpmdError

from .._torch import get_proxy_mode


def is_traced() -> bool:
    """Whether the code that calls runs while a compiled step is traced."""
    return get_proxy_mode() is not None


def check_compiled(call: str, ranks: int, line: str = "step = spmd.compile(step)") -> None:
    """Raise ``SpmdError`` for ``call``, a backward pass, on more than one of ``ranks`` outside of a compiled step.

    ``line`` is to be added. The plain step of ``spmd.verify`` is none of the ranks.
    """
    is_simulated = dist.is_initialized() and dist.get_backend() == "fake"
    if ranks > 1 and not is_traced() and not is_simulated:
        raise SpmdError(
            f"{call} ran on {ranks} ranks outside of a compiled step, where nothing averages gradients: each rank "
            "would train a model of its own. Put forward, backward and update into a function, and compile it, before "
            f"it is called: {line}"
        )
