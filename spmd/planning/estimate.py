"""The estimated step of a layout: seconds by cause, and memory by role, from sections of kernels.

Blocks follow each other, so the time of one is that of all of its kind: compute of the device, or launches where these
take longer, with collectives along "tensor" in between, and gathers and reductions of a unit beside it. Stages of a
pipeline wait for each other as in 1F1B (Narayanan et al. 2021), or as their schedule says where a layout has a cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

from passes import Kind, Phase
from passes.schedule.op_work import OpClass

from .blocks import Choice, cut
from .kernels import Kernel, Message, Section
from .layout import Layout
from .machine import Machine
from .pipeline import Run, Stage, in_flight, simulate


@dataclass(frozen=True)
class Traffic:
    """Traffic of a block beside what was captured: bytes for each row."""

    tokens: float = 0.0  # to experts, and as many back
    copies: int = 1  # of each token among them
    keys: float = 0.0  # keys and values that ranks along "context" gather


@dataclass(frozen=True)
class State:
    """Bytes for each number of a model: of itself, of its gradient, and of what only updates read.

    They are means: where a part of a model is frozen, gradients have less. ``gathered``: as it is sent, if narrower.
    ``master``: of its exact copy, where ranks that update parts of a model hold what was sent.
    """

    weight: float = 2
    gradient: float = 4
    optimizer: float = 12
    gathered: float | None = None
    master: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes of a number that is gathered."""
        return self.weight if self.gathered is None else self.gathered

    @property
    def trained(self) -> float:
        """Bytes of a number, of those that have a gradient, which is as wide or wider."""
        return min(self.weight, self.gradient)

    @property
    def updated(self) -> float:
        """Bytes that an update moves for each number."""
        return 2 * self.trained + self.gradient + 2 * self.optimizer


