"""The default order of passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .analysis.collective_algorithms import BUILT_IN, Table
from .base import Pass
from .cleanup.dead_code import DeadCode
from .cleanup.drop_detach import DropDetach
from .cleanup.drop_profiler import DropProfiler
from .cleanup.fold_views import FoldViews
from .cleanup.merge_equal import MergeEqual
from .communication.bucket_all_gather import BucketAllGather
from .communication.bucket_all_reduce import BucketAllReduce
from .communication.bucket_reduce_scatter import BucketReduceScatter
from .communication.bucket_sizes import MAX_BYTES
from .communication.form_units import FormUnits
from .communication.realise import Realise
from .communication.reshard import Reshard
from .communication.start_early import StartEarly
from .communication.wait_late import WaitLate
from .ir.program import Mesh
from .memory.canonicalize import Canonicalize
from .memory.fold_layout_copies import FoldLayoutCopies
from .memory.one_storage import OneStorage
from .memory.reduce_in_place import ReduceInPlace
from .memory.reuse_memory import ReuseMemory
from .memory.update_in_place import UpdateInPlace
from .regions.form_islands import Choose, FormIslands, take_all
from .regions.form_regions import FormRegions
from .schedule.overlap import Overlap
from .update.device_numbers import DeviceNumbers
from .update.fuse_foreach import FuseForeach
from .update.fuse_update import FuseUpdate
from .update.split_micro_batches import SplitMicroBatches
from .update.update_last import UpdateLast


def default(*, bucket_bytes: int = MAX_BYTES, table: Table = BUILT_IN) -> tuple[Pass, ...]:
    """The default order. Read it from top to bottom; each heading says why its passes stand there.

    ``table``: what communication costs here, as ``python -m spmd calibrate`` measures it. A program that is compiled
    with these passes is partitioned by it, too.
    """
    return (
        # Clean first: everything below matches smaller and more uniform graphs.
        DropProfiler(),
        DropDetach(),
        FoldViews(),
        # Equal views are equal only once they are folded; a collective that serves two readers is bucketed once.
        MergeEqual(),
        DeadCode(),
        # Units of parameters are formed once, for all passes that follow.
        FormUnits(max_bytes=bucket_bytes),
        # What is gathered twice is bucketed twice, and bounds how early a bucket may start.
        Reshard(),
        # Merge collectives before moving them: a bucket moves as one.
        BucketAllGather(max_bytes=bucket_bytes),
        BucketReduceScatter(max_bytes=bucket_bytes),
        BucketAllReduce(max_bytes=bucket_bytes),
        # What a bucket concatenates is known now, and can lie so from the start.
        OneStorage(),
        # A unit is updated by one op; the op needs all of its gradients, so these are merged first.
        FuseUpdate(),
        # Whatever no kernel computes is left for ops over lists.
        FuseForeach(),
        # Collective semantics are fixed from here on; choose implementations, which decide what can be moved.
        Realise(table=table),
        # A collective's start decides where its wait can stand at the earliest.
        StartEarly(),
        WaitLate(),
        # A call that fails while gradients are still to come leaves state as it was.
        UpdateLast(),
        # All that communicates stands where it can: what compute still waits for, other compute may hide.
        Overlap(table=table),
        # Nothing below may reorder: from here on, values are overwritten.
        UpdateInPlace(),
        ReduceInPlace(),
        # The order is final: it says how long each value lives.
        # What can write into planned memory, and in which layout, is settled before memory is planned.
        Canonicalize(),
        FoldLayoutCopies(),
        ReuseMemory(),
    )


def with_numbers_on_device(
    pipeline: Iterable[Pass], names: tuple[str, ...] = ("*",), on_host: tuple[str, ...] = ()
) -> tuple[Pass, ...]:
    """Adapt a pipeline to programs that are captured and replayed: ``names`` but ``on_host`` are read from the device.

    Adds ``DeviceNumbers``, unless it is there. Kernels of optimizers read their rate from the device, and all else from
    the host: numbers that are ``on_host`` leave them what they need. Without any, updates are computed op by op.
    """
    pipeline = tuple(pipeline)
    if any(isinstance(each, DeviceNumbers) for each in pipeline):
        return pipeline
    follows = FuseForeach if on_host else (FuseUpdate, FuseForeach)
    at = next((k for k, each in enumerate(pipeline) if isinstance(each, follows)), _functional(pipeline))
    return (*pipeline[:at], DeviceNumbers(names, on_host), *pipeline[at:])


def with_micro_batches(pipeline: Iterable[Pass]) -> tuple[Pass, ...]:
    """``pipeline`` for programs that run for each micro-batch, split before the first pass that writes or plans."""
    passes = tuple(pipeline)
    if not passes or any(isinstance(each, SplitMicroBatches) for each in passes):
        return passes
    forms = (k for k, each in enumerate(passes) if isinstance(each, (FormIslands, FormRegions)))
    at = min(next(forms, len(passes)), _functional(passes))
    return (*passes[:at], SplitMicroBatches(), *passes[at:])


def with_regions(pipeline: Iterable[Pass]) -> tuple[Pass, ...]:
    """A pipeline for a backend that takes regions, which are formed before the first pass that writes or plans memory.

    An optimizer's formulas go to the backend as they are, so that the passes that choose kernels for them are left out.
    A pipeline that forms regions itself stays as it is.
    """
    passes = tuple(pipeline)
    if any(isinstance(each, FormRegions) for each in passes):
        return passes
    kept = [each for each in passes if not isinstance(each, (FuseUpdate, FuseForeach))]
    at = _functional(kept)
    return (*kept[:at], FormRegions(), *kept[at:])


def with_islands(pipeline: Iterable[Pass], choose: Choose = take_all) -> tuple[Pass, ...]:
    """A pipeline for a backend that takes islands, which are formed before the first pass that writes or plans memory.

    Fused optimizers stay as they are. A pipeline that forms islands itself does so by ``choose``, too.
    """
    passes = tuple(pipeline)
    if not any(isinstance(each, FormIslands) for each in passes):
        at = _functional(passes)
        passes = (*passes[:at], FormIslands(), *passes[at:])
    return tuple(replace(each, choose=choose) if isinstance(each, FormIslands) else each for each in passes)


def _functional(passes: Sequence[Pass]) -> int:
    """The number of passes before the first one that writes or plans memory."""
    return next((k for k, each in enumerate(passes) if each.last or each.keeps_order), len(passes))


def table_of(pipeline: Iterable[Pass]) -> Table:
    """The costs by which a program with this pipeline is compiled: those of its ``Realise``, else the built-in ones."""
    return _realise(pipeline).table


def backend_of(pipeline: Iterable[Pass]) -> str | None:
    """The backend by whose costs ``Realise`` decides, if that is another than the mesh's."""
    return _realise(pipeline).backend


def with_rates(mesh: Mesh, pipeline: Iterable[Pass]) -> Mesh:
    """``mesh`` with the rate of every axis by the table of ``pipeline``, for what is decided before the passes run.

    Fake ranks stand for those that a given table describes.
    """
    realise = _realise(pipeline)
    table, stands_for = realise.table, {}
    if table is not BUILT_IN and table.links:
        stands_for = {"fake": table.links[0].backend}
    backends = [realise.backend or stands_for.get(axis.backend, axis.backend) for axis in mesh.axes]
    axes = zip(mesh.axes, backends, strict=True)
    return replace(mesh, axes=tuple(replace(axis, rate=table.rate(axis, backend)) for axis, backend in axes))


def _realise(pipeline: Iterable[Pass]) -> Realise:
    return next((each for each in pipeline if isinstance(each, Realise)), Realise())
