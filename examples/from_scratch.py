"""A graph-compiling SPMD trainer in one file: the ideas of spmd, without what makes it fast, general and safe.

    python examples/from_scratch.py

A train step is captured as one graph, parameters and momentum included; every value gets a placement on two ranks; the
graph is expanded into one rank's share, with collectives; a pass merges collectives; and two gloo ranks train, beside
the plain step on the whole batch. docs/from-scratch.md names for each part the files where the real one is.
"""

from __future__ import annotations

import math
import operator
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, fx, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD

aten = torch.ops.aten
Step = Callable[..., Tensor]

# 1. Capture -----------------------------------------------------------------------------------------------------------
# The step runs once on fake tensors, which have shapes and no memory, and make_fx writes down the ops that it calls:
# forward, what autograd calls in backward, and the update. State comes in as inputs, which the update changes in place.


def capture(step: Step, model: nn.Module, optimizer: SGD, batch: Sequence[Tensor]) -> fx.GraphModule:
    """The step as a graph. Inputs: parameters, their momentum, and the batch. Output: the loss."""
    parameters, state = list(model.parameters()), momenta(optimizer)

    def traced(values: list[Tensor], momentum: list[Tensor], batch: list[Tensor]) -> Tensor:
        put_state(model, optimizer, [value.requires_grad_() for value in values], momentum)
        return step(model, optimizer, *batch)

    try:
        traced_with = make_fx(traced, tracing_mode="fake", decomposition_table={aten.mean.default: mean})
        graph = traced_with(parameters, state, list(batch))
    finally:
        put_state(model, optimizer, parameters, state)
    for node in reversed(graph.graph.nodes):  # of torch's profiler; and values that nothing reads
        if "profiler" in str(node.target) or (not node.users and node.op == "call_function" and not in_place(node)):
            graph.graph.erase_node(node)
    return graph


def put_state(model: nn.Module, optimizer: SGD, values: Sequence[Tensor], momentum: Sequence[Tensor]) -> None:
    """Give the model and its optimizer these tensors instead of those they have."""
    for (name, _), value in zip(list(model.named_parameters()), values, strict=True):
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._parameters[last] = value  # type: ignore[assignment]
    optimizer.param_groups[0]["params"] = list(values)
    optimizer.state.clear()
    optimizer.state.update({p: {"momentum_buffer": each} for p, each in zip(values, momentum, strict=True)})


def momenta(optimizer: SGD) -> list[Tensor]:
    """The momentum of each parameter: zeros before the first step, which has to be the same program as all others."""
    parameters = optimizer.param_groups[0]["params"]
    return [optimizer.state[p].get("momentum_buffer", torch.zeros_like(p)) for p in parameters]


def mean(x: Tensor) -> Tensor:
    """A mean as a sum of parts: the number of elements is that of the whole batch, and a constant of the graph."""
    return x.sum() / x.numel()


# 2. Rules -------------------------------------------------------------------------------------------------------------
# An op in letters, as in einsum: ranks may divide any letter. One that the result lacks is summed over: the result of
# each rank is then a part of the sum. Of elementwise ops the letters follow from the shapes.

PRODUCTS = {aten.mm.default: "mk,kn->mn", aten.addmm.default: "n,mk,kn->mn", aten.t.default: "ab->ba"}
ELEMENTWISE = {
    aten.add_.Tensor, aten.mul_.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.div.Scalar, aten.pow.Tensor_Scalar, aten.tanh.default, aten.tanh_backward.default, aten.detach.default,
    aten.ones_like.default, aten.expand.default,
}  # fmt: skip
LINEAR = {aten.t.default, aten.view.default, aten.detach.default, aten.div.Tensor}  # by a number


