"""Check that accelerate's data loaders give every rank as many batches: a compiled step is called by all ranks."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import BatchSamplerShard


def check_even(loader: Any, setting: str) -> None:
    """Raise ``ValueError`` if some ranks get a batch of ``loader`` more than others; ``setting`` makes them even."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, BatchSamplerShard) and not _is_even(sampler):
        raise ValueError(
            f"with even_batches=False some of {sampler.num_processes} ranks get a batch more than others of this data "
            f"loader ({_sizes(sampler)}), and would wait for these in the compiled step: drop the last batch "
            f"(drop_last=True), or fill it up with rows of the first ones: {setting}"
        )


def _is_even(sampler: BatchSamplerShard) -> bool:
    ranks: int = sampler.num_processes
    if ranks == 1 or sampler.even_batches or sampler.drop_last:
        return True
    if not sampler.split_batches:
        return not len(sampler.batch_sampler) % ranks
    share: int = sampler.batch_size // ranks
    rest: int = len(sampler.batch_sampler.sampler) % sampler.batch_size
    return not rest or rest > share * (ranks - 1)


def _sizes(sampler: BatchSamplerShard) -> str:
    if sampler.split_batches:
        return f"the last batch has {len(sampler.batch_sampler.sampler) % sampler.batch_size} rows"
    return f"it has {len(sampler.batch_sampler)} batches"
