"""Split state as users see it outside of steps: a DTensor that reads as the whole tensor does, or says what to do.

A number that is computed from a split tensor is that of the whole: pending sums are reduced where they come about, so
that ``p.grad.norm()`` and ``float(p.abs().max())`` are those of the plain model, on all ranks, which all must ask.
Where torch has no rule, plain tensors take part (a moving average of the user's), or random numbers are drawn, the
whole tensor is gathered. What is written into a whole tensor writes this rank's part; all ranks make the same writes,
since those that gather wait for each other. A look at memory is refused, and so is a pickle, which would have this
rank's part alone.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from passes import SpmdError

from .._torch import DisableTorchFunctionSubclass, local_tensor, storage_id, tree_flatten, tree_map
from ..placements import OnStage, extent, local_shape
from ..python_state.effects.carried import KeptRows
from ..ranks.world import describe

_NUMBERS = {
    Tensor.item,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__bool__,
    Tensor.__index__,
    Tensor.__complex__,
    Tensor.__format__,
}
_SHARED = {Tensor.share_memory_, Tensor.is_shared, Tensor.storage}  # a DTensor has no storage: torch crashes
_MEMORY = {
    *_SHARED,
    *(Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__dlpack__),
}
_GET_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor".split()}
_WAYS_OUT = (
    "inside of `with spmd.unshard(model):` all parameters are whole and plain, `tensor.full_tensor()` gives one whole, "
    "and `spmd.state_dict(model)` all; all ranks call these together"
)
# Functions that say nothing of the values, by name.
_FACTS = set(
    "__get__ __set__ __len__ size stride dim ndimension numel nelement element_size is_floating_point is_complex "
    "is_contiguous storage_offset get_device type requires_grad_ register_hook".split()
)
# Reductions that have no value for a part without elements.
_OF_ELEMENTS = set(
    "max min amax amin aminmax argmax argmin median nanmedian norm vector_norm linalg_vector_norm linalg_norm".split()
)
# Functions of whole tensors alone: those that run a function of Python's, and those that draw random numbers, of which
# each rank draws all, as one device would.
_OF_WHOLES = set(
    "apply_ map_ map2_ normal_ uniform_ kaiming_normal_ kaiming_uniform_ bernoulli_ random_ exponential_ cauchy_ "
    "log_normal_ geometric_ rand_like randn_like randint_like bernoulli normal multinomial poisson dropout dropout_ "
    "dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_ rrelu rrelu_ gumbel_softmax binomial _standard_gamma _sample_dirichlet".split()
)
# Functions that return views, some of them where they can.
_VIEWS = set(
    "__getitem__ __iter__ adjoint as_strided atleast_1d atleast_2d atleast_3d broadcast_to chunk detach diagonal "
    "dsplit expand expand_as flatten hsplit moveaxis movedim narrow permute ravel reshape reshape_as select split "
    "split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view "
    "view_as vsplit".split()
)
# What torch says where a DTensor meets plain tensors, has no memory, or where a function has no rule for its split.
_NO_RULE = (
    *("mixed torch.Tensor and DTensor", "invalid python storage", "Sharding propagation failed"),
    "not supported with DTensor",
)


class SplitTensor(DTensor):
    """A part of a state tensor, of which the other ranks have the others. It has the whole tensor's shape."""

    __slots__ = ()
    before_read: ClassVar[list[Callable[[], None]]] = []  # called before values are read or assigned outside of steps

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if not _looks.own and func == _SET_DATA and isinstance(args[0], DTensor):
                with own_looks():
                    for call in cls.before_read:
                        call()
                    return _replace(*args)
            if func in (Tensor.detach, Tensor.clone, _GET_DATA) and is_on_stages(args[0]):
                return _with_local(args[0], func(local_tensor(args[0]), **kwargs))
            if _looks.own or getattr(func, "__name__", "") in _FACTS:
                found = func(*args, **kwargs)
                if isinstance(found, DTensor):
                    split(found).__class__ = CopiedView if args and isinstance(args[0], CopiedView) else SplitTensor
                return _as_rows(found, args, kwargs)
            with own_looks():
                for call in cls.before_read:
                    call()
                return _as_rows(_read(func, args, kwargs), args, kwargs)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor, as a plain one; all ranks call it together."""
        return DTensor.full_tensor(_from_stages(self), grad_placements=grad_placements)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """Redistribute as a DTensor; what stages keep can go anywhere, and nothing can go to stages."""
        if placements is not None and tuple(placements) == tuple(self.placements) and is_on_stages(self):
            return self
        return DTensor.redistribute(_from_stages(self), device_mesh, placements, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with own_looks():
            made: Tensor = self.detach().clone()
            if isinstance(self, nn.Parameter):  # torch copies one without its gradient
                made = nn.Parameter(made, self.requires_grad)
            else:
                made.requires_grad_(self.requires_grad).grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SpmdError(
            f"a tensor of shape {list(self.shape)} that is split over the ranks was about to be pickled on this one, "
            "which has a part of it: torch.save(spmd.state_dict(model, optimizer)) writes whole tensors (all ranks "
            "call spmd.state_dict, one saves), and spmd.save(folder, model=model) writes all parts in parallel"
        )


class CopiedView(SplitTensor):
    """A view of a split tensor that had to be gathered, or moved: a write to it goes to the tensor, where it is known.

    ``source``: what it is a view of, and the function that makes it, also of the whole tensor.
    """

    source: tuple[DTensor, Callable[[Tensor], Tensor]] | None = None


class SplitRows(SplitTensor, KeptRows):
    """Rows of the batch that a step keeps, of which each rank has its own; what is computed from them is rows, too."""

    __slots__ = ()


class _Looks(threading.local):
    """The number of looks of our own that this thread is at, one within the other."""

    own = 0


_looks = _Looks()


@contextmanager
def own_looks() -> Iterator[None]:
    """Look at split state as at a DTensor: nothing is reduced, gathered or waited for."""
    _looks.own += 1
    try:
        yield
    finally:
        _looks.own -= 1


def split(tensor: DTensor) -> DTensor:
    """``tensor`` itself, as a ``SplitTensor``."""
    tensor.__class__ = SplitTensor
    return tensor


def as_rows(tensor: DTensor) -> DTensor:
    """``tensor`` itself, as ``SplitRows``."""
    tensor.__class__ = SplitRows
    return tensor


def _as_rows(found: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Mark results as rows, where the operands have some and they are split."""
    if any(isinstance(each, SplitRows) for each in tree_flatten((args, kwargs))[0]):
        for each in tree_flatten(found)[0]:
            if type(each) is SplitTensor and any(placement.is_shard() for placement in each.placements):
                as_rows(each)
    return found


