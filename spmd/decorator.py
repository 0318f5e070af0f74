"""``spmd.compile``: options, checked, and the step that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from torch import fx, nn

from passes import Pass

from .interpreter.keywords import checks_keywords
from .lowering.backends import Backend
from .modes.base import ParallelMode
from .modes.data_parallel import DataParallel
from .modes.shares import StyleName
from .options import Options
from .override import Override
from .step import CompiledStep

P = ParamSpec("P")
R = TypeVar("R")


class CompileOptions(TypedDict, total=False):
    """The keyword options of ``compile``, for type checkers."""

    passes: Sequence[Pass] | None
    backend: Backend
    dump: str | Path | None
    timeout: float | None
    keep_freed_memory: bool
    cuda_graphs: bool
    max_programs: int | None
    program: str | Path | None
    memory: int | str | None
    dynamic: Mapping[str, Mapping[int, str]] | None
    check: str | None
    cache: str | Path | None


class Decorate(Protocol):
    """The result of ``compile`` without a function: it takes one, and returns a compiled step of the same types."""

    def __call__(self, function: Callable[P, R], /) -> CompiledStep[P, R]:
        """Compile ``function``."""
        ...


@overload
def compile(
    function: Callable[P, R],
    /,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | StyleName | None = None,
    *,
    module_override: Sequence[Override] | None = None,
    **options: Unpack[CompileOptions],
) -> CompiledStep[P, R]: ...


@overload
def compile(
    module_override: Sequence[Override] | None = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | StyleName | None = None,
    **options: Unpack[CompileOptions],
) -> Decorate: ...


@checks_keywords("spmd.compile", parallel_mode=DataParallel)
def compile(
    given: Any = None,
    /,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | StyleName | None = None,
    *,
    module_override: Sequence[Override] | None = None,
    passes: Sequence[Pass] | None = None,
    backend: Backend = "aten",
    dump: str | Path | None = None,
    timeout: float | None = None,
    keep_freed_memory: bool = False,
    cuda_graphs: bool = False,
    max_programs: int | None = None,
    program: str | Path | None = None,
    memory: int | str | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    check: str | None = None,
    cache: str | Path | None = None,
) -> CompiledStep[..., Any] | Decorate:
    """Compile a train step into one graph that runs on every device of a mesh.

    Use it bare (``@spmd.compile``), with arguments (``@spmd.compile(parallel_mode=...)``), or on a function
    (``spmd.compile(step, parallel_mode=...)``). The compiled step computes what the plain step computes on one device
    that holds the whole batch.

    - ``given``: the function, or ``module_override`` by position.
    - ``module_override``: a list of ``Override``.
    - ``gm_transformation``: called with the final graph of every program, once; returns the graph to run.
    - ``parallel_mode``: where tensors live; None means ``DataParallel("replicate")``. A name of a style, such as
      ``"fsdp"``, is the mode ``DataParallel("fsdp")``.
    - ``passes``: the passes to run instead of the mode's own and of its ``custom_passes``; ``()`` runs none.
    - ``backend``: ``"aten"``; ``"inductor"``, which makes kernels of what lies between matrix products, where they are
      quicker; or for regions ``torch.compile``, ``callable(gm, example_inputs) -> callable``.
    - ``dump``: a folder for the graph of every stage; the environment variable ``SPMD_DUMP`` does the same.
    - ``timeout``: seconds that a rank waits for the others at a call, then all raise; None: as for a collective.
    - ``keep_freed_memory``: let this process keep up to 64 MB that ops free, for the next call (Linux, CPU).
    - ``cuda_graphs``: launch each half of a step (gradients, update) as one CUDA graph from its third call on; numbers
      such as learning rates are read from the device. The report says what cannot be captured.
    - ``max_programs``: keep no more than this number; the one run longest ago goes. None: all, but 64 of one capture.
    - ``program``: a step's folder in a dump. Its final programs, which you may have edited, run in place of those made,
      with the same inputs, outputs and mesh. They are code, and what they compute is for ``spmd.verify`` to check.
    - ``memory``: what a rank may hold in a step, state included (``"600MB"``); backward computes again what is over.
    - ``dynamic``: names of sizes that change, as ``{"tokens": {1: "time"}}``; None: a second size shows which do.
    - ``cache``: a folder in which compiled steps are kept for later processes, ``"on"`` for the user's cache directory,
      ``"off"``, or ``"verify"`` to compile all the same and compare; None: as ``SPMD_CACHE`` says, else ``"on"``.
    - ``check``: ``"first"`` compares each program's first call, on copies, with the program before its passes;
      ``"nan"`` waits for each call, and raises ``SpmdError`` if an output of a module, a gradient or a parameter is
      NaN or Inf.

    Raises ``TypeError`` or ``ValueError`` for other arguments. Calls raise ``CaptureError``, ``PlacementError``,
    ``PartitionError``, ``PassError``, ``MemoryBudgetError`` or ``RankMismatchError``, and leave state as it was.
    """
    bare = callable(given) and not isinstance(given, (nn.Module, type, Override))
    if given is not None and not bare and module_override is not None:
        raise TypeError(f"expected a function to compile, or none, beside module_override=, got {given!r}")
    options = Options.check(
        module_override=module_override if bare or given is None else given,
        gm_transformation=gm_transformation,
        parallel_mode=parallel_mode,
        passes=passes,
        backend=backend,
        dump=dump,
        timeout=timeout,
        keep_freed_memory=keep_freed_memory,
        cuda_graphs=cuda_graphs,
        max_programs=max_programs,
        program=program,
        memory=memory,
        dynamic=dynamic,
        check=check,
        cache=cache,
    )

    def decorate(function: Callable[P, R]) -> CompiledStep[P, R]:
        if not callable(function):
            raise TypeError(f"expected a function to compile, got {function!r}")
        return CompiledStep(function, options)

    return decorate(given) if bare else decorate
