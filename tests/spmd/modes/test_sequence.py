"""Context parallelism: attention over a split sequence in each form, balanced or not, beside the plain step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import spmd
from passes import Kind, PartitionError, Role
from spmd.partitioner.redistribute import Redistribution
from spmd.rules.sequences import bands
from spmd.rules.sequences.ring import Blocks
from tests.harness.fake import fake_world
from tests.harness.oracle import all_unequal, snapshot
from tests.harness.pool import Ranks

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="its fake kernel of attention in float64 gives log-sum-exps in float32"
)
VOCABULARY, WIDTH, HEADS = 13, 16, 4
CONTEXT = {"axes": {"sequence": "cp"}}


class Layer(nn.Module):
    """Rotated queries and keys, fewer heads of keys, and a projection; ``given``: more arguments of attention."""

    def __init__(self, kv: int, **given: Any) -> None:
        super().__init__()
        self.kv, self.given = kv, given
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS * kv) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n = self.norm(x)
        query, key, value = (
            each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query(n), self.key(n), self.value(n))
        )
        seen = F.scaled_dot_product_attention(
            rotated(query), rotated(key), value, attn_mask=mask, enable_gqa=self.kv != HEADS, **self.given
        )
        return x + self.out(seen.transpose(1, 2).flatten(2)).tanh()


def rotated(x: Tensor) -> Tensor:
    """``x`` turned by an angle for each position, as rotary embeddings do."""
    angle = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), 0.1 ** torch.arange(2, dtype=x.dtype)).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-second, first), -1) * angle.sin()


class Net(nn.Module):
    def __init__(self, kv: int, **given: Any) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(VOCABULARY, WIDTH), Layer(kv, **given), nn.Linear(WIDTH, 13)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embed(x), mask))
        return logits


def train(model: nn.Module, optimizer: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Predict the next token, as transformers shifts labels: the last position has none."""
    labels, logits = F.pad(x, (0, 1), value=-100)[:, 1:], model(x, mask)
    return updated(optimizer, F.cross_entropy(logits.flatten(0, 1), labels.flatten())), logits


def train_on_labels(model: nn.Module, optimizer: Any, x: Tensor, labels: Tensor) -> Tensor:
    return updated(optimizer, F.cross_entropy(model(x).flatten(0, 1), labels.flatten()))


def train_smoothed(model: nn.Module, optimizer: Any, x: Tensor, labels: Tensor) -> Tensor:
    return updated(optimizer, F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), label_smoothing=0.1))


