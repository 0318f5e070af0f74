"""The keys of ``node.meta``: what each says, its writers and readers, and how far it is carried to new nodes.

``edit.py`` inserts and replaces nodes by this table, ``check`` rejects a key that is not in it. A pass or a transform
of a user's may add keys of its own: a name with a dot in it, such as ``"mypackage.cost"``. Such a key needs no
declaration, is carried to replacements, and is never read by this project.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import fx

from .._torch import OpOverload, Placement
from .collectives import Collective
from .origin import Origin
from .roles import Phase


class Relation(IntEnum):
    """The relation of a new node to the node it is made for, from the closest to the most distant one.

    A key is carried to a relation and to all closer ones.
    """

    REPLACEMENT = 1  # has the same value, for the same readers
    SHARE = 2  # computes one rank's share of the value
    STEP = 3  # does a part of the same work
    HELPER = 4  # is needed for it or for several like it: packs, copies, waits, allocates


@dataclass(frozen=True)
class Key:
    """One key. ``writers`` and ``readers`` are files or folders, seen from the root of the repository.

    ``carried``: the most distant relation that the key is carried to; None for what is true of one node alone.
    """

    name: str
    type: type
    says: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    carried: Relation | None = Relation.REPLACEMENT


_CAPTURE, _PARTITIONER = "spmd/capture", "spmd/partitioner"
_PRINTER = "passes/ir/printer.py"
_BUNDLE = "passes/ir/bundle.py"
_ERRORS = "passes/unexpected_errors.py"
_MEMORY = "passes/memory"
_SCHEDULE = "passes/schedule"
_REPORT = "passes/report.py"
_PAGE = "passes/page"
_REGIONS = "passes/regions"
_MICRO_BATCHES = "spmd/micro_batches"
_STAGES = "spmd/stages"
_PLANNING = "spmd/planning/kernels.py"
_MERGE_EQUAL = "passes/cleanup/merge_equal.py"

KEYS: tuple[Key, ...] = (
    # The position in the train step.
    Key(
        "phase",
        Phase,
        "the part of the step: forward, backward, update",
        (
            _CAPTURE,
            _PARTITIONER,
            "passes/analysis/foreach_ops.py",
            "passes/communication",
            "passes/memory/recompute.py",
        ),
        (
            _CAPTURE,
            _PRINTER,
            _PARTITIONER,
            "passes/communication",
            "passes/update",
            _MEMORY,
            "spmd/verification",
            _SCHEDULE,
            _REPORT,
            _REGIONS,
            _MICRO_BATCHES,
            _STAGES,
            _PLANNING,
            "spmd/planning/recipes.py",
        ),
        Relation.HELPER,
    ),
    Key(
        "module",
        str,
        "the path of the module whose forward was running, or whose backward this is",
        (_CAPTURE, _PARTITIONER, "passes/communication"),
        (
            _CAPTURE,
            _PRINTER,
            _PARTITIONER,
            "passes/communication",
            _MEMORY,
            _ERRORS,
            _SCHEDULE,
            _REPORT,
            _MICRO_BATCHES,
            _STAGES,
            _PLANNING,
        ),
        Relation.HELPER,
    ),
    # The work that the node does.
    Key(
        "source",
        str,
        "the user's line: file, number and text",
        (_CAPTURE,),
        (
            _CAPTURE,
            _PRINTER,
            "passes/ir/check_bundle.py",
            "spmd/dump.py",
            _PARTITIONER,
            "passes/memory/peak_memory.py",
            "passes/update",
            _ERRORS,
            "spmd/lowering/codegen.py",
            "spmd/lowering/cuda_graphs.py",
            "spmd/lowering/compiled_regions.py",
            _SCHEDULE,
            _REPORT,
            _PAGE,
            "spmd/verification",
            _MICRO_BATCHES,
        ),
        Relation.STEP,
    ),
    Key(
        "recompute_of",
        str,
        "the name of the node that computed the same before: it is repeated on purpose",
        (_CAPTURE, "passes/communication", _MEMORY),
        (_CAPTURE, _MERGE_EQUAL, "passes/communication", _PARTITIONER, _REGIONS, _STAGES),
        Relation.STEP,
    ),
    Key(
        "draw",
        int,
        "the number of a random op's draw; equal numbers draw the same",
        (_CAPTURE,),
        (_CAPTURE, "spmd/running", _PARTITIONER, "spmd/verification"),
        Relation.SHARE,
    ),
    Key(
        "origin",
        Origin,
        "all that the traces know of an op; the keys above spell it out for passes and dumps",
        (_CAPTURE,),
        (_CAPTURE, _PARTITIONER),
    ),
    # The value.
    Key(
        "grad_of",
        str,
        "the name of the parameter whose complete gradient this is",
        (_CAPTURE, _PARTITIONER, "passes/ir/edit.py", _MICRO_BATCHES),
        (_CAPTURE, _PARTITIONER, "passes/ir/edit.py", _MEMORY, _MICRO_BATCHES, _STAGES),
        Relation.SHARE,
    ),
    Key(
        "placement",
        tuple,
        "how the ranks hold the global value: a torch ``Placement`` for each axis of the mesh",
        (_PARTITIONER, _MICRO_BATCHES),
        (
            _MERGE_EQUAL,
            "passes/cleanup/fold_views.py",
            "passes/ir/bundle.py",
            _PARTITIONER,
            _PAGE,
            "spmd/verification",
            _MICRO_BATCHES,
            _PLANNING,
        ),
    ),
    Key(
        "in_time",
        Placement,
        "how the runs of a call hold the value, where each micro-batch has a part of it",
        (_MICRO_BATCHES,),
        ("spmd/verification",),
    ),
    Key(
        "captured",
        str,
        "the name of the node of the captured program whose value this rank has a part of, by its placement",
        (_PARTITIONER, _MICRO_BATCHES),
        ("spmd/verification", _MICRO_BATCHES),
    ),
    Key(
        "uneven",
        str,
        "the global shapes and placements of which ranks hold unequal parts; empty if all parts are equal",
        (_PARTITIONER, _REGIONS),
        (_MERGE_EQUAL, "passes/analysis", _STAGES),
    ),
    Key(
        "numbers",
        str,
        "the source of numbers among the arguments that differ from rank to rank, such as the length of a shard",
        (_PARTITIONER,),
        (_MERGE_EQUAL, _BUNDLE),
    ),
    Key(
        "part_of",
        str,
        "the name of the parameter whose part, updated by this rank, this is before the update",
        (_PARTITIONER, _MICRO_BATCHES),
        ("passes/update",),
    ),
    Key(
        "update_of",
        str,
        "the name of the parameter whose part, updated by this rank, this is after the update",
        (_PARTITIONER, _MICRO_BATCHES),
        ("passes/update",),
    ),
    # The op itself.
    Key(
        "collective",
        Collective,
        "what a collective communicates, for what and why; every node that starts one has it",
        (
            "passes/ir/program.py",
            "passes/ir/saved_program.py",
            _MERGE_EQUAL,
            "passes/communication",
            _PARTITIONER,
            _STAGES,
            _MICRO_BATCHES,
        ),
        (
            "passes/ir",
            _MERGE_EQUAL,
            "passes/communication",
            "passes/update/cut_and_join.py",
            _MEMORY,
            _SCHEDULE,
            "passes/report.py",
            "passes/fit_memory.py",
            _PARTITIONER,
            "spmd/running",
            "spmd/verification",
            _MICRO_BATCHES,
            _PLANNING,
        ),
        None,
    ),
    Key(
        "completes",
        str,
        "the name of the node that starts a collective, whose result this node computes of what was received",
        ("passes/communication",),
        ("passes/communication",),
        None,
    ),
    Key(
        "most_bytes",
        int,
        "the bytes that a collective moves on the rank that moves the most: equal on all ranks",
        (_PARTITIONER, _MICRO_BATCHES, "passes/analysis/agreed_sizes.py"),
        ("passes/analysis/agreed_sizes.py",),
        None,
    ),
    Key(
        "computes",
        OpOverload,
        "the functional op that a node performs by an out variant",
        (_MEMORY,),
        (_MEMORY, _SCHEDULE, "spmd/verification", "tests/harness/structure.py"),
        None,
    ),
    Key(
        "live_bytes",
        int,
        "of the node that reserves an arena, the most bytes that are in use at once",
        (_MEMORY,),
        (_MEMORY,),
        None,
    ),
)

_TORCH = {
    "val": "the fake tensors or numbers of the result; ``fill_vals`` infers missing ones",
    "example_value": "``val`` as Dynamo names it",
    "tensor_meta": "shape, dtype and strides of the result while tracing",
    "unbacked_bindings": "symbols that the op introduces, and where they are in the result",
    "type": "the Python type of the result",
    "stack_trace": "the Python stack of the traced call",
    "nn_module_stack": "the modules whose forward was running",
    "fwd_nn_module_stack": "the same of a backward node's forward op",
    "source_fn_stack": "the functions and modules that Dynamo traced through",
    "fwd_source_fn_stack": "the same of a backward node's forward op",
    "torch_fn": "the function of torch that was called",
    "original_aten": "the op that was decomposed",
    "from_node": "the node of an earlier graph",
    "seq_nr": "the number of the autograd node",
    "autograd_backward": "whether the op was traced in an autograd backward",
    "is_gradient_acc": "whether the op accumulates gradients",
    "partitioner_tag": "forward or backward, for torch's partitioners",
    "recompute": "the policy of activation checkpointing",
    "ac_graph_id": "the checkpointed region",
    "memory_budget": "the budget of activation checkpointing",
    "saved_for_offloading": "whether an activation is offloaded",
    "has_backward_hook": "whether the result has a backward hook",
    "mutation_region_id": "the region of mutations that the node belongs to",
    "nested_region_config": "how an invoked subgraph is to be compiled",
    "eager_input_vals": "fake arguments as eager mode saw them",
    "grapharg": "Dynamo's source of an input",
    "tensor_dict": "Python attributes of an input",
    "desc": "AOTAutograd's description of an input or output",
    "custom": "annotations by ``torch.fx.traceback.annotate``",
    "quantization_tag": "annotation for quantization",
    "_numeric_debug_handle": "annotation for debugging quantization",
}

TORCH_KEYS: tuple[Key, ...] = tuple(
    Key(name, object, says, ("torch",), (), None if name == "val" else Relation.REPLACEMENT)
    for name, says in _TORCH.items()
)
"""The keys that torch's own tracers write. Of these the project writes and reads ``val`` alone, everywhere."""

DECLARED: dict[str, Key] = {key.name: key for key in (*KEYS, *TORCH_KEYS)}

_CARRIED = {
    relation: frozenset(name for name, key in DECLARED.items() if (key.carried or 0) >= relation)
    for relation in Relation
}


def is_declared(name: str) -> bool:
    """Whether a node may have a key: one of the table, or a user's own, with a dot in its name."""
    return name in DECLARED or "." in name


def carried(node: fx.Node, relation: Relation) -> dict[str, Any]:
    """The meta of a node that also holds for a node of this relation to it."""
    known, others = _CARRIED[relation], relation is Relation.REPLACEMENT
    return {key: value for key, value in node.meta.items() if key in known or (others and key not in DECLARED)}