def letters(node: fx.Node) -> tuple[list[str], str]:
    """The letters of the operands and of the result; none for an op without a rule, which needs whole operands."""
    if node.target in PRODUCTS:
        given, result = PRODUCTS[node.target].split("->")
        return given.split(","), result
    if node.target in (aten.sum.default, aten.sum.dim_IntList):
        given = "abcdefg"[: node.all_input_nodes[0].meta["val"].ndim]
        dims = node.args[1] if len(node.args) > 1 else None
        summed = {dim % len(given) for dim in dims or range(len(given))}
        kept = "z" if len(node.args) > 2 and node.args[2] else ""  # dims of size 1 are no letters that ranks divide
        return [given], "".join(kept if dim in summed else letter for dim, letter in enumerate(given))
    if node.target in ELEMENTWISE:
        result = "abcdefg"[: node.meta["val"].ndim]
        found = []
        for operand in node.all_input_nodes:
            shape = operand.meta["val"].shape
            aligned = result[len(result) - len(shape) :]
            found.append("".join("z" if size == 1 else letter for letter, size in zip(aligned, shape, strict=True)))
        return found, result
    return ["" for _ in node.all_input_nodes], ""


@dataclass(frozen=True)
class Choice:
    """A way to compute a node: the placements that it needs of its operands, and the one of its result."""

    operands: tuple[Placement, ...]
    result: Placement


def choices(node: fx.Node, ranks: int) -> Iterator[Choice]:
    """All ways to compute a node: divided by a letter, by parts of a sum, or whole on every rank."""
    operands, result = letters(node)
    for letter in sorted({*"".join(operands), *result} - {"z"}):
        sizes = [*zip(operands, node.all_input_nodes, strict=True), (result, node)]
        divided = all(value.meta["val"].shape[own.index(letter)] % ranks == 0 for own, value in sizes if letter in own)
        adds_once = node.target is aten.addmm.default and letter not in result  # the bias would be added by each rank
        if divided and not adds_once:
            placed = tuple(Shard(own.index(letter)) if letter in own else Replicate() for own in operands)
            yield Choice(placed, Shard(result.index(letter)) if letter in result else Partial())
    if node.target in LINEAR and len(operands) == 1:
        yield Choice((Partial(),), Partial())
    if node.target is aten.ones_like.default:  # which reads no value
        yield Choice((Partial(),), Replicate())
    yield Choice((Replicate(),) * len(operands), Replicate())


def in_place(node: fx.Node) -> bool:
    """Whether the op writes to its first operand."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


# 3. Collectives -------------------------------------------------------------------------------------------------------
# Each moves a value from one placement to another. The graph is the same on all ranks: who runs it is asked here.


def all_gather(x: Tensor, dim: int) -> Tensor:
    """The whole of a divided value."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of the parts of all ranks."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def reduce_scatter(x: Tensor, dim: int) -> Tensor:
    """This rank's share of the sum of the parts of all ranks."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), dim)]
    share = torch.empty_like(parts[0])
    dist.reduce_scatter(share, parts)
    return share


def own_share(x: Tensor, dim: int) -> Tensor:
    """This rank's share of a value that it has whole: nothing is sent."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def move(source: Placement, target: Placement) -> list[tuple[Callable[..., Tensor], tuple[int, ...], float]]:
    """The collectives from one placement to another: function, dim, and bytes sent per byte of the whole value."""
    match source, target:
        case _ if source == target:
            return []
        case Shard(dim=dim), Replicate():
            return [(all_gather, (dim,), 1.0)]
        case Partial(), Replicate():
            return [(all_reduce, (), 2.0)]
        case Partial(), Shard(dim=dim):
            return [(reduce_scatter, (dim,), 1.0)]
        case Replicate(), Shard(dim=dim):
            return [(own_share, (dim,), 0.0)]
        case Shard(), Shard():
            return [*move(source, Replicate()), *move(Replicate(), target)]
    return [(operator.add, (), math.inf)]  # whole to parts of a sum: no choice wants it


# 4. Partition ---------------------------------------------------------------------------------------------------------
# One walk over the graph: a node takes the choice that sends the fewest bytes, among these one that divides the work.