def train_packed(model: nn.Module, optimizer: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    return updated(optimizer, model(input_ids=tokens, labels=tokens, position_ids=positions).loss)


def train_half(model: nn.Module, optimizer: Any, x: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    return updated(optimizer, F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()))


def updated(optimizer: Any, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(length: int, kv: int = HEADS, rows: int = 1, momentum: float = 0.9, **given: Any) -> tuple[Any, ...]:
    """The model, its optimizer, and a batch; without momentum all calls on ranks run one program."""
    torch.manual_seed(0)
    model = Net(kv, **{"is_causal": True, **given}).double()
    x = torch.randint(VOCABULARY, (rows, length))
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum), x


def verified(
    given: tuple[Any, ...], mesh: dict[str, int] | None = None, step: Any = train, passes: Any = None, **mode: Any
) -> Any:
    """The verdict. ``passes=()`` where the partitioner alone decides: cases beside have the rest of a compilation."""
    mesh = mesh or {"cp": 2}
    step = spmd.compile(step, parallel_mode=spmd.DataParallel(**{**CONTEXT, **mode}), passes=passes)
    return spmd.verify(step, *given, mesh=mesh, world=torch.Size(mesh.values()).numel(), steps=2)


def certified(given: tuple[Any, ...], world: int = 2, step: Any = train, passes: Any = None, **mode: Any) -> Any:
    step = spmd.compile(step, parallel_mode=spmd.DataParallel(**CONTEXT, **mode), passes=passes)
    return spmd.certify(step, *given, mesh={"cp": world}, world=world)


# Numbers


@pytest.mark.slow
@pytest.mark.parametrize("attention, length, kv, causal, ranks, mode", [
    # In every run on two ranks of gloo: test_five_steps_on_gloo_ranks.
    pytest.param("gather", 8, 2, True, 2, {"parallel_style": "fully_shard"}, marks=pytest.mark.exhaustive),
    ("gather", 5, 4, True, 3, {}),  # in six parts, of which one is empty
    pytest.param("ring", 16, 2, True, 4, {}, marks=pytest.mark.exhaustive),
    ("ring", 10, 1, True, 3, {"parallel_style": "fully_shard"}),
    pytest.param("ring", 8, 4, False, 2, {"balance": False}, marks=pytest.mark.exhaustive),
    ("heads", 8, 2, True, 2, {}),
    pytest.param(None, 12, 1, True, 2, {"shard_optimizer": True}, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_the_numbers_are_those_of_the_plain_step(
    attention: Any, length: int, kv: int, causal: bool, ranks: int, mode: Any
) -> None:
    given = arguments(length, kv, is_causal=causal)
    assert verified(given, {"cp": ranks}, attention=attention, **mode)


class Convolved(Net):
    """With a convolution beside attention, which takes whole sequences of some rows, or of all."""

    def __init__(self, kv: int, **given: Any) -> None:
        super().__init__(kv, **given)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        seen = torch.tanh(self.layer(h) + self.convolution(h.transpose(1, 2)).transpose(1, 2))
        logits: Tensor = self.head(h + seen)
        return logits


def test_a_rank_takes_no_rows_of_other_micro_batches_for_a_sequence() -> None:
    """To exchange the sequence for rows sends less than to gather it, but each micro-batch has its own rows only."""
    torch.manual_seed(0)
    model = Convolved(HEADS, is_causal=True).double()
    given = model, torch.optim.SGD(model.parameters(), lr=0.5), *torch.randint(VOCABULARY, (2, 8, 8))
    assert verified(given, step=train_on_labels, passes=(), attention="heads", micro_batches=2)


class Biased(Net):
    """With a bias of each head that is trained."""

    def __init__(self, length: int) -> None:
        super().__init__(2)
        self.bias = nn.Parameter(torch.randn(HEADS, length, length))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, self.bias)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gather", "heads"])
def test_a_bias_that_is_trained(attention: Any) -> None:
    model, _, x = arguments(8, 2, rows=2)
    model = Biased(8).double()
    assert verified((model, torch.optim.SGD(model.parameters(), lr=0.5), x), passes=(), attention=attention)


class Decoder(Net):
    """Rows that attend to a memory, of which each row of the batch has one class."""

    def __init__(self) -> None:
        super().__init__(2, is_causal=True)
        self.seen, self.rows = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def read(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.layer(self.embed(x))
        query, key, value = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.seen(h), *self.rows(self.embed(memory)).chunk(2, -1))
        )
        seen = F.scaled_dot_product_attention(query, key, value, scale=0.3)
        return h + seen.transpose(1, 2).flatten(2)

    def attend(self, x: Tensor, memory: Tensor) -> Tensor:
        logits: Tensor = self.head(self.read(x, memory).mean(1))
        return logits


def train_on_memory(model: Any, optimizer: Any, x: Tensor, memory: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
    return updated(optimizer, F.cross_entropy(model.attend(x, memory) * weight, classes))


def translate(model: Any, optimizer: Any, x: Tensor, memory: Tensor, labels: Tensor) -> Tensor:
    return updated(optimizer, F.cross_entropy(model.head(model.read(x, memory)).flatten(0, 1), labels.flatten()))


@pytest.mark.slow
@pytest.mark.parametrize("attention, lengths", [
    ("ring", (8, 12)),
    ("heads", (12, 8)),
    pytest.param(None, (7, 5), marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_attention_to_a_sequence_of_another_length(attention: Any, lengths: tuple[int, int]) -> None:
    """Beside arguments that are no sequences: rows by classes, and rows by one."""
    torch.manual_seed(0)
    model, (x, memory) = Decoder().double(), (torch.randint(VOCABULARY, (2, length)) for length in lengths)
    classes, weight = torch.rand(2, 13, dtype=torch.float64).softmax(-1), torch.rand(2, 1, dtype=torch.float64)
    given = model, torch.optim.SGD(model.parameters(), lr=0.5), x, memory, classes, weight
    assert verified(given, step=train_on_memory, passes=(), attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("length", [10, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_balanced_rows_attend_to_a_sequence_of_another_length_in_micro_batches(length: int) -> None:
    """Rows that are mirrored, for causal attention, stay so: to lay them out anew would take rows of all runs."""
    torch.manual_seed(0)
    model, (x, memory) = Decoder().double(), (torch.randint(VOCABULARY, (4, n)) for n in (8, length))
    given = model, torch.optim.SGD(model.parameters(), lr=0.5), x, memory, x.roll(-1, 1)
    assert verified(given, step=translate, passes=(), attention="ring", micro_batches=2)


class Scan(Net):
    """A causal convolution along the sequence, and a scan whose decay depends on it, behind attention."""

    def __init__(self) -> None:
        super().__init__(2, is_causal=True)
        self.conv, self.decay = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.layer(self.embed(x))
        near = self.conv(F.pad(h.mT, (3, 0))).mT
        total = -F.softplus(self.decay + near).cumsum(1)
        logits: Tensor = self.head(h + (near - total).exp().cumsum(1) * total.exp())
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("mode", [
    {},
    pytest.param({"balance": False, "parallel_style": "fully_shard"}, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_convolutions_and_scans_along_the_sequence(mode: Any) -> None:
    _, _, x = arguments(8, rows=2)
    model = Scan().double()
    assert verified((model, torch.optim.SGD(model.parameters(), lr=0.1), x), passes=(), **mode)


def train_packed_in_a_window(model: nn.Module, optimizer: Any, x: Tensor, ends: Tensor) -> Tensor:
    """Documents that end at ``ends``, as kernels for packed rows take them, and a window of three tokens."""
    rows = torch.arange(x.shape[1])
    document, keys = torch.bucketize(rows, ends, right=True), rows[None]
    seen = (document[:, None] == document) & (keys <= rows[:, None]) & (keys > rows[:, None] - 3)
    return updated(optimizer, F.cross_entropy(model(x, seen).flatten(0, 1), x.roll(-1, 1).flatten()))


def train_with_a_bias_near(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """A bias of 1 in a window, and of 0 outside, which hides nothing."""
    rows = torch.arange(x.shape[1])
    near = (rows <= rows[:, None]) & (rows > rows[:, None] - 3)
    return updated(optimizer, F.cross_entropy(model(x, near.double()).flatten(0, 1), x.roll(-1, 1).flatten()))


@pytest.mark.slow
@pytest.mark.parametrize("attention", [pytest.param("gather", marks=pytest.mark.exhaustive), "ring"])
def test_a_bias_by_positions_hides_nothing(attention: Any) -> None:
    assert verified(arguments(8, 2, is_causal=False), step=train_with_a_bias_near, passes=(), attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention, keys", [
    ("gather", [6]),  # of 16: four of its own, and two before
    ("ring", [4, 4]),  # its own, and those of the rank before, of four ranks
])  # fmt: skip
def test_a_window_of_packed_documents_skips_what_no_row_sees(attention: Any, keys: Any) -> None:
    given = *arguments(16, 2, is_causal=False), torch.tensor([5, 7, 16])
    whole = {"inputs": {"ends": Replicate()}, "attention": attention}
    assert verified(given, {"cp": 4}, train_packed_in_a_window, passes=(), **whole)
    with fake_world(4, 2):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        step = spmd.compile(train_packed_in_a_window, parallel_mode=spmd.DataParallel(mesh=mesh, **CONTEXT, **whole))
        step(*given)
    nodes = [n for n in step.program.graph.nodes if "attention_for_cpu" in str(n.target)]
    read = [n.all_input_nodes[2 if "backward" in str(n.target) else 1].meta["val"] for n in nodes]
    assert [key.shape[2] for key in read] == 2 * keys, "in forward and backward"


@pytest.mark.slow
@pytest.mark.parametrize("attention, step, mesh", [
    ("ring", train_on_labels, {"dp": 2, "cp": 2}),
    ("heads", train_smoothed, {"cp": 2}),
    pytest.param("gather", train_on_labels, {"dp": 2, "cp": 2}, marks=pytest.mark.exhaustive),
    pytest.param("heads", train_smoothed, {"dp": 2, "cp": 2}, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_sequence_batch_and_micro_batches(attention: Any, step: Any, mesh: dict[str, int]) -> None:
    axes = {"sequence": "cp", **({"batch": "dp"} if "dp" in mesh else {})}
    model, optimizer, x = arguments(8, 2, rows=4 * mesh.get("dp", 1))
    given = model, optimizer, x, x.roll(-1, 1)
    assert verified(given, mesh, step, passes=(), axes=axes, attention=attention, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gather", "heads"])
def test_half_precision_merges_in_float32(attention: Any) -> None:
    model, _, x = arguments(8, 2)
    given = model.float(), torch.optim.SGD(model.parameters(), lr=0.1), x, x.roll(-1, 1)
    assert verified(given, step=train_half, passes=(), attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ring", pytest.param("heads", marks=pytest.mark.exhaustive)])
def test_parameters_and_sums_in_half_precision(attention: Any) -> None:
    model, _, x = arguments(8, 2)
    given = model.float(), torch.optim.SGD(model.parameters(), lr=0.1), x
    policy = spmd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert verified(given, attention=attention, parallel_style="fully_shard", mp_policy=policy)


@pytest.mark.slow
def test_sequence_beside_tensor_parallel() -> None:
    axes = {"tensor": "tp", "sequence": "cp"}
    params = {f"*.{name}.{of}": {"tp": Shard(0)} for name in ("query", "key", "value") for of in ("weight", "bias")}
    params["*.out.weight"] = {"tp": Shard(1)}
    assert verified(arguments(8, 2), {"tp": 2, "cp": 2}, passes=(), axes=axes, params=params, attention="ring")


def train_with_dropout(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    h = F.dropout(model.layer(F.dropout(model.embed(x), 0.25)), 0.25)
    return updated(optimizer, (h.sin() * torch.arange(1, 9, dtype=h.dtype)[:, None]).mean())


@pytest.mark.slow
@pytest.mark.parametrize("dropout, mode", [
    (0.5, {}),  # torch computes it from the scores: rows stay split, and keys are gathered
    (0.0, {"attention": "ring"}),
    pytest.param(0.0, {"attention": "gather", "balance": False}, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_dropout_draws_as_on_whole_sequences(dropout: float, mode: Any) -> None:
    assert verified(arguments(8, 2, dropout_p=dropout), step=train_with_dropout, passes=(), **mode)


def drawn_in_each_form(rank: int, world: int) -> list[Tensor]:
    """The losses of two steps with an invariant seed: of the first rank alone, and of all in each form."""
    alone, mesh = (DeviceMesh("cpu", ranks, mesh_dim_names=("cp",)) for ranks in ([rank], [*range(world)]))
    modes = (alone, {}), (mesh, {}), (mesh, {"attention": "ring", "balance": False}), (mesh, {"attention": "heads"})
    losses = []
    for on, of_form in modes[min(rank, 1) :]:
        spmd.seed(5, invariant=True)
        mode = spmd.DataParallel(mesh=on, **CONTEXT, **of_form)
        step = spmd.compile(train_with_dropout, parallel_mode=mode, passes=())
        given = arguments(8, 2, momentum=0.0)
        losses.append(torch.stack([step(*given) for _ in range(2)]))
    return losses


def test_invariant_draws_follow_positions_in_each_form(ranks: Ranks) -> None:
    (alone, *forms), others = ranks.run(2, drawn_in_each_form)
    assert alone[0] != alone[1]
    for each in (*forms, *others):
        torch.testing.assert_close(each, alone, rtol=1e-9, atol=0)


PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2]])


@pytest.mark.slow
@pytest.mark.parametrize("name, attention, given", [
    pytest.param("Mistral", "sdpa", {"sliding_window": 3}, marks=pytest.mark.exhaustive),
    ("Gemma2", "eager", {"sliding_window": 3, "attn_logit_softcapping": 2.0}),  # has layers with and without a window
    pytest.param("Qwen3", "sdpa", {}, marks=pytest.mark.exhaustive),
    ("Llama", "sdpa", None),
])  # fmt: skip
def test_unmodified_models_of_transformers(name: str, attention: str, given: Any) -> None:
    """Positions that start again say where a document ends; rows of one document see by ``is_causal``."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    layers = 1 + (name == "Gemma2")
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **(given or {}), attn_implementation=attention)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    positions = PACKED if given is not None else torch.arange(8).expand(2, 8)
    arguments = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randint(16, (2, 8)), positions
    assert verified(arguments, step=train_packed, passes=None if name == "Llama" else ())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_encoder_of_transformers_with_local_layers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
    local = {"num_attention_heads": 4, "local_attention": 4, "global_attn_every_n_layers": 2}
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes, **local)).double()
    x = torch.randint(1, 16, (2, 8))
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), x, torch.arange(8).expand(2, 8)
    assert verified(given, step=train_packed)


LENGTHS: dict[int, dict[Any, int]] = {
    2: {"gather": 7, "heads": 8},
    3: {"ring": 12},
}  # by ranks; 7 has no equal parts


def run_forms(rank: int, world: int) -> list[str]:
    """Five steps of each form beside five plain ones, on gloo ranks."""
    mesh, found = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)), []
    for form, length in LENGTHS[world].items():
        mode = spmd.DataParallel("fully_shard", mesh=mesh, attention=form, **CONTEXT)
        step, seen = spmd.compile(train, parallel_mode=mode), []
        for each in (train, step):
            model, optimizer, x = arguments(length, 2, momentum=0.9 if form == "ring" else 0.0)
            calls = [(x + k) % VOCABULARY for k in range(5)]
            seen.append([snapshot(each(model, optimizer, call), (model, optimizer)) for call in calls])
        found += [f"{form} of {length}, {line}" for line in all_unequal(*seen, 0, 1)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_five_steps_on_gloo_ranks(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, run_forms) == [[]] * world


@pytest.mark.slow
@pytest.mark.parametrize("attention, length, world, mode", [
    ("gather", 8, 2, {}),
    ("ring", 12, 3, {"parallel_style": "fully_shard", "passes": ()}),
])  # fmt: skip
def test_the_certificate_shows_what_is_merged(attention: Any, length: int, world: int, mode: Any) -> None:
    found = certified(arguments(length, 2), world, attention=attention, **mode)
    assert found and not found.routed, found


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gather", pytest.param("ring", marks=pytest.mark.exhaustive)])
def test_the_certificate_shows_what_a_window_skips(monkeypatch: pytest.MonkeyPatch, attention: Any) -> None:
    given = *arguments(9, 2, is_causal=False), torch.tensor([5, 7, 9])
    mode = {"inputs": {"ends": Replicate()}, "attention": attention, "passes": ()}
    found = certified(given, 3, train_packed_in_a_window, **mode)
    assert found and found.routed, found
    if attention == "gather":
        band = bands._band
        monkeypatch.setattr(bands, "_band", lambda *given: replace(band(*given), low=0))  # of each row, its own key
        assert not certified(given, 3, train_packed_in_a_window, **mode)


# What is communicated and computed


def program(
    rank: int = 0, world: int = 2, length: int = 16, rows: int = 1, passes: Any = None, **mode: Any
) -> spmd.CompiledStep:
    with fake_world(world, rank):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, **CONTEXT, **mode), passes=passes)
        step(*arguments(length, rows=rows))
    return step


@pytest.mark.parametrize("attention, kind, count", [
    ("gather", {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}, 4),
    ("ring", {Kind.ALL_TO_ALL}, 9),
    ("heads", {Kind.ALL_TO_ALL}, 8),
])  # fmt: skip
def test_each_form_communicates_as_published(attention: Any, kind: set[Kind], count: int) -> None:
    """Keys and values, and their gradients; on a ring of 4, keys 3 times in each direction, and gradients 3 times."""
    traffic = program(world=4, attention=attention).report().traffic
    moved = [t for t in traffic if t.role == Role.ACTIVATION and t.dtype == "float64"]
    assert {t.kind for t in moved} == kind
    of_each = 64 * 16 // 4 * 8  # bytes of a rank's rows
    sent = sum(t.bytes for t in moved)
    assert (
        sent
        == {"gather": 2 * of_each + 2 * 4 * of_each, "ring": 3 * 3 * 2 * of_each, "heads": 8 * of_each}[attention] // 4
    )
    if attention != "gather":  # gathers of keys and values are one
        assert sum(t.count for t in moved) == count


@pytest.mark.parametrize("attention, balance", [("gather", True), ("ring", True), ("ring", False)])
def test_balanced_ranks_compute_equally_much(attention: Any, balance: bool) -> None:
    scores = []
    for rank in range(2):
        step = program(rank, passes=(), attention=attention, balance=balance)
        nodes = [n for n in step.program.graph.nodes if "attention_for_cpu.default" in str(n.target)]
        shapes = [[each.meta["val"].shape for each in node.args[:2]] for node in nodes]
        scores.append(sum(query[2] * key[2] for query, key in shapes))
    assert (max(scores) < 1.1 * min(scores)) == balance


@pytest.mark.usefixtures("alone")
def test_rows_are_mirrored_beside_an_axis_of_one_rank() -> None:
    with fake_world(2):
        mesh, axes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")), {"batch": "dp", "sequence": "cp"}
        step: Any = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, axes=axes, attention="ring"))
        step(*arguments(16))
    reports = [each.report() for each in (step, program(attention="ring"))]
    beside, alone = ([(t.kind, t.count, t.bytes) for t in report.traffic] for report in reports)
    assert beside == alone


def test_attention_that_is_computed_whole_has_a_note() -> None:
    programs = [program(length=7, rows=rows, passes=()) for rows in (1, 2)]
    whole = [[note for note in each.report().notes if "whole" in note] for each in programs]
    assert not whole[0] and "test_sequence.py" in whole[1][0] and "by each of the 2 ranks of cp" in whole[1][0]


def test_rows_that_are_gathered_along_the_sequence_have_a_note() -> None:
    """Not those that attention reads."""
    with fake_world(2):
        mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), Scan().double()
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, attention="gather", **CONTEXT))
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), arguments(8)[2])
    notes = [note for note in step.report().notes if "are gathered" in note]
    assert all("needs rows of the sequence that other ranks of cp have" in note for note in notes)
    assert any("near = self.conv(" in note for note in notes)
    assert not any("scaled_dot_product" in note for note in notes)


@pytest.mark.parametrize("rank, expected", [(0, (0, 2)), (1, (0, 2)), (2, (1, 2)), (3, (1, 2))])
def test_ranks_of_one_sequence_have_one_index_for_a_sampler(rank: int, expected: tuple[int, int]) -> None:
    with fake_world(4, rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        assert spmd.data_rank(spmd.DataParallel(mesh=mesh, axes={"batch": "dp", "sequence": "cp"})) == expected
        assert spmd.data_rank(spmd.DataParallel()) == (rank, 4)


# Wrong programs are found


@pytest.mark.slow
def test_a_stale_block_in_a_ring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = Blocks.passed
    monkeypatch.setattr(Blocks, "passed", lambda self, *given: [passed(self, *given), list(given[0])][1])
    assert not verified(arguments(8), passes=(), attention="ring")
    assert not certified(arguments(8), passes=(), attention="ring")


@pytest.mark.slow
def test_labels_that_are_not_mirrored_with_their_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mirrored = Redistribution._in_order_of_ranks

    def but_labels(self: Any, node: Any, *more: Any) -> Any:
        return (
            node
            if node.meta["val"].dtype == torch.int64 and "argument" not in self.reason.role
            else mirrored(self, node, *more)
        )

    monkeypatch.setattr(Redistribution, "_in_order_of_ranks", but_labels)
    assert not verified(arguments(8), passes=(), attention="ring")
    assert not certified(arguments(8), passes=(), attention="ring")


# What cannot be


@pytest.mark.parametrize("given, message", [
    ({"attention": "spiral", **CONTEXT}, 'attention to be "gather", "ring", "heads" or None, got \'spiral\''),
    ({"attention": "ring"}, 'no attention="ring" without an axis that splits sequences'),
])  # fmt: skip
def test_options_that_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spmd.DataParallel(**given)


def test_heads_that_do_not_divide_are_refused_at_the_users_line() -> None:
    with pytest.raises(
        PartitionError, match=r'attention="heads" to fit each call, but over the 3 ranks of cp'
    ) as raised:
        program(world=3, length=12, attention="heads")
    assert "test_sequence.py" in str(raised.value)
