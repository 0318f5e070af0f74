"""``verify``: the plain step on the whole batch, and the compiled one on simulated ranks, step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from passes import OutputKind, Program
from passes.ir.collectives import is_collective
from passes.runtime.answers import first_other
from passes.runtime.rooms import most_rows

from .._torch import tree_flatten_with_path, tree_map
from ..answers.answer import Answers
from ..call.argument_logs import Log, LogPath
from ..call.found import with_found
from ..call.rng import random_state_kept
from ..call.state import Arguments, hyper_parameters_of, slots_of
from ..capture.values.flex_attention import flex_attention_as_ops
from ..capture.values.own_collectives import OnOneDevice, OwnCollectives
from ..deferral.pending import calling, finish_pending
from ..python_state.reads.one_device import behind_step, one_device
from ..ranks.differences import Difference, difference, rounding_of
from .compare_bits import compare_bits
from .compared_stages import kept, stages_of
from .copies import Copy, Subject, has_single_precision
from .lockstep import LockstepError
from .peer import Peer
from .rank import SimulatedRank
from .runs import run_programs
from .tracer import Guilty, Tracer
from .values import Values, by_name
from .verdict import Verdict
from .wholes import UnequalReplicasError, put_together
from .world import AnyMesh, check_mesh, simulated_world

MOST = 16  # ranks
_FACTOR = 0.75  # of learning rates and other floats, from step to step


def verify(
    step: Any, *args: Any, steps: int = 3, world: int = 4, mesh: AnyMesh = None, bits: bool = False, **kwargs: Any
) -> Verdict:
    """Compare a compiled step with the plain one, in this process: no cluster, no GPU, no other process is needed.

    ``step`` is what ``spmd.compile`` made, and the other arguments are those of one call with the whole batch. The
    plain step runs on copies of them, ``steps`` times; the compiled one on ``world`` simulated ranks, each with its
    part of the batch. After every step all is compared: what the step returns, parameters, buffers, gradients,
    optimizer state. Learning rates, other floats of parameter groups, and counters change from step to step. Nothing of
    yours changes, but what the step itself writes to globals and closure variables.

    ``mesh``: a dict from the names of axes to their sizes, ``{"dp": 2, "tp": 2}``; by default one axis, ``dp``.

    A model of float32 is verified in float64, where that is possible: then what differs is wrong, and no rounding.

    ``bits``: for ``DataParallel(bits="same")``, compare the program of one rank with those of ``world`` ranks instead,
    in the step's own dtypes, to the last bit.

    Raises ``TypeError`` or ``ValueError`` for what cannot be verified, and what compiling the step raises.
    """
    check_mesh(mesh, world)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"expected steps to be 1 or more, got {steps!r}")
    if world > MOST:
        raise ValueError(f"expected world to be {MOST} ranks or fewer, got {world}: fewer ranks run the same passes")
    finish_pending()
    if bits:
        subject = Subject.of(step, args, kwargs)
        wholes = kept(PlainStep(subject, subject.copied(in_double=False), in_double=False).state())
        with calling:
            return compare_bits(subject, wholes, steps, world, mesh)
    with calling, random_state_kept(), simulated_ranks(step, args, kwargs, world, mesh) as (plain, first, peer):
        peers = [peer(number) for number in range(1, world)]
        return Verification(plain.subject, plain, first, peers, steps).run()


@contextmanager
def simulated_ranks(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], world: int, mesh: AnyMesh
) -> Iterator[tuple[PlainStep, SimulatedRank, Callable[[int], Peer]]]:
    """The plain step, the first of ``world`` ranks, and what makes the others by number."""
    subject = Subject.of(step, args, kwargs)
    plain = PlainStep.of(subject)
    with simulated_world(world, mesh, subject.device_type) as device_mesh, plain.dtypes():
        wholes = kept(plain.state())
        first = SimulatedRank(subject, subject.copied(plain.in_double), 0, device_mesh)
        yield plain, first, lambda number: Peer(first, number, wholes)


@dataclass
class PlainStep:
    """The step as it is written, on copies of the whole batch."""

    subject: Subject
    copied: Copy
    in_double: bool
    logs: Collection[LogPath] = ()  # what the compiled step takes for logs among its arguments

    @classmethod
    def of(cls, subject: Subject) -> PlainStep:
        """In float64 where the step can run so."""
        if has_single_precision(subject):
            trial = cls(subject, subject.copied(in_double=True), in_double=True)
            try:
                with random_state_kept(), trial.dtypes():
                    trial.run()
                return cls(subject, subject.copied(in_double=True), in_double=True)
            except (RuntimeError, TypeError, ValueError):  # it names a dtype itself
                pass
        return cls(subject, subject.copied(in_double=False), in_double=False)

    @contextmanager
    def dtypes(self) -> Iterator[None]:
        """Let what the step makes have the dtype that it computes in."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self.in_double else before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def run(self) -> Any:
        """One step; returns its result."""
        # Hooks of a backward run in this thread, which is answered; FlexAttention has no backward on the CPU.
        collectives = OwnCollectives()
        with (
            torch.autograd.set_multithreading_enabled(False),
            one_device(),
            collectives.with_autograd(),
            OnOneDevice(collectives),
            flex_attention_as_ops(),
        ):
            return tree_map(behind_step, self.subject.function(*self.copied.args, **self.copied.kwargs))

    def given(self) -> Arguments:
        """Its arguments, with what else it reaches."""
        return with_found(self.subject.function, self.subject.read(self.copied.args, self.copied.kwargs, self.logs))

    def state(self) -> dict[str, Any]:
        """Its state by name, as ``SimulatedRank.state``."""
        given = self.given()
        found: dict[str, Any] = {slot.input.name: slot.get().detach() for slot in slots_of(given)}
        found |= {hyper.name: hyper.get() for hyper in hyper_parameters_of(given.optimizers)}
        return found | {leaf.name: leaf.value for leaf in given.tensors()}


