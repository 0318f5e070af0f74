"""The estimated step of a layout: seconds by cause, and memory by role, from sections of kernels.

Blocks follow each other, so the time of one is that of all of its kind: compute of the device, or launches where these
take longer, with collectives along "tensor" in between, and gathers and reductions of a unit beside it. Stages of a
pipeline wait for each other as in 1F1B (Narayanan et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from passes import Kind, Phase
from passes.schedule.op_work import OpClass

from .kernels import Kernel, Message, Section
from .layout import Layout
from .machine import Machine


@dataclass(frozen=True)
class Traffic:
    """What a block sends beside what was captured: bytes for each row."""

    tokens: float = 0.0  # to experts, and as many back
    copies: int = 1  # of each token among them
    keys: float = 0.0  # keys and values that ranks along "context" gather


@dataclass(frozen=True)
class State:
    """Bytes for each number of a model: of itself, of its gradient, and of what only updates read.

    ``gathered``: as it is sent, if that is narrower.
    """

    weight: float = 2
    gradient: float = 4
    optimizer: float = 12
    gathered: float | None = None

    @property
    def sent(self) -> float:
        """Bytes of a number that is gathered."""
        return self.weight if self.gathered is None else self.gathered

    @property
    def updated(self) -> float:
        """Bytes that an update moves for each number."""
        return 2 * self.weight + self.gradient + 2 * self.optimizer


@dataclass(frozen=True)
class Work:
    """Sections of a model, each op by itself, and with pointwise ops fused; and the bytes of its state.

    ``is_tied``: one matrix reads and writes tokens.
    """

    plain: Sequence[Section]
    fused: Sequence[Section]
    state: State = State()
    traffic: Traffic = Traffic()
    is_tied: bool = False


@dataclass(frozen=True)
class Estimate:
    """One step: seconds in all and by cause, bytes in all and by role."""

    seconds: float
    causes: Mapping[str, float]
    memory: Mapping[str, float]

    @property
    def peak(self) -> float:
        """Bytes of the rank that has the most."""
        return sum(self.memory.values())

    @property
    def exposed(self) -> float:
        """Seconds in which a rank neither computes nor updates."""
        return self.seconds - self.causes["compute"] - self.causes["update"]


def estimate(work: Work, layout: Layout, machine: Machine) -> Estimate:
    """The step of ``layout``."""
    return _Step(work, layout, machine).estimate()


@dataclass(frozen=True)
class _Time:
    """Seconds of a part: of the device, of the host that launches, and of collectives that nothing hides."""

    device: float = 0.0
    host: float = 0.0
    exposed: float = 0.0
    knee: float = 4.0

    @property
    def seconds(self) -> float:
        longer, shorter = max(self.device, self.host), min(self.device, self.host)
        both = longer * (1 + (shorter / longer) ** self.knee) ** (1 / self.knee) if longer else 0.0
        return both + self.exposed

    def __add__(self, other: _Time) -> _Time:
        return _Time(self.device + other.device, self.host + other.host, self.exposed + other.exposed, self.knee)

    def times(self, by: float) -> _Time:
        return _Time(self.device * by, self.host * by, self.exposed * by, self.knee)


class _Step:
    """The parts of one step."""

    def __init__(self, work: Work, layout: Layout, machine: Machine) -> None:
        self.work, self.layout, self.machine = work, layout, machine
        self.software = machine.software
        self.blocks = [each for each in work.plain if each.count > 1]
        self.ends = [each for each in work.plain if each.count == 1]
        self.fused = {each.name: each for each in work.fused}
        self.counts = [each.count / layout.stages for each in self.blocks]

    def estimate(self) -> Estimate:
        micro_batches = self.layout.micro_batches
        units = [self._unit(each) for each in self.blocks]
        ends = [self._unit(each) for each in self.ends]
        blocks = sum(each.seconds * n for each, n in zip(units, self.counts, strict=True))
        exposed = sum(each.exposed * n for each, n in zip(units, self.counts, strict=True))
        total, idle, messages = self._stages(blocks, [each.seconds for each in ends])
        tensor = micro_batches * sum(
            self._phases(each)[k].exposed * n
            for each, n in zip([*self.blocks, *self.ends], [*self.counts, *[1] * len(ends)], strict=True)
            for k in (0, 1)
        )
        gathers = micro_batches * (exposed + sum(each.exposed for each in ends))
        causes = {
            "compute": total - idle - messages - tensor - gathers,
            "tensor": tensor,
            "gathers": gathers,
            "pipeline": idle,
            "messages": messages,
            "reduction": self._reduction(self.software.hides * total / micro_batches),
            "update": self._update(),
        }
        hosts = max(1.0, self.layout.gpus / self.machine.per_host)
        causes["waiting"] = sum(causes.values()) * self.machine.constants.jitter * math.log2(hosts)
        return Estimate(sum(causes.values()), causes, self._memory())

    def _unit(self, section: Section) -> _Unit:
        """Forward and backward of a section, with its gathers and its reduction beside them."""
        layout, slower = self.layout, self.machine.constants.contention
        forward, backward = self._phases(section)
        if layout.style != "fully_shard" or layout.shards == 1:
            return _Unit(forward.seconds + backward.seconds, 0.0)
        experts = section.expert_parameters
        gather = self._over_shards(Kind.ALL_GATHER, section.parameters - experts, experts)
        reduce = self._over_shards(Kind.REDUCE_SCATTER, section.parameters - experts, experts)
        reduce /= layout.micro_batches if layout.reduces_once else 1
        took = exposed = 0.0
        for part, sent in ((forward, gather), (backward, reduce + (0.0 if layout.keeps_gathered else gather))):
            both = max(part.seconds + slower * min(part.seconds, sent), sent)
            took, exposed = took + both, exposed + both - part.seconds
        return _Unit(took, exposed)

    def _over_shards(self, kind: Kind, dense: float, experts: float) -> float:
        """Seconds to gather or reduce these numbers; those of experts have fewer ranks with the same."""
        layout, state, seconds = self.layout, self.work.state, 0.0
        for numbers, apart in ((dense, 1), (experts, layout.experts)):
            size = numbers * (state.sent if kind is Kind.ALL_GATHER else state.gradient)
            shards, stride = max(1, layout.shards // apart), layout.tensor * apart
            seconds += self.machine.collective(kind, size, shards, stride)
            if kind is Kind.REDUCE_SCATTER and layout.shards < layout.data:
                others = layout.data // layout.shards
                seconds += self.machine.collective(Kind.ALL_REDUCE, size / shards, others, stride * shards)
        return seconds

    def _phases(self, section: Section) -> tuple[_Time, _Time]:
        """Forward, and backward with what it computes again."""
        forward, backward = (self._time(section, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
        if section.count == 1 or self.layout.recompute == "none":
            return forward, backward
        again = forward if self.layout.recompute == "full" else self._again(section, forward)
        return forward, backward + again.times(self.layout.recomputed)

    def _again(self, section: Section, forward: _Time) -> _Time:
        """Forward without what selective recomputation keeps."""
        kept = _kept_selectively(section)
        seconds = sum(map(self._kernel, kept))
        return _Time(forward.device - seconds, forward.host - len(kept) * self.software.launch, knee=forward.knee)

    def _time(self, section: Section, phase: Phase) -> _Time:
        """Kernels and messages of one phase, between fused and unfused as the software is."""
        layout = self.layout
        about = (layout.rows, layout.tensor, layout.context, layout.experts, layout.splits_sequence, layout.bits)
        key = (id(section), phase, *about)
        if key not in self.machine.known:  # with the section, so that no other one gets its id
            unfused = self.software.unfused
            whole = self.fused.get(section.name)  # None where all of it is fused into blocks
            plain, fused = self._of(section, phase), self._of(whole, phase) if whole else _Time()
            self.machine.known[key] = section, plain.times(unfused) + fused.times(1 - unfused)
        found: _Time = self.machine.known[key][1]
        return found

    def _of(self, section: Section, phase: Phase) -> _Time:
        kernels, messages = section.kernels[phase], section.messages[phase]
        sent = sum(self._message(m) * (1.0 if m.to_experts else self.software.exposed) for m in messages)
        host = (len(kernels) + len(messages)) * self.software.launch
        exposed = sent + (self._other_messages(phase) if section.count > 1 else 0.0)
        return _Time(sum(map(self._kernel, kernels)), host, exposed, self.machine.constants.knee)

    def _message(self, message: Message) -> float:
        size, layout = message.bytes.at(self.layout.rows), self.layout
        if not message.to_experts:
            return self.machine.collective(message.kind, size, layout.tensor)
        if message.kind is Kind.ALL_TO_ALL:
            return self.machine.all_to_all(size, layout.experts, layout.tensor)
        return self.machine.collective(message.kind, size, layout.experts, layout.tensor)

    def _other_messages(self, phase: Phase) -> float:
        """Tokens to and from experts, and keys and values along "context", whose gradients go back in backward."""
        layout, traffic = self.layout, self.work.traffic
        size = traffic.tokens * layout.rows
        tokens = self.machine.all_to_all(size, layout.experts, layout.tensor, traffic.copies)
        size = traffic.keys * layout.rows * layout.context
        keys = self.machine.collective(Kind.ALL_GATHER, size, layout.context, layout.tensor)
        return 2 * tokens + keys * (1 if phase is Phase.FORWARD else 2) * self.software.exposed

    def _kernel(self, kernel: Kernel) -> float:
        layout = self.layout
        is_cut = layout.splits_sequence and not kernel.is_split and not kernel.flops.each
        bits = 16 if kernel.module == "head" else layout.bits
        return self.machine.kernel(kernel, layout.rows, bits, 1 / layout.tensor if is_cut else 1.0)

    def _stages(self, blocks: float, ends: Sequence[float]) -> tuple[float, float, float]:
        """Seconds of all micro-batches, and of those the ones that a stage idles, and that messages take.

        The first and the last stage have the ends of the model; where stages have several chunks, ends are spread.
        """
        layout, count = self.layout, self.layout.micro_batches
        if layout.stages == 1:
            return count * (blocks + sum(ends)), 0.0, 0.0
        first, last = (ends[0], sum(ends[1:])) if len(ends) > 1 else (0.0, sum(ends))
        size = self._boundary() * layout.rows / layout.tensor  # each rank along "tensor" sends its part
        message = 2 * self.machine.message(size, layout.gpus // layout.stages, layout.gpus) * layout.chunks
        if layout.chunks > 1:
            message *= 1 - self.software.hides
            slowest = blocks + (first + last) / layout.stages
            idle = (layout.stages - 1) * (slowest + message) / layout.chunks
        else:
            slowest = blocks + (sum(ends) / layout.stages if self.software.balances else max(first, last))
            idle = layout.stages * (blocks + message) + first + last - (slowest + message)
        return count * (slowest + message) + idle, idle, count * message

    def _boundary(self) -> float:
        """Bytes that a block hands to the next one, for each row."""
        return max((each.boundary.each for each in self.blocks), default=0.0)

    @cached_property
    def parameters(self) -> float:
        """Numbers of the stage that has the most, before anything splits them over the batch's axes."""
        blocks = sum(each.parameters * n for each, n in zip(self.blocks, self.counts, strict=True))
        ends = [each.parameters for each in self.ends]
        has_one = self.layout.stages > 1 or self.work.is_tied
        return blocks + (max(ends, default=0.0) if has_one else sum(ends))

    @cached_property
    def experts(self) -> float:
        """The part of ``parameters`` that is of experts."""
        return sum(each.expert_parameters * n for each, n in zip(self.blocks, self.counts, strict=True))

    def _divided(self, ranks: int) -> float:
        """Numbers of a rank, where ``ranks`` divide those of the stage; fewer of them have the same experts."""
        return (self.parameters - self.experts) / ranks + self.experts / max(1, ranks // self.layout.experts)

    def _reduction(self, beside: float) -> float:
        """Seconds to reduce gradients of replicated parameters, and to gather what was updated, ``beside`` compute."""
        layout, state = self.layout, self.work.state
        if layout.style == "fully_shard":
            return 0.0
        kind = Kind.ALL_REDUCE if layout.style == "replicate" else Kind.REDUCE_SCATTER
        reduced = gathered = 0.0
        for numbers, apart in ((self.parameters - self.experts, 1), (self.experts, layout.experts)):
            ranks, stride = layout.data // apart, layout.tensor * apart
            reduced += self.machine.collective(kind, numbers * state.gradient, ranks, stride)
            if layout.style == "shard_optimizer":
                gathered += self.machine.collective(Kind.ALL_GATHER, numbers * state.sent, ranks, stride)
        if self.software.gathers_beside:
            reduced, gathered = reduced + gathered, 0.0
        return max(0.0, reduced - beside) + gathered

    def _update(self) -> float:
        moved = self._divided(self.layout.shards) * self.work.state.updated
        return moved / self.machine.bandwidth + self.software.per_step

    def _memory(self) -> dict[str, float]:
        """Bytes by role on the first stage, which keeps the most micro-batches for their backward."""
        layout, state = self.layout, self.work.state
        is_whole = layout.style != "fully_shard" or layout.shards == 1
        part = 1 if is_whole else layout.shards
        used = {
            "parameters": self._divided(part) * state.weight,
            "gradients": self._divided(1 if layout.reduces_once else part) * state.gradient,
            "optimizer": self._divided(layout.shards) * state.optimizer,
            "gathered": self._gathered(is_whole),
            "activations": self._activations(),
        }
        return used | {"allocator": sum(used.values()) * self.machine.constants.reserved}

    def _gathered(self, is_whole: bool) -> float:
        """Bytes of units that are whole at once: one that computes, the next one, and the gradient of one."""
        if is_whole:
            return 0.0
        state, unit = self.work.state, max((each.parameters for each in self.work.plain), default=0.0)
        ahead = self.parameters if self.layout.keeps_gathered else 2 * unit
        return ahead * state.sent + unit * state.gradient

    def _activations(self) -> float:
        """Bytes that forward keeps for backward: all micro-batches of the first stage, or one of the last, and its end.

        What is recomputed needs all of one block while that runs again.
        """
        layout = self.layout
        kept = sum(self._kept(each) * n for each, n in zip(self.blocks, self.counts, strict=True))
        again = max((self._saved(each) for each in self.blocks), default=0.0) if layout.recompute != "none" else 0.0
        end = max(map(self._most, self.ends), default=0.0)
        return max(kept * min(layout.micro_batches, layout.stages) + again, kept + max(again, end))

    def _most(self, section: Section) -> float:
        """Bytes of what an end keeps, or of what its largest op of backward reads and writes, such as the loss's."""
        moved = (each.bytes.at(self.layout.rows) for each in section.kernels[Phase.BACKWARD])
        return max([self._saved(section), *moved])

    def _kept(self, section: Section) -> float:
        layout, rows, whole = self.layout, self.layout.rows, self._saved(section)
        if layout.recompute == "none":
            return whole
        kept = section.boundary.at(rows) * (1 / layout.tensor if layout.splits_sequence else 1.0)
        if layout.recompute == "selective":
            kept += sum(each.made.at(rows) for each in _kept_selectively(section))
        return kept * layout.recomputed + whole * (1 - layout.recomputed)

    def _saved(self, section: Section) -> float:
        """Bytes that a section keeps; what is whole along "tensor" is split there, too, if sequences are."""
        layout, rows = self.layout, self.layout.rows
        whole = section.saved_whole.at(rows) if layout.splits_sequence else 0.0
        return section.saved.at(rows) - whole * (1 - 1 / layout.tensor)


def _kept_selectively(section: Section) -> list[Kernel]:
    """Attention and every second product of forward, as torchtitan's selective recomputation keeps them."""
    kernels = section.kernels[Phase.FORWARD]
    products = [each for each in kernels if each.kind is OpClass.MATMUL]
    return [each for each in kernels if each.kind is OpClass.ATTENTION] + products[::2]


@dataclass(frozen=True)
class _Unit:
    """Seconds of a section that is gathered and reduced as one; ``exposed``: of those, what these add."""

    seconds: float
    exposed: float
