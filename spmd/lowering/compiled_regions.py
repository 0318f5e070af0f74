"""Regions as a backend compiles them: equal ones once; what it made is checked when it first runs.

A backend is ``callable(gm, example_inputs) -> callable``, as torch's own are, or ``callable(gm) -> callable``, as
``torch.compile`` is. It gets functional aten ops on fake tensors of its own, and nothing of ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from passes import PassError, Region
from passes.analysis.structural_keys import text_of

from .._torch import FakeTensorMode, OpOverload, ShapeEnv, storage_id, version_of


def takes_examples(backend: Callable[..., Any]) -> bool:
    """Whether a backend takes example inputs behind the module. Raises ``TypeError`` if it takes neither."""
    try:
        signature = inspect.signature(backend)
    except ValueError:  # written in C, and silent on what it takes
        return True
    for count in (2, 1):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count == 2
    raise TypeError(
        f"expected backend to be callable(gm, example_inputs) or callable(gm), got {backend!r}, which takes {signature}"
    )


class CompiledRegions:
    """The regions of a step's programs as a backend compiled them; one that no program has any more goes."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend, self._takes_examples = backend, takes_examples(backend)
        self._made: WeakValueDictionary[str, CompiledRegion] = WeakValueDictionary()

    def compiled(self, region: Region) -> CompiledRegion:
        """The compiled form of ``region``; compiles it unless an equal region was compiled."""
        key = key_of(region)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = CompiledRegion(region, self._compile(region))
        return found

    def _compile(self, region: Region) -> Callable[..., Any]:
        module, examples = for_backend(region)
        try:
            with torch.no_grad():
                made = self._backend(module, examples) if self._takes_examples else self._backend(module)
        except Exception as error:
            error.add_note(f"while the backend compiled this: {describe(region)}")
            raise
        if not callable(made):
            raise PassError(f"expected the backend to return a callable, got {made!r}")
        function: Callable[..., Any] = made
        return function


class CompiledRegion:
    """A region that a backend compiled. It returns tensors laid out as planned, in memory of their own."""

    def __init__(self, region: Region, function: Callable[..., Any]) -> None:
        self.region, self._function = region, function
        self._copied: dict[int, Tensor] | None = None  # the results to copy at each call; None before the first one

    def __call__(self, *operands: Tensor) -> Sequence[Tensor]:
        """The results."""
        if self._copied is None:
            return self._call_first(operands)
        results: Sequence[Tensor] = self._run(operands)
        if not self._copied:
            return results
        return [_copy(x, self._copied[k]) if k in self._copied else x for k, x in enumerate(results)]

    def _run(self, operands: tuple[Tensor, ...]) -> Any:
        try:
            return self._function(*operands)
        except Exception as error:
            error.add_note(f"while this ran, as the backend had compiled it: {describe(self.region)}")
            raise

    def _call_first(self, operands: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Find out what is not as planned: the code, and so this, is the same at each call."""
        before = list(map(_version, operands))
        results = self._run(operands)
        vals = [node.meta["val"] for node in self.region.results]
        self._check(results, vals)
        if before != list(map(_version, operands)):
            raise PassError(f"expected the backend to leave the operands of {describe(self.region)} as they are")
        again = self._run(operands)  # what has the same memory at each call is the backend's own
        taken, copied = {storage_id(x) for x in (*operands, *again)}, dict[int, Tensor]()
        for k, (result, val) in enumerate(zip(results, vals, strict=True)):
            if storage_id(result) in taken or not _lies_as(result, val):
                copied[k] = val
            taken.add(storage_id(result))
        self._copied = copied
        return [_copy(x, copied[k]) if k in copied else x for k, x in enumerate(results)]

    def _check(self, results: Any, vals: Sequence[Tensor]) -> None:
        expected = [_type(val) for val in vals]
        is_several = isinstance(results, (list, tuple))
        got = [_type(x) for x in results] if is_several else [_type(results)]
        if not is_several or got != expected:
            raise PassError(
                f"expected a tuple of {', '.join(expected)} from the backend's callable, got "
                f"{type(results).__name__} of {', '.join(got)}, for {describe(self.region)}"
            )


def key_of(region: Region) -> str:
    """Equal for regions that are the same ops on operands of the same types, whatever their nodes are called."""
    number = {node: f"%{k}" for k, node in enumerate(region.graph.nodes)}
    operands = [node.meta["val"] for node in region.placeholders]
    lines = [f"{_type(val)} {val.stride()}" for val in operands]
    for node in (*region.nodes, region.graph.output_node()):
        lines.append(f"{node.target}({text_of(node.args, number)}, {text_of(dict(node.kwargs), number)})")
    return "\n".join(lines)


def for_backend(region: Region) -> tuple[fx.GraphModule, list[Tensor]]:
    """A region as a module of its own, and fake operands; equal regions give modules with the same names."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for k, node in enumerate(region.placeholders):
        env[node] = graph.placeholder(f"operand_{k}")
    for node in region.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
        env[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    graph.output(tuple(env[node] for node in region.results))
    for node, new in env.items():
        new.meta["val"] = _fake(node.meta["val"], mode)
    examples = [env[node].meta["val"] for node in region.placeholders]
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Region"), examples


def describe(region: Region) -> str:
    """The ops of a region, and the user's lines that they come from."""
    ops = [str(node.target) for node in region.nodes if isinstance(node.target, OpOverload)]
    lines = dict.fromkeys(str(node.meta["source"]) for node in region.nodes if node.meta.get("source"))
    what = f"{region}, {len(ops)} ops from {ops[0]} to {ops[-1]}"
    return "".join([what, *(f"\n    {line}" for line in list(lines)[:5]), "\n    ..." * (len(lines) > 5)])


def _fake(val: Any, mode: FakeTensorMode) -> Any:
    """The like of a fake value, in another mode, and of sizes that are known."""
    if isinstance(val, (list, tuple)):
        return type(val)(_fake(each, mode) for each in val)
    if not isinstance(val, Tensor):
        return val
    with mode:
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _type(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype}{list(value.shape)} on {value.device}"


def _lies_as(result: Tensor, val: Tensor) -> bool:
    """Whether a result has the strides of a fake one; that of a dim of length one says nothing."""
    pairs = zip(result.shape, result.stride(), val.stride(), strict=True)
    return all(one == other for size, one, other in pairs if size > 1)


def _copy(result: Tensor, val: Tensor) -> Tensor:
    """The result in new memory, laid out as planned."""
    made = torch.empty_strided(val.shape, val.stride(), dtype=result.dtype, device=result.device)
    return made.copy_(result)