@dataclass
class Verification:
    """The comparison of one step, call by call."""

    subject: Subject
    plain: PlainStep
    first: SimulatedRank
    peers: list[Peer]
    steps: int
    compared: int = 0
    beside: str = "the plain step"
    notes: list[str] = field(default_factory=list)
    traced: list[Program] = field(default_factory=list)  # whose stages were compared
    _before: Values = field(default_factory=dict)  # the state of the plain step, before its last call
    _enlarged: set[str] = field(default_factory=set)  # state that ops compute from nothing but rounding
    _rounding: tuple[Program, float] | None = None  # of the program last run

    @property
    def ranks(self) -> list[SimulatedRank | Peer]:
        """All ranks in order."""
        return [self.first, *self.peers]

    def run(self) -> Verdict:
        """The verdict after all steps, or after the first that is wrong."""
        for number in range(self.steps):
            if number:
                self._vary_numbers()
            found = self._step(number)
            if found is not None:
                return found
        return self._verdict()

    def _vary_numbers(self) -> None:
        """Let learning rates, other floats of groups, and counters be others in the next step: a stale one shows."""
        ours = with_found(self.subject.function, self.first.given())
        for given in (self.plain.given(), ours):
            for hyper in hyper_parameters_of(given.optimizers):
                value = hyper.get()
                if isinstance(value, (int, float)):
                    hyper.put(value * _FACTOR if isinstance(value, float) else value + 1)

    def _step(self, number: int) -> Verdict | None:
        inputs = self._inputs_that_fit()
        before = [kept(by_name(rank.program, given)) for rank, given in zip(self.ranks, inputs, strict=True)]
        try:
            outputs = run_programs([rank.program for rank in self.ranks], inputs)
            returned = [rank.finish(each) for rank, each in zip(self.ranks, outputs, strict=True)]
        except LockstepError as error:
            return self._blame(before, number, str(error.node), Difference("", "", str(error)))
        found = None
        if self._is_comparable():
            self._before = kept(self.plain.state())
            found = self._compare_results(self.plain.run(), returned) or self._compare_state()
        program = self.first.program
        is_new = all(program is not other for other in self.traced)
        self.traced.append(program)
        if found is None and not is_new and self._is_comparable():
            return None
        return self._blame(before, number, *(found or ("", None)))

    def _inputs_that_fit(self) -> list[list[Any]]:
        """The inputs of the next call, prepared for programs with its answers and room for its rows, as a step does."""
        inputs, answers = self._prepared(), Answers()
        while self.first.program.room is not None or self.first.compiled.captured.answers:
            most_rows(), first_other()
            copies = [[x.clone() if isinstance(x, Tensor) else x for x in given] for given in inputs]
            run_programs([rank.program for rank in self.ranks], copies)
            times, other = most_rows() or 0, first_other()
            if times > 1:
                self.first.outgrow(times)
            elif other is not None and other >= 0:
                answers = self.first.answer(other)
            else:
                break
            inputs = self._prepared(answers)
        return inputs

    def _prepared(self, answers: Answers = ()) -> list[list[Any]]:
        """The inputs of the next call, which gives these answers, for a program that the first rank chooses."""
        return [self.first.prepare(answers), *(rank.prepare() for rank in self.ranks[1:])]

    def _is_comparable(self) -> bool:
        """Whether the plain step computes the same: it draws other numbers, and knows no policies of modules."""
        rank = self.first
        assert rank.turn is not None and rank.turn.call is not None
        call = rank.turn.call
        policies = [call.mode.mp_policy, *(unit.mp_policy for unit in call.annotations.units)]
        draws = rank.program.draws
        return not draws and all(policy is None for policy in policies)

    def _blame(
        self, before: list[Values], number: int, what: str = "", wrong: Difference | None = None
    ) -> Verdict | None:
        """The verdict on the first stage that is wrong; on the step as a whole where none is; None if all is right."""
        programs = [rank.programs for rank in self.ranks]
        captured = self.first.compiled.captured.program
        tracer = Tracer(captured, [each.transformed for each in programs], before, self.rounding)
        guilty = tracer.first_guilty(stages_of(programs, self.first.compiled.pipeline, self.first.step.options))
        guilty = guilty or self._wrongly_written(tracer)
        if guilty is None and wrong is None:
            return None
        if guilty is None:
            assert wrong is not None
            if self._is_rounding(tracer, what):
                return None
            guilty = Guilty("capture", what, wrong)
        return self._verdict(after=number, **described(guilty, what))

    def _wrongly_written(self, tracer: Tracer) -> Guilty | None:
        """The state that is not what the programs computed, though every stage computes what it should."""
        held, found = self._state_of_ranks()
        if not self._is_comparable():
            self.compared, self.beside = self.compared + len(tracer.expected), "its captured program"
        if found is None:
            written = {name: _as(value, held[name]) for name, value in tracer.expected.items() if name in held}
            found = self._first_difference(written, held)
        return None if found is None else Guilty("run", *found)

    def _is_rounding(self, tracer: Tracer, what: str) -> bool:
        """Whether what differs had grown from rounding: from the plain step's own state, all comes out as there.

        Numbers must have agreed before, such as rates. What ops make of nothing but rounding, on the way to state,
        comes out otherwise with every order of sums.
        """
        numbers = {name: value for name, value in self._before.items() if not isinstance(value, Tensor)}
        if any(difference(value, tracer.inputs[0].get(name, value), self.rounding) for name, value in numbers.items()):
            return False
        after = self.plain.state()
        self._enlarged |= tracer.enlarged
        reached = {name: value for name, value in tracer.expected_from(self._before).items() if name in after}
        unequal = {k for k, v in reached.items() if difference(after[k], v, self.rounding)}
        if what not in reached or unequal - self._enlarged:
            return False
        note = f"{what} differs by rounding that the step itself enlarges; every stage computes what it should"
        self.notes += [note] if note not in self.notes else []
        return True

    @property
    def rounding(self) -> float:
        """The relative error that is allowed for; found once for a program, since that looks at all of its nodes."""
        program = self.first.compiled.partitioned
        if self._rounding is None or self._rounding[0] is not program:
            self._rounding = program, rounding_of(_dtypes(program))
        return self._rounding[1]

    def _compare_results(self, expected: Any, returned: list[list[Any]]) -> tuple[str, Difference] | None:
        compiled = self.first.compiled
        outputs = [output for output in compiled.program.outputs if output.kind is not OutputKind.UPDATE]
        meshes = [rank.program.mesh for rank in self.ranks]
        wholes = []
        for output, parts in zip(outputs, zip(*returned, strict=True), strict=True):
            try:
                wholes.append(put_together(parts, output.shape, output.placement, meshes, self.rounding))
            except UnequalReplicasError as error:
                return output.name, error.difference
        actual = _leaves(compiled.captured.result(wholes))
        wanted = _leaves(expected)
        self.compared += len(wanted)
        if list(actual) != list(wanted):
            return "result", Difference(list(wanted), list(actual), "the result has another structure")
        return self._first_difference(wanted, actual)

    def _compare_state(self) -> tuple[str, Difference] | None:
        logs = self.first.given().logs()
        self.plain.logs = {log.path for log in logs.values()}
        expected = self.plain.state()
        actual, found = self._state_of_ranks()
        if found is not None:
            return found
        names = list(expected) if set(expected) == set(actual) else []
        if not names and expected:
            missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
            says = f"state is missing: {missing}" if missing else f"state should not be there: {extra}"
            return (missing or extra)[0], Difference(missing, extra, says)
        self.compared += len(expected)
        return self._first_difference(expected, {name: actual[name] for name in names}) or self._compare_logs(logs)

    def _compare_logs(self, logs: Mapping[str, Log]) -> tuple[str, Difference] | None:
        """Compare what the first rank has logged; of a tensor of which ranks have parts, that there is one."""
        for name, log in self.plain.given().logs().items():
            wanted, actual = _leaves(log.container, name), _leaves(logs[name].container, name)
            if list(wanted) != list(actual):
                return name, Difference(list(wanted), list(actual), "other entries were logged")
            whole = {key for key, value in wanted.items() if _shape(value) == _shape(actual[key])}
            self.compared += len(whole)
            found = self._first_difference({key: wanted[key] for key in wanted if key in whole}, actual)
            if found is not None:
                return found
        return None

    def _state_of_ranks(self) -> tuple[Values, tuple[str, Difference] | None]:
        """State by name, put together from all ranks; and the first that ranks should hold equally, and do not."""
        firsts = self.first.state()
        held = [firsts, *(peer.state(firsts) for peer in self.peers)]
        meshes = [rank.mesh for rank in self.ranks]
        wholes: Values = {}
        for name, (_, shape, placement) in firsts.items():
            try:
                parts = [each[name][0] for each in held]
                wholes[name] = put_together(parts, shape, placement, meshes, rounding=0.0)
            except UnequalReplicasError as error:
                return wholes, (name, error.difference)
        return wholes, None

    def _first_difference(self, expected: dict[str, Any], actual: dict[str, Any]) -> tuple[str, Difference] | None:
        for name, value in expected.items():
            found = difference(value, actual[name], self.rounding)
            if found is not None:
                return name, found
        return None

    def _verdict(self, **found: Any) -> Verdict:
        name = getattr(self.subject.function, "__name__", "step")
        world = str(self.first.mesh)
        return Verdict(name, world, self.steps, self.compared, beside=self.beside, notes=tuple(self.notes), **found)


