"""Static key-value caches of transformers, of which each rank has its rows, and its heads where these are split.

They are transformers' own objects, which the step reads and writes as those of any user; their tensors are rows that a
step keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
from transformers.configuration_utils import get_head_shapes

from passes.ir.program import Placements

from .._torch import dtensor_over, local_tensor
from ..placements import local_shape
from ..ranks.world import describe
from ..state.split_tensor import as_rows

_OTHER_SHAPES = ("qk_head_dim", "kv_lora_rank", "num_kv_heads")  # of DeepSeek, of Falcon


@dataclass(frozen=True, eq=False)
class SplitCache:
    """A cache for ``rows`` sequences of at most ``length`` tokens; it has memory from ``reset`` to ``free``."""

    object: StaticCache
    rows: int
    length: int

    @classmethod
    def of(
        cls,
        model: Any,
        rows: int,
        length: int,
        mesh: DeviceMesh,
        rows_over: set[int],
        heads_over: set[int],
        reorder: Callable[[StaticCache, Tensor], Any],
    ) -> SplitCache:
        """A cache for ``model``, split over the axes ``rows_over`` by rows, and over ``heads_over`` by heads.

        ``reorder`` puts its rows, which may be on other ranks, in the order of beams. Raises ``ValueError`` where the
        model keeps something else.
        """
        config = model.config.get_text_config(decoder=True)
        cache = StaticCache(config=config, max_cache_len=length)
        heads, size = get_head_shapes(config)
        others = [name for name in _OTHER_SHAPES if getattr(config, name, None)]
        if isinstance(heads, list) or isinstance(size, list) or others:
            raise ValueError(
                f"{type(model).__name__} keeps keys and values of other shapes than rows x heads x tokens x size "
                f"({', '.join(others) or 'other heads in each layer'}): call model.generate in "
                "`with spmd.unshard(model):`"
            )
        by_heads = {k for k in heads_over if heads % mesh.size(k) == 0}
        split = [Shard(0) if k in rows_over else Shard(1) if k in by_heads else Replicate() for k in range(mesh.ndim)]
        for layer in cache.layers:
            if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
                raise ValueError(
                    f"{type(model).__name__} keeps a {type(layer).__name__} from token to token, and spmd.generate "
                    "splits keys and values alone: call model.generate in `with spmd.unshard(model):`"
                )
            shape = (rows, heads, layer.max_cache_len, size)
            layer.keys, layer.values = (_part(shape, tuple(split), mesh, model) for _ in range(2))
            layer.device, layer.batch_size, layer.num_heads = model.device, rows, heads
            layer.k_head_dim = layer.v_head_dim = size
            layer.cumulative_length = layer.cumulative_length.to(model.device)
            layer.is_initialized = True
        cache.reorder_cache = lambda order: reorder(cache, order)
        return cls(cache, rows, length)

    def reset(self) -> None:
        """Empty the cache."""
        for each in self._parts():
            each.untyped_storage().resize_(each.numel() * each.element_size())
            each.zero_()
        for layer in self.object.layers:
            layer.cumulative_length.zero_()
            if isinstance(layer, StaticSlidingWindowLayer):
                layer.cumulative_length_int = 0

    def fits(self, model: Any, length: int) -> bool:
        """Whether it has room for sequences of this length, of the model as it is now."""
        part = self._parts()[0]
        return self.length >= length and (part.dtype, part.device.type) == (model.dtype, model.device.type)

    def free(self) -> None:
        """Give the memory back."""
        for each in self._parts():
            each.untyped_storage().resize_(0)

    def _parts(self) -> list[Tensor]:
        return [local_tensor(each) for layer in self.object.layers for each in (layer.keys, layer.values)]


def _part(shape: tuple[int, ...], placement: Placements, mesh: DeviceMesh, model: Any) -> DTensor:
    local = torch.zeros(local_shape(shape, placement, describe(mesh)), dtype=model.dtype, device=model.device)
    return as_rows(dtensor_over(local, mesh, placement, shape, torch.empty(shape, device="meta").stride()))
