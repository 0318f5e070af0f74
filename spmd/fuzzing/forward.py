"""``Forward``: the lines of a forward pass, each tried on real values as it is written."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .choices import Gene
from .statements import (
    ACROSS_ROWS,
    ARGUMENTS,
    CALLED,
    JOINED,
    LAYERS,
    LINES,
    MIXTURES,
    RANDOM,
    ROWWISE,
    STATEFUL,
    options,
)

FAMILIES = (
    "layer rowwise layer across called rowwise across lines joined random kept reused stateful called layer argument"
)
OF_ROWS = "layer rowwise layer kept rowwise reused called"  # most of which look at each row by itself
_WIDTHS = (4, 2, 6, 3, 5, 8, 1)
_MOST_ELEMENTS, _LARGEST = 600, 1e3
_TABLES = {"rowwise": ROWWISE, "across": ACROSS_ROWS, "random": RANDOM, "joined": JOINED}


@dataclass
class Forward:
    """The forward pass of a step: ``lines``, of the value ``h``; ``layers`` and ``setup`` of its model."""

    x: Tensor
    lines: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)  # other arguments
    _names: dict[str, Any] = field(default_factory=dict)
    _kept: list[str] = field(default_factory=lambda: ["x"])

    def __post_init__(self) -> None:
        self._names = {"torch": torch, "nn": nn, "F": F, "copy": copy, "checkpoint": checkpoint}
        self._names |= {"model": nn.ModuleList(), "x": self.x, "h": self.x}

    @property
    def h(self) -> Tensor:
        """The value so far."""
        value: Tensor = self._names["h"]
        return value

    @property
    def model(self) -> nn.ModuleList:
        """Its model."""
        model: nn.ModuleList = self._names["model"]
        return model

    def add(self, gene: Gene, families: str = FAMILIES) -> None:
        """Add what the gene stands for, if it fits."""
        family = gene.of(families.split())
        if family == "kept":
            self._keep()
        elif family == "reused":
            self._add("", f"h = model[{gene.of(range(max(1, len(self.layers))))}](h)", gene)
        elif family == "layer":
            self._add(gene.of(LAYERS), "h = {m}(h)", gene)
        elif family == "called":
            layer, call = gene.of(CALLED)
            self._add(layer, f"h = {call}", gene)
        elif family == "lines":
            layer, lines = gene.of(LINES)
            self._add(layer, lines, gene)
        elif family == "stateful":
            setup, lines = gene.of(STATEFUL)
            self._add("", lines, gene, setup)
        elif family == "argument":
            self._add_argument(gene)
        else:
            self._add("", f"h = {gene.of(options(_TABLES[family]))}", gene)

    def add_trained_layer(self) -> None:
        """Let the model have something to train."""
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            is_table = not self.h.is_floating_point()
            self._add("nn.Embedding(5, {w})" if is_table else "nn.Linear({n}, {w})", "h = {m}(h)", Gene())

    def add_blocks(self, count: int) -> None:
        """Add layers of one shape, where stages can begin."""
        for _ in range(count):
            self._add("nn.Linear({n}, {n})", "h = torch.tanh({m}(h))", Gene())

    def add_mixture(self, gene: Gene) -> bool:
        """Add a mixture of experts, of ``h`` as rows of features; returns whether that is possible."""
        setup, layer, lines = gene.of(MIXTURES)
        return self.h.ndim == 2 and self._add(layer, lines, gene, setup)

    def change(self, line: str) -> bool:
        """Change the model by a line; returns whether that is possible."""
        before = copy.deepcopy(self.model)
        try:
            exec(line, self._names)
            return True
        except Exception:  # whatever it is, the line is left out
            self._names["model"] = before
            return False

    def _keep(self) -> None:
        if not self.lines:
            return
        name = f"z{len(self._kept)}"
        self._names[name] = self.h
        self._kept.append(name)
        self.lines.append(f"{name} = h")

    def _add_argument(self, gene: Gene) -> None:
        name, value, lines = gene.of(ARGUMENTS)
        text = value.format(**self._given(Gene()))
        if name not in self.data and self._add("", lines, gene, f"{name} = {value}"):
            self.data[name] = text
            self.setup.pop()

    def _add(self, layer: str, lines: str, gene: Gene, setup: str = "") -> bool:
        """Add lines, with a new layer if they have one, unless they raise or give what is no use."""
        given = self._given(gene)
        layer, setup, lines = (each.format(**given) for each in (layer, setup, lines))
        before = dict(self._names), copy.deepcopy(self.model)
        try:
            exec(setup, self._names)
            if layer:
                self.model.append(eval(layer, self._names))
            exec(lines, self._names)
        except Exception:  # it does not fit the shape or dtype of h
            self._take_back(*before)
            return False
        if not _is_useful(self.h):
            self._take_back(*before)
            return False
        self.layers += [layer] * bool(layer)
        self.setup += [setup] * bool(setup)
        self.lines.append(lines)
        return True

    def _take_back(self, names: dict[str, Any], model: nn.ModuleList) -> None:
        self._names.clear()
        self._names.update(names | {"model": model})

    def _given(self, gene: Gene) -> dict[str, Any]:
        shape = self.h.shape
        return {
            "w": gene.of(_WIDTHS),
            "k": gene.of((1, 2, 3)),
            "z": self._kept[-1],
            "n": shape[-1] if shape else 1,
            "d": shape[1] if len(shape) > 1 else 1,
            "b": shape[0] if shape else 1,
            "m": f"model[{len(self.layers)}]",
        }

    def text(self) -> list[str]:
        """The lines. The first reads the batch."""
        first = self.lines[0] if self.lines else ""
        if first.startswith("h = ") and "\n" not in first:
            return ["h = " + re.sub(r"(?<![\w.])h(?!\w)", "x", first.removeprefix("h = ")), *self.lines[1:]]
        return ["h = x", *self.lines]


def _is_useful(h: Any) -> bool:
    """Whether it goes on from here: numbers, neither many nor large."""
    if not isinstance(h, Tensor) or not h.is_floating_point() or not 1 <= h.numel() <= _MOST_ELEMENTS or h.ndim > 4:
        return False
    return h.ndim > 0 and bool(h.isfinite().all()) and float(h.detach().abs().max()) < _LARGEST