def described(guilty: Guilty, what: str = "") -> dict[str, Any]:
    """A guilty stage in the fields of a verdict."""
    node, wrong = guilty.node, guilty.difference
    meta = node.meta if node is not None else {}
    return {
        "what": what or guilty.what,
        "says": wrong.says,
        "stage": guilty.stage,
        "node": str(node or ""),
        "line": str(meta.get("source", "")),
        "placement": " ".join(map(str, meta.get("placement", ()))),
        "expected": wrong.expected,
        "actual": wrong.actual,
    }


def _dtypes(program: Program) -> list[torch.dtype]:
    """The dtypes that values of forward and backward pass through; of single numbers, those that are sent.

    And those in which parameters were sent that all ranks hold so.
    """
    nodes = [node for node in program.graph.nodes if str(node.meta.get("phase", "")) != "update"]
    vals = [(node.meta.get("val"), is_collective(node)) for node in nodes]
    held = [declared.wire for declared in program.inputs if declared.wire is not None]
    return held + [val.dtype for val, is_sent in vals if isinstance(val, Tensor) and (val.ndim or is_sent)]


def _as(value: Any, like: Any) -> Any:
    """``value`` as it is once written into ``like``."""
    return value.to(like.dtype) if isinstance(value, Tensor) and isinstance(like, Tensor) else value


def _leaves(tree: Any, name: str = "result") -> dict[str, Any]:
    return {f"{name}{''.join(map(str, path))}": value for path, value in tree_flatten_with_path(tree)[0]}


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None
