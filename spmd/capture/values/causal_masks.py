"""Attention with a mask that is known to be the causal one takes ``is_causal`` instead, and no mask is made.

Models make such a mask of positions, as those of transformers do without a cache where no mask is passed. With one,
attention computes the half that it hides, and on a GPU it is not the flash kernel that does. Where symbols stand for
sizes, a mask is not known, and stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from ..._torch import TorchFunctionMode, disable_modes, version_of
from .known_values import known_value

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # those that may come by position
_SIDES = ("query", "key")  # those of a mask
_LARGEST = 1 << 26  # elements: each call of the step would make as many
_of_heads = inspect.signature(F.multi_head_attention_forward).bind


class CausalMasks(TorchFunctionMode):
    """Passes ``is_causal`` in the place of a causal mask, while a step is traced for the sizes of its call alone."""

    def __init__(self) -> None:
        super().__init__()
        # By what a mask of bools is true for: (the version of a mask, whether it is causal).
        self._found = {hidden: WeakTensorKeyDictionary() for hidden in (False, True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
            mask = None if given.get("is_causal") else given.get("attn_mask")
            if mask is not None and self._is_causal(mask, [given[x].shape[-2] for x in _SIDES], hidden=False):
                return func(**given | {"attn_mask": None, "is_causal": True})
        if func is F.multi_head_attention_forward:
            given = _of_heads(*args, **kwargs).arguments
            others = [given.get(x) for x in ("key_padding_mask", "bias_k", "add_zero_attn", "is_causal")]
            is_alone = not given.get("need_weights", True) and all(x is None or x is False for x in others)
            mask = given.get("attn_mask") if is_alone else None
            if mask is not None and self._is_causal(mask, [len(given[x]) for x in _SIDES], hidden=True):
                return func(**given | {"is_causal": True})  # for which it leaves out the mask
        return func(*args, **kwargs)

    def _is_causal(self, mask: Tensor, lengths: Sequence[int], hidden: bool) -> bool:
        """Whether each query sees itself and what comes before it; ``hidden``: what a mask of bools is true for.

        ``lengths``: of queries and of keys. A mask of one position is expanded to all of them, and hides none.
        """
        if [*mask.shape[-2:]] != lengths:
            return False
        found = self._found[hidden]
        version, is_causal = found.get(mask, (-1, False))
        if version != version_of(mask):
            is_causal = _is_triangle(mask, hidden)
            found[mask] = version_of(mask), is_causal
        return bool(is_causal)


def _is_triangle(mask: Tensor, hidden: bool) -> bool:
    value = known_value(mask, _LARGEST)
    if value is None or value.shape[-1] != value.shape[-2]:
        return False
    with disable_modes(), torch.no_grad():
        later = torch.ones(value.shape[-2:], dtype=torch.bool, device=value.device).triu(1)
        if value.dtype is torch.bool:
            return bool((value == (later if hidden else ~later)).all())
        return bool((value == torch.zeros_like(value).masked_fill(later, -torch.inf)).all())