@dataclass
class Partition:
    """A rank's share of a graph. ``placements``: of the inputs, in their order.

    ``gathered``: inputs that are divided, and whole wherever they are read: parameters under "fully_shard".
    """

    ranks: int
    placements: Sequence[Placement]
    gathered: set[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[tuple[fx.Node, Placement], fx.Node] = field(default_factory=dict)
    placed: dict[fx.Node, Placement] = field(default_factory=dict)

    def run(self, module: fx.GraphModule) -> fx.GraphModule:
        """Expand all nodes."""
        inputs = iter(self.placements)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.put(node, next(inputs), self.graph.placeholder(node.name))
            elif node.op == "output":
                self.graph.output(self.value(node.all_input_nodes[0], Replicate()))
            else:
                self.expand(node)
        return fx.GraphModule(module, self.graph)

    def put(self, node: fx.Node, placement: Placement, value: fx.Node) -> None:
        """Note a value of the new graph, and where it is."""
        value.meta["val"] = node.meta["val"]
        self.values[node, placement], self.placed[node] = value, placement

    def expand(self, node: fx.Node) -> None:
        """Compute a node on this rank."""
        choice = min(choices(node, self.ranks), key=lambda each: self.cost(node, each))
        operands = zip(node.all_input_nodes, choice.operands, strict=True)
        local = {operand: self.value(operand, placement) for operand, placement in operands}
        value = self.graph.node_copy(node, local.__getitem__)
        if node.target in (aten.expand.default, aten.view.default):  # which are given the size of their result
            value.args = (value.args[0], self.local_shape(node, choice.result))
        self.put(node, choice.result, value)
        if in_place(node):  # what has been made of the old value is stale
            changed = node.all_input_nodes[0]
            self.values = {
                (each, placement): value
                for (each, placement), value in self.values.items()
                if each is not changed or placement == choice.operands[0]
            }

    def cost(self, node: fx.Node, choice: Choice) -> tuple[float, int, bool]:
        """Bytes that are sent for a choice, how many moves it takes, and whether every rank computes the whole."""
        operands = list(zip(node.all_input_nodes, choice.operands, strict=True))
        if in_place(node) and self.placed[operands[0][0]] != choice.operands[0]:
            return math.inf, 0, True  # state stays where it is
        if not in_place(node) and any(each in self.gathered and to != Replicate() for each, to in operands):
            return math.inf, 0, True
        moves = [share * self.bytes(each) for each, to in operands for _, _, share in move(self.source(each, to), to)]
        return sum(moves), len(moves), choice.result == Replicate()

    def source(self, node: fx.Node, target: Placement) -> Placement:
        """Where a value is, or has been brought to."""
        return target if (node, target) in self.values else self.placed[node]

    @staticmethod
    def bytes(node: fx.Node) -> int:
        """The size of the whole value."""
        return int(node.meta["val"].nbytes)

    def value(self, node: fx.Node, placement: Placement) -> fx.Node:
        """A value where it is needed: it is brought there once."""
        if (node, placement) not in self.values:
            value = self.values[node, self.placed[node]]
            for function, dim, _ in move(self.placed[node], placement):
                with self.graph.inserting_after(value):  # as early as it can be
                    value = self.graph.call_function(function, (value, *dim))
                value.meta["val"] = node.meta["val"]
            self.values[node, placement] = value
        return self.values[node, placement]

    def local_shape(self, node: fx.Node, placement: Placement) -> list[int]:
        """The shape of this rank's part."""
        shape = list(node.meta["val"].shape)
        if isinstance(placement, Shard):
            shape[placement.dim] //= self.ranks
        return shape


# 5. A pass ------------------------------------------------------------------------------------------------------------
# A pass takes a graph and makes it better. This one sends many small messages as one large one.


def merge_all_reduces(module: fx.GraphModule) -> fx.GraphModule:
    """Merge all_reduces with the later ones, up to the first that something waits for."""
    waiting: list[fx.Node] = []
    for node in list(module.graph.nodes):
        if any(each in waiting for each in node.all_input_nodes):
            merge(module.graph, waiting, node)
            waiting = []
        if node.target is all_reduce:
            waiting.append(node)
    module.recompile()
    return module


def merge(graph: fx.Graph, members: Sequence[fx.Node], before: fx.Node) -> None:
    """One all_reduce for all of them."""
    with graph.inserting_before(before):
        flat = [graph.call_function(torch.reshape, (each.args[0], [-1])) for each in members]
        total = graph.call_function(all_reduce, (graph.call_function(torch.cat, (flat,)),))
        sizes = [each.meta["val"].numel() for each in members]
        parts = graph.call_function(torch.split, (total, sizes))
        for number, each in enumerate(members):
            part = graph.call_function(operator.getitem, (parts, number))
            each.replace_all_uses_with(graph.call_function(torch.reshape, (part, list(each.meta["val"].shape))))
            graph.erase_node(each)


# 6. Run ---------------------------------------------------------------------------------------------------------------


@dataclass
class CompiledStep:
    """A step that each rank calls with its rows of the batch. ``style``: "replicate" or "fully_shard"."""

    step: Step
    style: str
    graph: fx.GraphModule | None = None
    state: list[Tensor] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)

    def __call__(self, model: nn.Module, optimizer: SGD, *rows: Tensor) -> Tensor:
        """One step; returns the loss of the whole batch."""
        if self.graph is None:
            self.compile(model, optimizer, rows)
        assert self.graph is not None
        with torch.no_grad():
            return self.graph(*self.state, *rows)  # type: ignore[no-any-return]

    def compile(self, model: nn.Module, optimizer: SGD, rows: Sequence[Tensor]) -> None:
        """Capture, partition, and run the pass."""
        ranks = dist.get_world_size()
        whole = capture(self.step, model, optimizer, [torch.cat([each] * ranks) for each in rows])
        state = [each.detach() for each in [*model.parameters(), *momenta(optimizer)]]
        divides = [self.style == "fully_shard" and each.shape[0] % ranks == 0 for each in state]
        self.placements = [Shard(0) if each else Replicate() for each in divides]
        self.state = [own_share(x, 0).clone() if each else x.clone() for x, each in zip(state, divides, strict=True)]
        inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
        gathered = {node for node, each in zip(inputs, divides, strict=False) if each}
        partition = Partition(ranks, [*self.placements, *[Shard(0)] * len(rows)], gathered)
        self.graph = merge_all_reduces(partition.run(whole))

    def whole_state(self) -> list[Tensor]:
        """Parameters and momentum."""
        pairs = zip(self.state, self.placements, strict=True)
        return [all_gather(each, 0) if placement == Shard(0) else each for each, placement in pairs]