def is_on_stages(tensor: DTensor) -> bool:
    """Whether some stages of a pipeline keep a tensor, and the others have none of it."""
    return any(isinstance(placement, OnStage) for placement in tensor.placements)


def on_own_stages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that this rank keeps, in the same memory: what stages of a pipeline keep, as whole along their axis."""
    found: dict[str, Tensor] = {}
    for name, each in tensors.items():
        if not isinstance(each, DTensor) or not is_on_stages(each):
            found[name] = each
            continue
        homes = {k: placement for k, placement in enumerate(each.placements) if isinstance(placement, OnStage)}
        if all(each.device_mesh.get_local_rank(k) in home.stages for k, home in homes.items()):
            whole = [Replicate() if k in homes else placement for k, placement in enumerate(each.placements)]
            found[name] = _with_local(each, local_tensor(each).detach(), whole)
    return found


def _from_stages(tensor: DTensor) -> DTensor:
    """The same on the ranks of all stages, which the first one of those that keep it sends it to."""
    if not is_on_stages(tensor):
        return tensor
    mesh, local, placements = tensor.device_mesh, local_tensor(tensor).detach(), list(tensor.placements)
    for k, placement in enumerate(tensor.placements):
        if isinstance(placement, OnStage):
            placements[k] = Replicate()
            here = mesh.get_local_rank(k) in placement.stages
            shape = local_shape(tensor.shape, tuple(placements), describe(mesh))
            local = local.clone(memory_format=torch.contiguous_format) if here else local.new_empty(shape)
            dist.broadcast(local, group=mesh.get_group(k), group_src=placement.stages[0])
    return _with_local(tensor, local, placements)


def _with_local(tensor: DTensor, local: Tensor, placements: Sequence[Any] | None = None) -> DTensor:
    """A tensor of the same shape over this rank's part; torch's ops would take that for a part of all ranks' rows."""
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    placed = tensor.placements if placements is None else placements
    return split(DTensor.from_local(local, mesh, placed, run_check=False, shape=shape, stride=stride))


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args:  # as ``nn.init`` passes its tensor on
        key = next(iter(kwargs))
        args, kwargs = (kwargs[key],), {other: value for other, value in kwargs.items() if other != key}
    if func in _NUMBERS:
        return func(_whole(args[0]), *args[1:], **kwargs)
    if func in _SHARED or (func in _MEMORY and any(placement.is_shard() for placement in args[0].placements)):
        raise SpmdError(f"the memory of a tensor that is split over the ranks is not the whole tensor's: {_WAYS_OUT}")
    if (func is Tensor.__setitem__ and isinstance(args[0], DTensor)) or _writes_to(CopiedView, func, args, kwargs):
        others, options = tree_map(_whole, (args[1:], kwargs))
        _write_through(args[0], func.__name__, lambda view: func(view, *others, **options))
        return args[0]
    if func is Tensor.copy_ and isinstance(args[0], DTensor) and not isinstance(args[1], DTensor):
        return _write_part(*args[:2])
    on_stages = any(isinstance(each, DTensor) and is_on_stages(each) for each in tree_flatten((args, kwargs))[0])
    if func is Tensor.copy_ and isinstance(args[0], DTensor) and on_stages:
        return _assign(*args[:2])
    if isinstance(out := kwargs.get("out"), DTensor):
        others = {key: value for key, value in kwargs.items() if key != "out"}
        whole = func(*tree_map(_whole, args), **tree_map(_whole, others), out=_whole(out).detach().clone())
        if not isinstance(out, CopiedView):
            return _assign(out, whole)
        _write_through(out, func.__name__, lambda view: view.copy_(whole))
        return out
    name = getattr(func, "__name__", "")
    of_wholes = on_stages or name in _OF_WHOLES
    if of_wholes and _writes_to(DTensor, func, args, kwargs):
        return _write_whole(func, args, kwargs)
    if of_wholes or (name in _OF_ELEMENTS and any(map(_has_empty_part, tree_flatten((args, kwargs))[0]))):
        found = func(*tree_map(_whole, args), **tree_map(_whole, kwargs))
    else:
        found = _computed(func, args, kwargs)
    is_view = name in _VIEWS and isinstance(args[0], DTensor)

    def view_of(whole: Tensor) -> Any:
        return func(whole, *args[1:], **kwargs)

    is_view = is_view and _is_view(view_of, args[0], func is Tensor.__getitem__)
    return _as_views(found, args[0], view_of) if is_view else found


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute with DTensors as torch does, with sums reduced; else with whole tensors."""
    try:
        found = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if not _is_of_dtensors(error):
            raise
        if _writes_to(DTensor, func, args, kwargs):
            return _write_whole(func, args, kwargs)
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))
    if isinstance(found, DTensor) and any(placement.is_partial("avg") for placement in found.placements):
        found = func(*tree_map(_whole, args), **tree_map(_whole, kwargs))  # parts may be unequal
    return _ours(found)


def _is_of_dtensors(error: Exception) -> bool:
    """Whether torch knows an op for plain tensors only, or not for this split."""
    return isinstance(error, NotImplementedError) or any(each in str(error) for each in _NO_RULE)


def _writes_to(kind: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name = str(getattr(func, "__name__", ""))
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace")
    return bool(in_place) and any(isinstance(each, kind) for each in tree_flatten(args[:1])[0])


def _has_empty_part(value: Any) -> bool:
    """Whether some rank has no element of a split tensor, which all ranks know alone."""
    if not isinstance(value, DTensor):
        return False
    axes = zip(value.placements, value.device_mesh.mesh.shape, strict=True)
    split_over = [(value.shape[p.dim], size) for p, size in axes if isinstance(p, Shard)]
    return any(length <= (size - 1) * -(-length // size) for length, size in split_over)


def _is_view(view_of: Callable[[Tensor], Any], source: DTensor, is_index: bool) -> bool:
    """Whether a function of a plain tensor returns views of it, as those of indices and of other dtypes do not."""
    plain = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    try:
        views = tree_flatten(view_of(plain))[0]
    except RuntimeError:  # it depends on values, as rows of a mask do, which are no view
        return not is_index
    return any(isinstance(each, Tensor) and storage_id(each) == storage_id(plain) for each in views)


def _as_views(found: Any, source: DTensor, view_of: Callable[[Tensor], Any]) -> Any:
    """Views of ``source``; those that lie elsewhere are marked as copies, whole ones as replicated DTensors."""
    is_copy = isinstance(source, CopiedView)

    def marked(view: Any) -> Any:
        if not isinstance(view, Tensor):
            return view
        if not isinstance(view, DTensor):
            mesh = source.device_mesh
            view = split(DTensor.from_local(view, mesh, [Replicate()] * mesh.ndim, run_check=False))
        elif view is source or (not is_copy and storage_id(local_tensor(view)) == storage_id(local_tensor(source))):
            return view
        view.__class__ = CopiedView
        if isinstance(found, Tensor):
            view.source = (source, view_of)
        return view

    return tree_map(marked, found)


def _write_through(tensor: Any, name: str, write: Callable[[Tensor], Any]) -> None:
    """Let ``write`` write into a whole tensor, or into a view of one, of which ranks keep their parts."""
    if isinstance(tensor, DTensor) and not isinstance(tensor, CopiedView):
        whole = _whole(tensor).detach().clone()
        write(whole)
        _write_equal(tensor, whole)
        return
    if not isinstance(tensor, CopiedView) or tensor.source is None:
        raise SpmdError(f"{name} writes into a part of a tensor that had to be gathered: {_WAYS_OUT}")
    source, view_of = tensor.source

    def through(whole: Tensor) -> None:
        view = view_of(whole)
        write(view)
        _write_part(tensor, view)

    _write_through(source, name, through)


def _replace(live: DTensor, value: Tensor) -> DTensor:
    """Give ``live`` other memory, with this value: what was read by ``live.data`` before keeps what it has."""
    local = local_tensor(live)
    local.data = local.clone()
    return _assign(live, value)


def _assign(live: DTensor, value: Tensor) -> DTensor:
    """Write all of ``live``, from a tensor of its shape."""
    if value.shape != live.shape:
        raise SpmdError(
            f"a tensor of shape {list(value.shape)} was about to take the place of one of {list(live.shape)} that is "
            f"split over the ranks: {_WAYS_OUT}"
        )
    if not isinstance(value, DTensor):
        return _write_part(live, value)
    placed: Any = value.detach()
    local_tensor(live).copy_(local_tensor(placed.redistribute(live.device_mesh, live.placements)))
    return live


def _write_part(live: DTensor, whole: Tensor) -> DTensor:
    """Write this rank's part of ``whole``, which broadcasts as ever."""
    values = whole.detach().expand(live.shape)
    for placement, axis in zip(live.placements, describe(live.device_mesh).axes, strict=True):
        if isinstance(placement, Shard):
            values = values.narrow(placement.dim, *extent(placement, values.shape[placement.dim], axis))
    local_tensor(live).copy_(values)
    return live


