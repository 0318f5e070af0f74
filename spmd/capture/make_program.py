"""Capture: from the user's function and its arguments to one functional graph on global shapes.

Two traces. The first (``trace.py``) runs the step with autograd and the optimizer and records mutations as they happen.
The second (``functional/``) runs the first one's graph once more, below autograd, to make it functional and to
decompose ops. The first notes the origin of each node; the second carries it over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes import CaptureError, Input, Output, OutputKind, Program, Role, SpmdError
from passes.ir.ops import Trait, has
from passes.ir.origin import Origin

from .._torch import rename_placeholder
from ..answers.guess import Backtracking
from ..call.argument_logs import Log, LogsFound
from ..call.call import Call
from ..call.dynamic_dims import with_sizes
from ..call.refusals import is_heard, refuse
from ..python_state.effects.carried import Carried
from ..python_state.reads import Journals, Lines, Reads
from ..python_state.retries import Retries
from .bind_outputs import bind_outputs
from .captured import Captured
from .constraint import constraints_on
from .explain_errors import explained_errors, is_from_outside
from .fakes import Fakes
from .final_state import FinalState, Incomplete
from .functional import functionalize
from .hyper_conditions import HyperGuards, is_fixed
from .sizes.size_symbols import AS_CALLED, TracedSizes
from .trace import Trace
from .values.live_numbers import computes_the_same, insert_fixed_numbers


def capture(
    function: Callable[..., Any],
    call: Call,
    name: str,
    known: Carried | None = None,
    live: Carried | None = None,
    sizes: TracedSizes = AS_CALLED,
) -> tuple[Captured, Reads]:
    """Trace one call of ``function``; returns with it the plain Python state that it reads.

    ``known``: Python state that other programs of the step take as inputs. ``live``: numbers that become inputs, too,
    if the step can be traced with them. ``sizes``: of dims of the arguments, which the trace does not take from the
    call. Raises ``CaptureError`` if the step cannot be traced; nothing is changed then.
    """
    known = (known or Carried()).now()
    with explained_errors(function, call.arguments, call.inputs), constraints_on(call.mesh):
        found = _traced_with_live_numbers(function, call, known, live.now(), sizes) if live else None
        trace, first = found or _traced(function, call, known, sizes)
    assert trace.final is not None
    insert_fixed_numbers(first.graph)
    fakes, reads, carried = trace.fakes, trace.reads, trace.carried
    second, constants = functionalize(first, fakes)
    fakes.mode.end_trace(second.graph)
    inputs = with_sizes(inputs_of(call, carried, constants), sizes.sizes, sizes.values)
    program = Program(second, inputs, [], call.mesh, name=name, annotations=call.annotations)
    unread = _unread_leaves(program, fakes, carried)
    numbers = list(zip(_numbers_of(call, carried), fakes.symbols, strict=True))
    symbols = [symbol for name, symbol in numbers if name not in unread]
    guards = HyperGuards.of(fakes.shapes, symbols, trace.branches, fakes.sizes)
    captured = bind_outputs(program, trace.final, call.slots, guards, constants, carried.without(unread))
    captured.cleared_first, captured.answers, captured.specs = trace.cleared_first, trace.answers, call.watched
    program.outputs = [_replacing(each, trace.cleared_first) for each in program.outputs]
    captured.live = found is not None
    captured.sizes, captured.fixed_sizes = fakes.sizes, fakes.sizes.fixed(fakes.shapes, fakes.symbols)
    captured.fixed = {
        name: number.node.hint
        for (name, symbol), number in zip(numbers, fakes.hyper_parameters, strict=True)
        if symbol is not None and is_fixed(fakes.shapes, symbol)
    }
    _describe_origins(program)
    captured.returns_loss = not trace.answers and _returns_loss(program, trace.final, call)
    _check_memory_is_not_read(program)
    _name_placeholders(program)
    _drop_unread_hyper_parameters(program)
    second.graph.lint()
    second.recompile()
    return captured, reads


def _replacing(output: Output, cleared_first: Collection[str]) -> Output:
    """A gradient that takes the place of one that the step clears first, declared so."""
    is_gradient = output.kind is OutputKind.NEW and output.role is Role.GRADIENT
    return replace(output, replaces=is_gradient and output.of in cleared_first)


def _returns_loss(program: Program, final: FinalState, call: Call) -> bool:
    """Whether the step of a model in train() mode returns a number with its graph, and has no backward pass itself."""
    if not any(module.training for module in call.given.modules.values()):
        return False
    if any(node.meta.get("phase") == "backward" for node in program.graph.nodes):
        return False
    return any(isinstance(x, torch.Tensor) and x.requires_grad and not x.ndim for x in final.results)


def _unread_leaves(program: Program, fakes: Fakes, carried: Carried) -> set[str]:
    """The numbers among the arguments that no op reads, and no condition."""
    asked = set().union(*(guard.expr.free_symbols for guard in fakes.shapes.guards))
    symbols = dict(zip(carried.leaves, fakes.symbols[len(fakes.symbols) - len(carried.leaves) :], strict=True))
    pairs = zip(program.placeholders, program.inputs, strict=True)
    used = {declared.name for node, declared in pairs if declared.role is Role.HYPER_PARAMETER and node.users}
    return {name for name, symbol in symbols.items() if name not in used and symbol not in asked}


def _traced_with_live_numbers(
    function: Callable[..., Any], call: Call, known: Carried, live: Carried, sizes: TracedSizes
) -> tuple[Trace, fx.GraphModule] | None:
    """The step with numbers as inputs; None where it does not compute with them what it does with their values.

    Code can see that a symbol is no int (``isinstance``), so the graph for the values is traced, too, and compared.
    """
    taken = {*_names(call), *live.leaves, *(site.name for site in known.numbers)}
    candidates = [live, replace(live, unread=())] if live.unread else [live]
    for each in candidates:
        found = _traced_with(function, call, known, each.with_names_unlike(taken), sizes) if each else None
        if found:
            return found
    return None


def _traced_with(
    function: Callable[..., Any], call: Call, known: Carried, live: Carried, sizes: TracedSizes
) -> tuple[Trace, fx.GraphModule] | None:
    try:
        trace, first = _traced(function, call, known | live, sizes, takes_values=True)
    except LogsFound:
        raise
    except Exception:
        return None  # if it is the user's own error, the step raises it again
    _, constant = _traced(function, call, known, sizes, trace.number_arguments)
    return (trace, first) if computes_the_same(first.graph, constant.graph) else None


def _traced(
    function: Callable[..., Any],
    call: Call,
    carried: Carried,
    sizes: TracedSizes,
    number_arguments: Collection[int] = (),
    takes_values: bool = False,
) -> tuple[Trace, fx.GraphModule]:
    """Trace, again with more carried for as long as the step reads and writes Python state that is no input yet.

    And once more if it reads a tensor that is neither an argument nor state: it may be a constant. Containers that it
    writes to get journals, unless it reads what they hold. If it cannot be traced with numbers that are symbols
    (``module.train(self.calls < 3)``), their values take their places, but where ``takes_values`` says that it is of
    no use.
    """
    lifts_anywhere, fixes_carried, fixed, retries = False, False, set[int](), retraced()
    backtracking = Backtracking()
    passed = {id(leaf.value.container): leaf.value for leaf in call.given.leaves if isinstance(leaf.value, Log)}
    logs, refused = [*(log.container for log in passed.values()), *carried.containers()], dict[int, Lines]()
    while True:
        call.count(carried.counters)
        reads = Reads(journals=Journals([each for each in logs if id(each) not in refused], refused))
        fakes = Fakes.of(call, carried, sizes)
        settings = (number_arguments, lifts_anywhere, fixed, fixes_carried, backtracking.values)
        trace = Trace(function, call, fakes, reads, carried, *settings)
        try:
            return trace, trace.graph_module()
        except LogsFound:
            raise
        except Incomplete as error:
            retries.note(error.reasons())
            carried = (carried | error.missing).with_names_unlike(_names(call))
            logs += [each for _, each in error.logs]
            refused |= error.read
            _check_logs(passed, refused)
        except Exception as error:
            if asked := trace.branched_on(error) - fixed:
                retries.note(f"the value of number {k} that it takes out of state" for k in sorted(asked))
                fixed |= asked
            elif reads.journals.by_id:  # it may be one of C code that reads a container of which it sees nothing
                retries.note(f"{error}" for _ in reads.journals.by_id)
                refused |= reads.journals.all()
                _check_logs(passed, refused)
            elif not lifts_anywhere and is_from_outside(error):
                lifts_anywhere = True
            elif trace.guessed and not is_heard() and backtracking.goes_on(error, trace.guessed):
                continue
            elif takes_values or fixes_carried or not carried.numbers or isinstance(error, SpmdError):
                if (first := backtracking.first) is None or first is error:
                    raise
                raise first from first.__cause__
            else:
                fixes_carried = True


def retraced() -> Retries:
    """The times that a step is traced once more."""
    advice = "Keep in local variables what it needs within one call alone, and the rest in containers that stay"
    return Retries("the step is traced", advice, CaptureError)


def _check_logs(passed: Mapping[int, Log], refused: Collection[int]) -> None:
    """Raise ``LogsFound`` if a log among the arguments is none."""
    paths = [log.path for key, log in passed.items() if key in refused]
    if paths:
        raise LogsFound(paths, are_logs=False)


def _names(call: Call) -> set[str]:
    names = [slot.input.name for slot in call.slots] + [hyper.name for hyper in call.hyper_parameters]
    return {*names, *(x.name for x in call.inputs)}


def _numbers_of(call: Call, carried: Carried) -> list[str]:
    """The names of all numbers that a call reads, in order."""
    return [*(each.name for each in call.hyper_parameters), *(each.name for each in carried.numbers), *carried.leaves]


def inputs_of(call: Call, carried: Carried, constants: Sequence[torch.Tensor]) -> list[Input]:
    """The inputs of a call's program, in order."""
    numbers = [(hyper.name, hyper.get()) for hyper in call.hyper_parameters]
    numbers += [(site.name, site.get()) for site in carried.numbers]
    numbers += [(each.name, each.get()) for each in carried.arguments(call.given)]
    return [
        *[slot.input for slot in call.slots],
        *[Input(Role.HYPER_PARAMETER, name, dtype=_dtype_of(value)) for name, value in numbers],
        *[Input(x.role, x.name, x.shape, x.dtype, x.placement) for x in call.inputs],
        *carried.inputs(call.device_mesh),
        *[Input(Role.CONSTANT, f"constant.{k}", tuple(c.shape), c.dtype) for k, c in enumerate(constants)],
    ]


