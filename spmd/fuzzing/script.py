"""``Script``: a step and what it needs, as the text of a Python file that runs alone and ends with ``spmd.verify``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_WIDTH = 120
_IMPORTS = {  # by what the text reads
    r"copy\.": "import copy",
    r"torch\.": "import torch",
    r"nn\.": "from torch import nn",
    r"(Replicate|Shard)\(": "from torch.distributed.tensor import Replicate, Shard",
    r"F\.": "from torch.nn import functional as F",
    r"checkpoint\(": "from torch.utils.checkpoint import checkpoint",
    r"passes\.": "import passes",
    r"spmd\.": "import spmd",
}


@dataclass
class Script:
    """The parts of the file, as lines, in their order."""

    layers: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)  # of the model
    optimizers: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)
    annotations: list[str] = field(default_factory=list)
    options: str = ""  # of spmd.compile
    mesh: Mapping[str, int] = field(default_factory=lambda: {"dp": 2})
    steps: int = 2

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def arguments(self) -> str:
        """The arguments of the step."""
        return ", ".join(["model", *self.optimizers, *self.data])

    def prelude(self) -> str:
        """The code before the step: the model, its optimizers and the batch."""
        layers = f"model = nn.ModuleList([{', '.join(self.layers)}])"
        if len(layers) > _WIDTH:
            layers = "\n".join(["model = nn.ModuleList([", *(f"    {each}," for each in self.layers), "])"])
        made = {**self.optimizers, **self.data}
        return "\n".join(["torch.manual_seed(0)", layers, *self.setup, *(f"{k} = {v}" for k, v in made.items())])

    def step(self) -> str:
        """The step itself, without a decorator."""
        body = "\n".join(self.body).replace("\n", "\n    ")
        return f"def train_step({self.arguments}):\n    {body}"

    def plain(self) -> str:
        """The file without spmd: the step can be called with its arguments."""
        return self._with_imports(f"{self.prelude()}\n\n\n{self.step()}\n")

    def text(self) -> str:
        """The file."""
        decorator = f"@spmd.compile({self.options})" if self.options else "@spmd.compile"
        mesh = f", mesh={self.mesh}" if list(self.mesh) != ["dp"] else ""
        verify = f"verdict = spmd.verify(train_step, {self.arguments}, steps={self.steps}, world={self.ranks}{mesh})"
        made = "\n".join([self.prelude(), *self.annotations])
        end = f"{verify}\nprint(verdict)\nassert verdict\n"
        return self._with_imports(f"{made}\n\n\n{decorator}\n{self.step()}\n\n\n{end}")

    def _with_imports(self, text: str) -> str:
        needed = [line for name, line in _IMPORTS.items() if re.search(rf"(?<![\w.]){name}", text)]
        return "\n".join([*needed, "", text])