@dataclass(frozen=True)
class Work:
    """Sections of a model, each op by itself, and with pointwise ops fused, if software does that; bytes of its state.

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


def choices(work: Work, layout: Layout, machine: Machine) -> list[tuple[int, list[Choice]]]:
    """For each kind of blocks how many there are, and one whose values are kept, or all computed again."""
    return _Step(work, replace(layout, recompute="full"), machine).choices()


def uncounted(work: Work, layout: Layout, machine: Machine) -> dict[str, float]:
    """Seconds of a step, by op, in those whose work is not known: they count by the bytes that they read and write."""
    found: dict[str, float] = {}
    for section in work.plain:
        times = layout.micro_batches * (section.count / layout.stages if section.count > 1 else 1.0)
        for each in (each for kernels in section.kernels.values() for each in kernels if each.unknown):
            found[each.unknown] = found.get(each.unknown, 0.0) + times * machine.kernel(each, layout.rows)
    return found


def cut_of(work: Work, layout: Layout, machine: Machine, memory: float, least: float) -> tuple[int, ...] | None:
    """The blocks of each stage of a pipeline over equal blocks, so that the slowest one takes the least time.

    With chunks, all have equally many. Where none fits into memory, it is the cut of unlimited memory; None if no
    schedule can run it in less than ``least`` seconds.
    """
    stages = layout.stages * layout.chunks
    blocks = next(each.count for each in work.plain if each.count > 1)
    step = _Step(work, replace(layout, cut=(blocks // stages,) * stages), machine)
    return step.cut(blocks, memory, least)


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
        self.units: dict[str, _Unit] = {}
        self.runs: dict[float, Run] = {}

    def estimate(self) -> Estimate:
        micro_batches = self.layout.micro_batches
        total, idle, messages = self._cut_stages() if self.layout.cut else self._equal_stages()
        busiest = max(self.ranks, key=lambda each: each.sum(self._seconds))
        tensor = micro_batches * busiest.sum(lambda each: self._unit(each).tensor)
        gathers = micro_batches * busiest.sum(lambda each: self._unit(each).gathers)
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

    @cached_property
    def parts(self) -> list[_Part]:
        """The part of the model that each rank of a pipeline has; without a cut, one that stands for all."""
        if not self.layout.cut:
            blocks = [(each, each.count / self.layout.stages) for each in self.blocks]
            return [_Part([*blocks, *((each, 1.0) for each in self.ends)])]
        made = [_Part([(self.blocks[0], float(n))]) for n in self.layout.cut]
        at = self.work.plain.index(self.blocks[0])
        made[0].sections[:0] = [(each, 1.0) for each in self.work.plain[:at]]
        made[-1].sections += [(each, 1.0) for each in self.work.plain[at + 1 :]]
        return made

    @cached_property
    def ranks(self) -> list[_Part]:
        """The parts of each rank together, where it has several."""
        stages = self.layout.stages if self.layout.cut else 1
        return [_Part([each for part in self.parts[k::stages] for each in part.sections]) for k in range(stages)]

    def _unit(self, section: Section) -> _Unit:
        if section.name not in self.units:
            part = self._recomputed(section)
            kept, again = (self._one_unit(section, each) if part != 1 - each else _Unit() for each in (False, True))
            self.units[section.name] = kept.times(1 - part) + again.times(part)
        return self.units[section.name]

    def _recomputed(self, section: Section) -> float:
        """The part of equal blocks that backward computes again."""
        if section.count == 1 or self.layout.recompute == "none":
            return 0.0
        return self.layout.recomputed[self.blocks.index(section)] if self.layout.recomputed else 1.0

    def _one_unit(self, section: Section, recomputes: bool) -> _Unit:
        """Forward and backward of a section, with its gathers and its reduction beside them."""
        layout, slower = self.layout, self.machine.constants.contention
        forward, backward = (self._time(section, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
        if recomputes:
            backward += forward if layout.recompute == "full" else self._again(section, forward)
        backward += _Time(device=self._accumulation(section), knee=backward.knee)
        tensor = forward.exposed + backward.exposed
        if layout.style != "fully_shard" or layout.shards == 1:
            return _Unit(forward.seconds, backward.seconds, tensor)
        experts = section.expert_parameters
        gather = self._over_shards(Kind.ALL_GATHER, section.parameters - experts, experts)
        reduce = self._over_shards(Kind.REDUCE_SCATTER, section.parameters - experts, experts)
        reduce /= layout.micro_batches if layout.reduces_once else 1
        beside = (forward, gather), (backward, reduce + (0.0 if layout.keeps_gathered else gather))
        took = [max(part.seconds + slower * min(part.seconds, sent), sent) for part, sent in beside]
        return _Unit(took[0], took[1], tensor, sum(t - part.seconds for t, (part, _) in zip(took, beside, strict=True)))

    def _accumulation(self, section: Section) -> float:
        """Seconds in which gradients are added to those of the micro-batches before, or written in a wider dtype."""
        layout, state = self.layout, self.work.state
        if not self.software.adds or (layout.micro_batches == 1 and state.gradient <= state.weight):
            return 0.0
        ranks = layout.shards if layout.style == "fully_shard" and not layout.reduces_once else 1
        return section.parameters / ranks * (state.trained + 2 * state.gradient) / self.machine.bandwidth

    def choices(self) -> list[tuple[int, list[Choice]]]:
        """For each kind of blocks how many there are, and a step of one whose values are kept, or computed again."""
        count = self.layout.micro_batches
        return [
            (
                each.count,
                [
                    Choice(count * (unit.forward + unit.backward), self._kept(each, part))
                    for part, unit in ((part, self._one_unit(each, bool(part))) for part in (0.0, 1.0))
                ],
            )
            for each in self.blocks
        ]

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

    def _again(self, section: Section, forward: _Time) -> _Time:
        """Forward without what selective recomputation keeps."""
        kept = _kept_selectively(section)
        seconds = sum(map(self._kernel, kept))
        return _Time(forward.device - seconds, forward.host - len(kept) * self.software.launch, knee=forward.knee)

    @cached_property
    def _about(self) -> tuple[Any, ...]:
        """Entries of a layout that the seconds of a section depend on."""
        layout = self.layout
        return layout.rows, layout.tensor, layout.context, layout.experts, layout.splits_sequence, layout.bits

    def _time(self, section: Section, phase: Phase) -> _Time:
        """Kernels and messages of one phase, between fused and unfused as the software is."""
        key = (id(section), phase, *self._about)
        if key not in self.machine.known:  # with the section, so that no other one gets its id
            unfused = self.software.unfused
            whole = self.fused.get(section.name)  # None where all of it is fused into blocks, or nothing is
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

    def _equal_stages(self) -> tuple[float, float, float]:
        """Seconds of all micro-batches, and of those the ones that a stage idles, and that messages take.

        The first and the last stage have the ends of the model; where stages have several chunks, ends are spread.
        """
        layout, count = self.layout, self.layout.micro_batches
        blocks = sum(self._seconds(each) * n for each, n in self.parts[0].sections if each.count > 1)
        ends = [self._seconds(each) for each in self.ends]
        if layout.stages == 1:
            return count * (blocks + sum(ends)), 0.0, 0.0
        first, last = (ends[0], sum(ends[1:])) if len(ends) > 1 else (0.0, sum(ends))
        message = 2 * self._message_to_next() * layout.chunks
        if layout.chunks > 1:
            message *= 1 - self.software.hides
            slowest = blocks + (first + last) / layout.stages
            idle = (layout.stages - 1) * (slowest + message) / layout.chunks
        else:
            slowest = blocks + (sum(ends) / layout.stages if self.software.balances else max(first, last))
            idle = layout.stages * (blocks + message) + first + last - (slowest + message)
        return count * (slowest + message) + idle, idle, count * message

    def cut(self, blocks: int, memory: float, least: float) -> tuple[int, ...] | None:
        """See ``cut_of``; the layout's own cut stands for those to choose from."""
        layout, seconds = self.layout, self._seconds(self.blocks[0])
        beside = [part.sum(lambda each: self._seconds(each) if each.count == 1 else 0.0) for part in self.parts]
        found: tuple[int, ...] | None = layout.cut
        if layout.chunks == 1:
            most = [self._most_blocks(k, blocks, memory) for k in range(layout.stages)]
            found = cut(blocks, seconds, beside, most) or cut(blocks, seconds, beside, [blocks] * layout.stages)
        assert found is not None, "a model has as many blocks as stages"
        took = [n * seconds + end for n, end in zip(found, beside, strict=True)]
        waits = [t - part.sum(self._weights) for t, part in zip(took, self.parts, strict=True)]
        waits = waits if layout.schedule == "zb-h1" else took
        # A rank begins behind forward of all stages before its first, and these go backward behind its last.
        fastest = [layout.micro_batches * sum(took[k :: layout.stages]) + sum(waits[:k]) for k in range(layout.stages)]
        return found if max(fastest) < least else None

    def _most_blocks(self, stage: int, blocks: int, memory: float) -> int:
        """The number of blocks that a stage has memory for."""
        flights = in_flight(self.layout.schedule, self.layout.stages, self.layout.micro_batches)[stage]

        def held(count: int) -> float:
            ends = [each for each in self.parts[stage].sections if each[0].count == 1]
            rank = _Part([*ends, (self.blocks[0], count)])
            return sum(
                self._memory_of(rank, self._with_end(rank, count * flights * self._kept(self.blocks[0]))).values()
            )

        one, two = held(1), held(2)
        return max(0, min(blocks, 1 + int((memory - one) // (two - one)))) if two > one else blocks

    def _cut_stages(self) -> tuple[float, float, float]:
        """The same of stages in the order of their schedule."""
        took, silent = self._run(self._message_to_next()).seconds, self._run(0.0).seconds
        busiest = self.layout.micro_batches * max(rank.sum(self._seconds) for rank in self.ranks)
        return took, silent - busiest, took - silent

    def _run(self, message: float) -> Run:
        layout = self.layout
        stages = [
            Stage(
                part.sum(lambda each: self._unit(each).forward),
                part.sum(lambda each: self._unit(each).backward),
                part.sum(self._weights) if layout.schedule == "zb-h1" else 0.0,
                part.sum(lambda each: self._kept(each) if each.count > 1 else 0.0),
            )
            for part in self.parts
        ]
        if message not in self.runs:
            self.runs[message] = simulate(layout.schedule, layout.stages, layout.micro_batches, stages, message)
        return self.runs[message]

    def _seconds(self, section: Section) -> float:
        unit = self._unit(section)
        return unit.forward + unit.backward

    def _weights(self, section: Section) -> float:
        """Seconds of the gradients of weights: half of the products of backward."""
        key = (id(section), "weights", *self._about)
        if key not in self.machine.known:
            kernels = section.kernels[Phase.BACKWARD]
            products = sum(self._kernel(each) for each in kernels if each.kind is OpClass.MATMUL)
            self.machine.known[key] = section, products / 2
        found: float = self.machine.known[key][1]
        return min(found, self._unit(section).backward)

    def _message_to_next(self) -> float:
        """Seconds in which a stage hands a micro-batch on; each rank along "tensor" sends its part."""
        layout, size = self.layout, max((each.boundary.each for each in self.blocks), default=0.0)
        return self.machine.message(size * layout.rows / layout.tensor, layout.gpus // layout.stages, layout.gpus)

    def _numbers(self, rank: _Part) -> float:
        """Numbers of a rank, before the batch's axes split them; without a cut, of the stage that has the most."""
        blocks = sum(each.parameters * n for each, n in rank.sections if each.count > 1)
        ends = [each.parameters for each, _ in rank.sections if each.count == 1]
        has_one = not self.layout.cut and (self.layout.stages > 1 or self.work.is_tied)
        return blocks + (max(ends, default=0.0) if has_one else sum(ends))

    @cached_property
    def largest(self) -> _Part:
        """The rank that has the most numbers."""
        return max(self.ranks, key=self._numbers)

    def _divided(self, ranks: int, rank: _Part) -> float:
        """Numbers of a rank, where ``ranks`` divide those of the stage; fewer of them have the same experts."""
        experts = rank.experts
        return (self._numbers(rank) - experts) / ranks + experts / max(1, ranks // self.layout.experts)

    def _reduction(self, beside: float) -> float:
        """Seconds to reduce gradients of replicated parameters, and to gather what was updated, ``beside`` compute."""
        layout, state = self.layout, self.work.state
        if layout.style == "fully_shard":
            return 0.0
        kind = Kind.ALL_REDUCE if layout.style == "replicate" else Kind.REDUCE_SCATTER
        reduced = gathered = 0.0
        experts = self.largest.experts
        for numbers, apart in ((self._numbers(self.largest) - experts, 1), (experts, layout.experts)):
            ranks, stride = layout.data // apart, layout.tensor * apart
            reduced += self.machine.collective(kind, numbers * state.gradient, ranks, stride, self.software.bucket)
            if layout.style == "shard_optimizer":
                sent = numbers * state.sent
                gathered += self.machine.collective(Kind.ALL_GATHER, sent, ranks, stride, self.software.bucket)
        if self.software.gathers_beside:
            reduced, gathered = reduced + gathered, 0.0
        return max(0.0, reduced - beside) + gathered

    def _update(self) -> float:
        moved = self._divided(self.layout.shards, self.largest) * self.work.state.updated
        return moved / self.machine.bandwidth + self.software.per_step

    def _memory(self) -> dict[str, float]:
        """Bytes by role of the rank that has the most; without a cut, of a first stage, which keeps the most."""
        if not self.layout.cut:
            return self._memory_of(self.ranks[0], self._activations())
        kept = self._run(0.0).kept
        found = [self._memory_of(*each) for each in zip(self.ranks, map(self._with_end, self.ranks, kept), strict=True)]
        return max(found, key=lambda each: sum(each.values()))

    def _memory_of(self, rank: _Part, activations: float) -> dict[str, float]:
        layout, state, software = self.layout, self.work.state, self.software
        is_whole = layout.style != "fully_shard" or layout.shards == 1
        part = 1 if is_whole else layout.shards
        gradients = self._divided(1 if layout.reduces_once else part, rank) * state.gradient
        if not software.in_place and layout.stages == 1:
            gradients *= layout.micro_batches > 1  # sums of those before
            made, activations = self._most_of_backward(rank, part, activations)
            gradients += made
        used = {
            "parameters": self._divided(part, rank) * state.weight,
            "gradients": gradients,
            "optimizer": self._divided(layout.shards, rank) * state.optimizer,
            "gathered": 0.0 if is_whole else self._gathered(rank),
            "activations": activations,
        }
        if layout.style == "shard_optimizer" and layout.shards > 1:
            used["optimizer"] += self._divided(layout.shards, rank) * state.master
            used["gathered"] = 0.0 if software.in_place else self._numbers(rank) * state.sent
        return used | {"allocator": sum(used.values()) * self.machine.constants.reserved}

    def _most_of_backward(self, rank: _Part, part: int, activations: float) -> tuple[float, float]:
        """Bytes of gradients and of activations where backward, which makes those as it frees these, has the most.

        In equal blocks both go evenly; of an end it is not known which come first.
        """
        sections = sorted(rank.sections, key=lambda each: self.work.plain.index(each[0]))
        kept = [(self._kept(each) if each.count > 1 else self._saved(each)) * n for each, n in sections]
        found, made = [(0.0, activations)], 0.0
        for k, (section, n) in reversed([*enumerate(sections)]):
            numbers = self._divided(part, _Part([(section, n)])) * self.work.state.gradient
            made += numbers
            found.append((made, sum(kept[: k + (section.count == 1)])))
        return max(found, key=sum)

    def _with_end(self, rank: _Part, kept: float) -> float:
        """Bytes of activations where a rank keeps so many of blocks."""
        return kept + max((self._most(each) for each, _ in rank.sections if each.count == 1), default=0.0)

    def _gathered(self, rank: _Part) -> float:
        """Bytes of units that are whole at once: one that computes, the next one, and the gradient of one."""
        state, unit = self.work.state, max((each.parameters for each, _ in rank.sections), default=0.0)
        ahead = self._numbers(rank) if self.layout.keeps_gathered else 2 * unit
        return ahead * state.sent + unit * state.gradient

    def _activations(self) -> float:
        """Bytes that forward keeps for backward: all micro-batches of the first stage, or one of the last, and its end.

        What is recomputed needs all of one block while that runs again.
        """
        layout = self.layout
        kept = sum(self._kept(each) * n for each, n in self.parts[0].sections if each.count > 1)
        again = max((self._saved(each) for each in self.blocks), default=0.0) if layout.recompute != "none" else 0.0
        end = max(sum(map(self._saved, self.ends)), *map(self._most, self.ends)) if self.ends else 0.0
        return max(kept * min(layout.micro_batches, layout.stages) + again, kept + max(again, end))

    def _most(self, section: Section) -> float:
        """Bytes of what an end keeps, or of what its largest op of backward reads and writes, such as the loss's."""
        moved = (each.bytes.at(self.layout.rows) for each in section.kernels[Phase.BACKWARD])
        return max([self._saved(section), *moved])

    def _kept(self, section: Section, recomputed: float | None = None) -> float:
        """Bytes that a block keeps; ``recomputed``: the part that is computed again, by default that of the layout."""
        layout, rows, whole = self.layout, self.layout.rows, self._saved(section)
        part = self._recomputed(section) if recomputed is None else recomputed
        if not part:
            return whole
        kept = section.boundary.at(rows) * (1 / layout.tensor if layout.splits_sequence else 1.0)
        if layout.recompute == "selective":
            kept += sum(each.made.at(rows) for each in _kept_selectively(section))
        return kept * part + whole * (1 - part)

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
    """Seconds of a section that is gathered and reduced as one, and of those: collectives in between, and beside."""

    forward: float = 0.0
    backward: float = 0.0
    tensor: float = 0.0
    gathers: float = 0.0

    def __add__(self, other: _Unit) -> _Unit:
        return _Unit(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, by: float) -> _Unit:
        return _Unit(*(each * by for each in astuple(self)))


@dataclass
class _Part:
    """Sections of a stage, or of a rank, and how many it has of each."""

    sections: list[tuple[Section, float]]

    def sum(self, of: Callable[[Section], float]) -> float:
        """The sum of a quantity over all of them."""
        return sum(of(each) * n for each, n in self.sections)

    @property
    def experts(self) -> float:
        """Numbers of experts."""
        return self.sum(lambda each: each.expert_parameters)