def _dtype_of(number: Any) -> torch.dtype | None:
    return number.dtype if isinstance(number, torch.Tensor) else None


def _describe_origins(program: Program) -> None:
    """Write what an ``Origin`` says to the keys of ``node.meta`` that passes, dumps and errors read."""
    from_origin: dict[int, list[fx.Node]] = {}  # nodes by the number of their origin
    for node in program.graph.nodes:
        origin: Origin | None = node.meta.get("origin")
        if origin is None:
            continue
        same = from_origin.setdefault(origin.number, [])
        same.append(node)
        if origin.recompute_of is not None:
            originals = from_origin.get(origin.recompute_of, [node])
            node.meta["recompute_of"] = originals[min(len(same), len(originals)) - 1].name
        node.meta["phase"], node.meta["module"], node.meta["source"] = origin.phase, origin.module, origin.source
        if origin.grad_of is not None:
            node.meta["grad_of"] = origin.grad_of


def _check_memory_is_not_read(program: Program) -> None:
    """Raise ``CaptureError`` for an op that depends on where values lie, which passes change."""
    for node in program.graph.nodes:
        if has(node.target, Trait.READS_MEMORY):
            refuse(
                CaptureError,
                f"{node.target} depends on strides, or on the place of a tensor in its memory, and a compiled step has "
                f"neither. Take the same elements by slices, views or indices\n    {node.meta.get('source', '')}",
            )


def _name_placeholders(program: Program) -> None:
    for node, declared in zip(program.placeholders, program.inputs, strict=True):
        rename_placeholder(node, re.sub(r"\W+", "_", declared.name).strip("_"))


def _drop_unread_hyper_parameters(program: Program) -> None:
    inputs = []
    for node, declared in zip(program.placeholders, program.inputs, strict=True):
        if declared.role is Role.HYPER_PARAMETER and not node.users:
            program.graph.erase_node(node)
        else:
            inputs.append(declared)
    program.inputs = inputs