def train_step(model: nn.Module, optimizer: SGD, x: Tensor, y: Tensor) -> Tensor:
    """A step as anybody writes it."""
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make() -> tuple[nn.Module, SGD]:
    """The model, equal on all ranks, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def train(style: str, steps: int = 5) -> dict[str, int]:
    """Train beside the plain step, which has the whole batch: all numbers have to be equal. Returns what was sent."""
    (plain, of_plain), (model, optimizer) = make(), make()
    compiled = CompiledStep(train_step, style)
    for _ in range(steps):
        x, y = torch.randn(8, 4).double(), torch.randn(8, 2).double()
        loss = compiled(model, optimizer, own_share(x, 0), own_share(y, 0))
        torch.testing.assert_close(loss, train_step(plain, of_plain, x, y).detach(), rtol=0, atol=1e-12)
    expected = [each.detach() for each in [*plain.parameters(), *momenta(of_plain)]]
    torch.testing.assert_close(compiled.whole_state(), expected, rtol=0, atol=1e-12)
    assert compiled.graph is not None
    called = [node.target for node in compiled.graph.graph.nodes]
    return {each.__name__: called.count(each) for each in (all_gather, all_reduce, reduce_scatter)}


def run_rank(rank: int, ranks: int, store: str) -> None:
    """One process: both styles, one after the other."""
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    for style in ("replicate", "fully_shard"):
        sent = train(style)
        if rank == 0:
            print(f"{style}: equal to the plain step; collectives: {sent}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (2, f"{folder}/store"), nprocs=2)  # type: ignore[no-untyped-call]
