"""``spmd.generate``: generate tokens with a model whose parameters are split, as one device would."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from passes import AxisRole

from .._torch import tree_flatten, tree_map
from ..capture.constraint import constrain
from ..decorator import compile
from ..modes.base import ParallelMode
from ..modes.data_parallel import DataParallel
from ..modes.data_rank import data_rank
from ..modes.shares import StyleName
from ..options import check_mode
from ..ranks.world import axis_names, world
from .rows import WHAT, Rows, rows_of_all

_ROWS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")  # what a forward gets for each row
_REFUSED = {"cache", "past_key_values", "use_cache", "inputs_embeds"}  # as options
_REFUSED_IF_ON = (  # as options, or in a configuration
    *("cache_implementation", "output_attentions", "output_hidden_states", "prefill_chunk_size", "guidance_scale"),
    "max_time",
)
_OF_LIBRARY = ("transformers_version", "_from_model_config", "use_cache")  # what ranks need not have equal
_NEW_TOKENS = 20  # where neither a number of these nor a length is given, as transformers has it
_MULTIPLE = 64  # of the tokens that a cache has room for, so that few lengths need programs
_MOST = 8  # numbers of rows whose programs are kept
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")  # of transformers' GenerationMode


def generate(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    parallel_mode: ParallelMode | StyleName | None = None,
    **options: Any,
) -> Any:
    """Generate tokens with a decoder of transformers, as ``model.generate`` of one device does for all ranks' prompts.

    Parameters stay as the training step has left them, split or not: the forward is compiled for ``parallel_mode``,
    that of the step, and each rank computes its rows, with its part of the key-value caches. All ranks call it
    together, with their own prompts (rows x tokens), of any number and length; ``options`` are those of
    ``model.generate``, equal on all ranks. Greedy and sampled text, beams and scores of a model in evaluation mode are
    those of one device that has the prompts of all ranks, the shorter ones padded on the left: tokens are drawn with
    the random numbers of the first rank, whose state moves on as there.

    Returns what ``model.generate`` returns, of it the rows of this rank's prompts. Each rank holds the scores of one
    token of all rows meanwhile (rows x vocabulary). Programs are kept with the model and this very ``parallel_mode``:
    one for each length of prompts, one for the tokens behind them, more where caches grow (by 64 tokens) or a model
    computes them in several ways (sliding windows).

    Raises ``ValueError`` where ranks disagree, for models with an encoder, for models that keep something else from
    token to token than keys and values in a static cache, and for ways to generate that call the model otherwise
    (assistants, ...).
    """
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"expected attention_mask to have the shape of input_ids, {list(input_ids.shape)}, got "
            f"{list(attention_mask.shape)}"
        )
    config = _config(model, options)
    kept = _generators.get(model)
    if kept is None or kept.given is not parallel_mode:
        kept = _generators[model] = _Generator(parallel_mode, check_mode(parallel_mode), model)
    return kept.generate(model, input_ids, attention_mask, config, options)


class _Generator:
    """Generates with a model; the programs are kept for later calls."""

    def __init__(self, given: ParallelMode | str | None, mode: ParallelMode, model: Any) -> None:
        self.given = given
        self.mesh = mode.mesh if mode.mesh is not None else world(model.device)
        names = axis_names(self.mesh)
        roles = mode.axis_roles(names)
        self.over = {
            role: {k for k, name in enumerate(names) if role in roles.get(name, ())}
            for role in (AxisRole.BATCH, AxisRole.TENSOR)
        }
        self.index, self.count = data_rank(mode)
        split = {names[k]: Shard(0) for k in self.over[AxisRole.BATCH]}
        self.of_rows = mode.for_forward({"rows": split})
        self.of_order = DataParallel(mesh=self.mesh, axes={"batch": names}, inputs={"order": {}})
        self.kept: dict[int, _Compiled] = {}  # by the number of rows

    def generate(self, model: Any, prompts: Tensor, mask: Tensor | None, config: Any, options: dict[str, Any]) -> Any:
        settings = {name: repr(value) for name, value in config.to_dict().items() if name not in _OF_LIBRARY}
        together = rows_of_all(self.mesh, self.index, self.count, prompts, mask, settings, config.pad_token_id or 0)
        rows, prompts = together.rows, together.prompts
        length = prompts.shape[1] + (config.max_new_tokens or _NEW_TOKENS)
        length = length if config.max_new_tokens else max(length, config.max_length or 0)
        each = max(config.num_beams or 1, config.num_return_sequences or 1)
        compiled = self._compiled(model, len(rows.filled(torch.empty(len(prompts) * each, 0))), length)
        own = {"cache": compiled.cache.object, "use_cache": True, "disable_compile": True}
        given = {"input_ids": prompts, **options, **own}
        if together.mask is not None:
            given["attention_mask"] = together.mask
        try:
            compiled.cache.reset()
            with compiled.in_place_of_forward(model, rows), together.random_numbers():
                found = model.generate(**given)
        finally:
            compiled.cache.free()
        if isinstance(found, Tensor):
            return rows.given(found)
        parts = {name: tree_map(rows.given, value) for name, value in found.items() if value is not given["cache"]}
        if "beam_indices" in parts:  # rows of the beams of all ranks
            first, beams = sum(rows.counts[: rows.index]) * (config.num_beams or 1), parts["beam_indices"]
            parts["beam_indices"] = torch.where(beams < 0, beams, beams - first)
        return type(found)(**parts)

    def _compiled(self, model: Any, rows: int, length: int) -> _Compiled:
        found = self.kept.pop(rows, None)
        if found is None or not found.cache.fits(model, length):
            found = _Compiled(self, model, rows, -(-length // _MULTIPLE) * _MULTIPLE)
        self.kept[rows] = found
        if len(self.kept) > _MOST:
            del self.kept[next(iter(self.kept))]
        return found


class _Compiled:
    """The programs for a number of rows, with the cache that they read and write."""

    def __init__(self, generator: _Generator, model: Any, rows: int, length: int) -> None:
        from .caches import SplitCache

        self.forward = compile(next_token, parallel_mode=generator.of_rows)
        self._reorder = compile(reorder_beams, parallel_mode=generator.of_order)
        over = generator.over[AxisRole.BATCH], generator.over[AxisRole.TENSOR]
        self.cache = SplitCache.of(model, rows, length, generator.mesh, *over, self._reorder_beams)

    def _reorder_beams(self, cache: Any, order: Tensor) -> None:
        self._reorder(cache, torch.cat([order, torch.arange(len(order), self.cache.rows, device=order.device)]))

    @contextmanager
    def in_place_of_forward(self, model: Any, rows: Rows) -> Iterator[None]:
        """Let the forward of ``model`` be the compiled one, for the length of the context."""
        held = vars(model)
        own = {"forward": held["forward"]} if "forward" in held else {}

        @functools.wraps(model.forward)
        def forward(**inputs: Any) -> Any:
            held.pop("forward")
            held.update(own)
            try:
                return self._call(model, rows, inputs)
            finally:
                held["forward"] = forward

        held["forward"] = forward
        try:
            yield
        finally:
            held.pop("forward")
            held.update(own)

    def _call(self, model: Any, rows: Rows, inputs: dict[str, Any]) -> Any:
        """The logits of the last token of all rows."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        cache, whole = inputs.pop("cache"), len(inputs["input_ids"])
        of_rows, others = dict[str, Any](), dict[str, Any]()
        for name, value in inputs.items():
            tensors = [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
            if not tensors:
                others[name] = value
            elif name in _ROWS and all(len(each) in (1, whole) for each in tensors):
                of_rows[name] = tree_map(lambda each: rows.computed(each.expand(whole, *each.shape[1:])), value)
            else:
                shapes = [list(each.shape) for each in tensors]
                raise ValueError(
                    f"{WHAT} cannot say which rows of {name}, of shape {shapes}, belong to which of {whole} sequences: "
                    "call model.generate in `with spmd.unshard(model):`"
                )
        logits = self.forward(model, cache, of_rows, others)
        return CausalLMOutputWithPast(logits=logits[:whole])


_generators: weakref.WeakKeyDictionary[nn.Module, _Generator] = weakref.WeakKeyDictionary()


def next_token(model: Any, cache: Any, rows: dict[str, Any], others: dict[str, Any]) -> Tensor:
    """The logits of the last token of all rows, whole on each rank."""
    with torch.no_grad():
        logits: Tensor = model.forward(**rows, **others, cache=cache).logits[:, -1:]
        return constrain(logits, {})


def reorder_beams(cache: Any, order: Tensor) -> None:
    """Put the rows of all layers in the order of ``order``."""
    for layer in cache.layers:
        layer.keys.copy_(layer.keys.index_select(0, order))
        layer.values.copy_(layer.values.index_select(0, order))


def _config(model: Any, options: dict[str, Any]) -> Any:
    """The settings of a generation. Raises ``ValueError`` for what it cannot do, ``TypeError`` for another model."""
    if not hasattr(model, "generation_config"):
        raise TypeError(f"expected a model of transformers that can generate, got {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{WHAT} is for decoders, and {type(model).__name__} has an encoder: call model.generate in "
            "`with spmd.unshard(model):`"
        )
    if not getattr(model, "_can_compile_fullgraph", False):  # transformers' mark of models with static caches
        raise ValueError(
            f"{WHAT} keeps keys and values in a cache of a fixed length, which {type(model).__name__} cannot read: "
            "call model.generate in `with spmd.unshard(model):`"
        )
    if refused := sorted(_REFUSED.intersection(options)):
        raise ValueError(f"{WHAT} takes tokens, and keeps the cache itself: leave out {', '.join(refused)}")
    config = copy.deepcopy(options.get("generation_config") or model.generation_config)
    for name, value in model.generation_config.to_dict().items():
        if getattr(config, name, None) is None and value is not None:
            setattr(config, name, value)
    config.update(**{name: value for name, value in options.items() if name != "generation_config"})
    if refused := [name for name in _REFUSED_IF_ON if getattr(config, name, None)]:
        raise ValueError(
            f"{WHAT} cannot generate with {', '.join(refused)}: leave out what you do not need, or call model.generate "
            "in `with spmd.unshard(model):`"
        )
    mode = config.get_generation_mode(options.get("assistant_model"))
    if mode not in _MODES:
        raise ValueError(f"{WHAT} generates by {', '.join(_MODES)}, not by {mode.value}")
    return config
