"""``write``: the script that choices stand for. What does not fit is left out, so that nearly all choices make one."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from ..call.rng import random_state_kept
from .choices import Choices, Gene
from .forward import FAMILIES, OF_ROWS, Forward
from .modes import ANNOTATIONS, AXES, EXPERTS, MESHES, PLACED, ROUNDED, RUNS, SEQUENCES, STAGES, STYLES, pipelines
from .plain_run import can_be_verified
from .script import Script
from .training import CHANGES, LOSSES, OPTIMIZERS, PARAMETERS, RESULTS, TRAININGS

_ROWS = (4, 8, 6, 5, 7, 3, 12, 9, 2, 1)
_SHAPES = ((4,), (6,), (3, 4), (5,), (4, 4), (2, 3), (1,), (4, 2, 3), ())
_BATCHES = ("torch.randn({shape})", "torch.randint(5, {shape})", "torch.randn({shape}, dtype=torch.float64)")
_STEPS = (2, 1, 2, 1, 3)


def write(choices: Choices) -> Script | None:
    """The script of these choices, or of simpler ones, whose plain step can be verified; None if there is none."""
    for simpler in choices.simpler():
        script = written(simpler)
        if can_be_verified(script):
            return script
    return None


def written(choices: Choices) -> Script:
    """The script of these choices, whatever its plain step does. Lines are tried on the same numbers each time."""
    with random_state_kept():
        torch.manual_seed(0)
        return _written(choices)


def _written(choices: Choices) -> Script:
    script, data = Script(), Gene(choices.data)
    shape = (data.of(_ROWS), *data.of(_SHAPES))
    script.data["x"] = data.rarely(data.of(_BATCHES), _BATCHES[0]).format(shape=shape)
    forward = Forward(eval(script.data["x"]))
    mode = Gene(choices.mode)
    script.mesh, script.steps = mode.of(MESHES), mode.of(_STEPS)
    has_stages = "pp" in script.mesh
    for numbers in choices.statements:
        forward.add(Gene(numbers), OF_ROWS if has_stages else FAMILIES)
    forward.add_blocks(4 if has_stages else 0)
    if "ep" in script.mesh and not forward.add_mixture(mode):
        script.mesh = MESHES[0]
    forward.add_trained_layer()
    script.layers, script.setup = forward.layers, forward.setup
    script.data |= forward.data
    loss = _loss(Gene(choices.loss), forward, script)
    for numbers in choices.changes:
        _change(Gene(numbers), forward, script)
    _optimizers(Gene(choices.optimizer), script, forward)
    even = len(forward.x) % script.ranks == 0  # rows of the batch
    script.body = _body(Gene(choices.training), [*forward.text(), f"loss = {loss}"], script, even)
    _compile(mode, forward, script)
    _passes(Gene(choices.passes), script)
    return script


def _loss(gene: Gene, forward: Forward, script: Script) -> str:
    """A loss that fits what the forward pass gives; its targets become an argument."""
    h, rows = forward.h, len(forward.x)
    loss, targets = gene.of(LOSSES)
    given = {"shape": tuple(h.shape), "d": h.shape[1] if h.ndim > 1 else 1, "b": rows}
    names: dict[str, Any] = {"torch": torch, "F": nn.functional, "h": h, "model": forward.model}
    try:
        y = eval(targets.format(**given), names) if targets else None
        value = eval(loss.format(**given), names | {"y": y})
        fits = (y is None or len(y) == rows) and value.ndim == 0 and value.requires_grad and bool(value.isfinite())
    except Exception:  # it does not fit the shape of h
        fits = False
    if not fits:
        return LOSSES[0][0]
    if targets:
        script.data["y"] = targets.format(**given)
    return loss.format(**given)


def _change(gene: Gene, forward: Forward, script: Script) -> None:
    """Change the model, where that is possible."""
    change = gene.of(CHANGES)
    layers = [f"model[{k}]" for k in range(len(forward.layers))]
    if not layers:
        return
    line = change.format(m=gene.of(layers), o=gene.of(layers))
    if forward.change(line):
        script.setup.append(line)


def _optimizers(gene: Gene, script: Script, forward: Forward) -> None:
    """One optimizer, rarely two."""
    first, given = gene.of(OPTIMIZERS), gene.rarely(gene.of(PARAMETERS), PARAMETERS[0])
    script.optimizers["optimizer"] = first.format(p=given)
    parts = [
        [each for module in part for each in module.parameters()] for part in (forward.model[:1], forward.model[1:])
    ]
    if all(parts) and gene.rarely(True, False):
        script.optimizers["optimizer"] = first.format(p="model[:1].parameters()")
        script.optimizers["other"] = gene.of(OPTIMIZERS).format(p="model[1:].parameters()")


def _body(gene: Gene, forward: Sequence[str], script: Script, even: bool) -> list[str]:
    """All lines of the step. Of an uneven batch, results with rows are refused, before an even one was seen."""
    training, result = gene.of(TRAININGS), gene.of(RESULTS if even else RESULTS[:1])
    if not training.fits(has_targets="y" in script.data):
        training = TRAININGS[0]
    compute = [*forward, *training.backward]
    if training.loop.startswith("with"):
        compute = [training.loop, *_indented(forward), *training.backward]
    elif training.loop:
        compute = [training.loop, *_indented(compute)]
    update = [] if "optimizer.step()" in training.backward else ["optimizer.step()"]
    lines = [*training.before, *compute, *training.after, *update, *training.last]
    lines = [each for line in lines for each in _for_each_optimizer(line, script)]
    return [*lines, f"return {result}"]


def _indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line.replace("\n", "\n    ") for line in lines]


def _for_each_optimizer(line: str, script: Script) -> list[str]:
    if not re.search(r"optimizer\.(step|zero_grad)\(", line):
        return [line]
    return [line.replace("optimizer.", f"{name}.") for name in script.optimizers]


def _compile(gene: Gene, forward: Forward, script: Script) -> None:
    """A mode that fits the mesh."""
    kind = gene.of("style style style annotations placed style rounded inputs".split())
    placed = _placed(gene, forward, script)
    if "ep" in script.mesh:
        axes = gene.of(EXPERTS) if len(script.mesh) > 1 else '{"batch": "ep", "experts": "ep"}'
        script.options = f"parallel_mode=spmd.DataParallel({gene.of(STYLES)}, axes={axes}{gene.of(RUNS)})"
    elif len(script.mesh) == 2 and "tp" in script.mesh:
        axes = f", axes={AXES}" if "x" in script.mesh else ""
        script.options = f"parallel_mode=spmd.DataParallel({gene.of(STYLES)}{axes}, params={placed})"
    elif "cp" in script.mesh:
        roles = {"sequence": "cp"} | ({"batch": "dp"} if "dp" in script.mesh else {})
        options = f"axes={roles}{gene.of(SEQUENCES)}{gene.of(RUNS)}"
        script.options = f"parallel_mode=spmd.DataParallel({gene.of(STYLES)}, {options})"
    elif "pp" in script.mesh:
        if len(forward.x) % script.ranks:
            script.mesh = {"pp": 2}  # micro-batches take equal numbers of rows on all ranks
        roles = {"stages": "pp"} | ({"batch": "dp"} if "dp" in script.mesh else {})
        runs = f", micro_batches={gene.of((2, 4))}{gene.of(STAGES)}"
        script.options = f"parallel_mode=spmd.DataParallel({gene.of(STYLES)}, axes={roles}{runs})"
    elif kind == "annotations":
        script.annotations = _annotations(gene, forward)
    elif kind == "placed":
        script.options = f"parallel_mode=spmd.DTensorExpand(params={placed})"
    elif kind == "inputs" and len(script.mesh) == 1:
        inputs = f'{{"x": {gene.of(PLACED)}}}'
        script.options = f"parallel_mode=spmd.DataParallel({gene.of(STYLES)}, inputs={inputs})"
    else:
        is_linear = all(each.startswith("torch.optim.SGD") for each in script.optimizers.values())
        style = gene.of(ROUNDED if kind == "rounded" and is_linear else STYLES)
        script.options = f"parallel_mode=spmd.DataParallel({style}{gene.of(RUNS)})"
    names = {"spmd": _spmd(), "torch": torch, "Shard": Shard, "Replicate": Replicate}
    odd = "reshard_after_forward=2" in script.options and script.ranks % 2
    if odd or (script.options and not _holds(f"spmd.compile({script.options})", names)):
        script.options = 'parallel_mode=spmd.DataParallel("fully_shard")'


def _placed(gene: Gene, forward: Forward, script: Script) -> str:
    """Placements of some parameters, by name: over the axis of tensor parallelism, if there is one."""
    axis = "tp" if "tp" in script.mesh else list(script.mesh)[-1]
    parameters = [(name, p.ndim) for name, p in forward.model.named_parameters() if p.ndim]
    chosen = {}
    for _ in range(gene.of((1, 2, 3)) if parameters else 0):
        name, dims = gene.of(parameters)
        chosen[f"model.{name}"] = f'{{"{axis}": Shard({gene.of(range(dims))})}}'
    return "{" + ", ".join(f'"{name}": {placement}' for name, placement in chosen.items()) + "}"


def _annotations(gene: Gene, forward: Forward) -> list[str]:
    """Annotations of one layer or two."""
    names = {"spmd": _spmd(), "torch": torch, "Shard": Shard, "model": copy.deepcopy(forward.model)}
    layers = [f"model[{k}]" for k in range(len(forward.layers))] or ["model"]
    lines = [gene.of(ANNOTATIONS).format(m=gene.of(layers)) for _ in range(gene.of((1, 2)))]
    return [line for line in lines if _holds(line, names)]


def _passes(gene: Gene, script: Script) -> None:
    """Passes other than the default ones, rarely."""
    if gene.rarely(True, False):
        chosen = f"passes={gene.of(pipelines())}"
        script.options = ", ".join(filter(None, [script.options, chosen]))


def _spmd() -> ModuleType:
    """The public names, as files import them; this package is below those."""
    return import_module(__package__.partition(".")[0])


def _holds(line: str, names: dict[str, Any]) -> bool:
    """Whether a line raises nothing."""
    try:
        exec(line, names)
    except Exception:  # whatever it is, the line is left out
        return False
    return True