def _write_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let ``func`` write into a whole tensor, or a list of them, of which ranks keep their parts."""
    wholes = tree_map(lambda each: _whole(each).detach().clone(), args[0])
    func(wholes, *tree_map(_whole, args[1:]), **tree_map(_whole, kwargs))
    for live, whole in zip(tree_flatten(args[0])[0], tree_flatten(wholes)[0], strict=True):
        _write_equal(live, whole) if isinstance(live, DTensor) else live.detach().copy_(whole)
    return args[0]


def _write_equal(live: DTensor, whole: Tensor) -> None:
    """Write this rank's part of ``whole``; what several ranks keep is the first's: each may draw its own."""
    whole = whole.contiguous()
    for k, placement in enumerate(live.placements):
        if placement.is_replicate() or isinstance(placement, OnStage):
            dist.broadcast(whole, group=live.device_mesh.get_group(k), group_src=0)
    _write_part(live, whole)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _ours(result: Any) -> Any:
    """``result`` with each DTensor in it as one of ours, and sums that are pending among them reduced."""
    if isinstance(result, DTensor):
        return _reduced(result)
    if isinstance(result, (list, tuple, dict)) and any(isinstance(x, DTensor) for x in tree_flatten(result)[0]):
        return tree_map(lambda each: _reduced(each) if isinstance(each, DTensor) else each, result)
    return result


def _reduced(found: DTensor) -> DTensor:
    if any(placement.is_partial() for placement in found.placements):
        done = [Replicate() if placement.is_partial() else placement for placement in found.placements]
        found = found.redistribute(placements=done)
    return found if isinstance(found, SplitTensor) else split(found)
