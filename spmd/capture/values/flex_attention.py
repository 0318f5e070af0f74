"""``flex_attention`` while a step is traced: its functions run on the positions of the whole, as ops of the graph.

torch compiles a kernel for the functions, with a backward for GPUs alone. Here the mask's function gives a mask for
``scaled_dot_product_attention``, of which a rank makes the rows of its own queries. A function of the scores takes them
all at once, as where torch does not compile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf, log
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..._torch import (
    NO_BLOCKS,
    FakeTensor,
    TorchFunctionMode,
    disable_modes,
    is_noop_mask,
    patched_flex_attention,
    version_of,
)
from ..unsupported import Refused

Function = Callable[..., Tensor]


def flex_attention_as_ops() -> AbstractContextManager[None]:
    """Let ``flex_attention`` be made of ops, for the length of a trace."""
    return patched_flex_attention(_attention)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function, block_mask: tuple[Any, ...], scale: float, _: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the log-sum-exp and the maximum of each row of scores, both over log(2)."""
    groups, dtype = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    keys, values = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scores = query.to(dtype) @ keys.to(dtype).mT * scale
    with _IndexByTensors():
        mask = _mask(block_mask, scores)
        is_plain = _is_identity(score_mod, scores)
        scores = scores if is_plain else _over_positions(score_mod, scores, scores)
    if mask is not None:
        scores = scores.masked_fill(~mask, -inf)
    if is_plain:
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups > 1)
    else:
        out = torch.ops.aten._safe_softmax.default(scores, -1).to(query.dtype) @ values
    return out, scores.logsumexp(-1) / log(2), scores.amax(-1) / log(2)


def _mask(block_mask: tuple[Any, ...], scores: Tensor) -> Tensor | None:
    """Which keys each query sees; batch and heads have size 1 where the mask's function does not look at them."""
    *_, block_size, mask_mod = block_mask
    if is_noop_mask(mask_mod):
        if block_size < NO_BLOCKS:
            raise Refused(
                "it passes flex_attention a BlockMask that lists blocks and has no mask_mod, and only a mask_mod gives "
                "the mask of a rank's rows. Make it by create_block_mask, or pass a mask_mod to from_kv_blocks."
            )
        return None
    _check_blocks(block_mask, mask_mod)
    mask = _over_positions(mask_mod, scores)
    for dim in (0, 1):
        mask = mask if mask.stride(dim) else mask.narrow(dim, 0, 1)
    return mask


def _check_blocks(block_mask: tuple[Any, ...], mask_mod: Function) -> None:
    """Refuse blocks that hide more than the mask's function: kernels follow them, and torch's other ops do not.

    Blocks that the step makes are those of the function; what it reads from arguments is not known yet.
    """
    (queries, keys, counts, listed, all_counts, all_listed), size = block_mask[:6], block_mask[-3:-1]
    if isinstance(counts, FakeTensor):
        return
    with disable_modes():
        made = BlockMask.from_kv_blocks(counts, listed, all_counts, all_listed, size, seq_lengths=(queries, keys))
        batch, heads = listed.shape[:2]
        expected = create_block_mask(mask_mod, batch, heads, queries, keys, counts.device, size).to_dense()
        if not isinstance(expected, FakeTensor) and bool((expected > made.to_dense()).any()):
            raise Refused(
                "it passes flex_attention a BlockMask whose blocks hide keys that its mask_mod shows, so that its "
                "kernel for GPUs and its other ops give different results. Let the mask_mod hide them, too, and make "
                "the mask by create_block_mask."
            )


def _over_positions(function: Function, like: Tensor, *scores: Tensor) -> Tensor:
    """The results of a function of (scores,) batch, head, query and key, each a number, for all of them."""
    positions = [torch.arange(size, device=like.device) for size in like.shape]
    for of in reversed(range(4)):
        function = torch.vmap(function, (*[0] * len(scores), *(0 if dim == of else None for dim in range(4))))
    return function(*scores, *positions)


class _IndexByTensors(TorchFunctionMode):
    """Lets ``x[i, 0]`` take elements by the value of a 0-dim tensor in functions that ``torch.vmap`` runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, index = args
            each = index if isinstance(index, tuple) else (index,)
            by_value = [i for i in each if isinstance(i, Tensor) and not i.ndim and i.dtype is not torch.bool]
            if by_value and all(type(i) is int or isinstance(i, Tensor) for i in each):
                for dim in reversed(range(len(each))):
                    x = x if isinstance(each[dim], Tensor) else x.select(dim, each[dim])
                return torch.ops.aten.index.Tensor(x, [i for i in each if isinstance(i, Tensor)])
        return func(*args, **(kwargs or {}))


def _is_identity(score_mod: Function, scores: Tensor) -> bool:
    """Whether a function of scores returns them as they are."""
    score, numbers = scores.new_zeros(()), [torch.zeros((), dtype=torch.int64, device=scores.device)] * 4
    return score_mod(score, *numbers) is score and version_of(score) == 0
