"""``NextCapture``: what earlier calls of a step decide for its next capture, equal on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .call.argument_logs import LogsFound
from .call.call import Call
from .call.found import with_found
from .call.initial_state import Idle
from .call.state import ArgumentReader
from .capture import Captured
from .capture.sizes.size_symbols import TracedSizes
from .python_state.effects.carried import Carried
from .ranks.consensus import AllGatherText
from .running.expert_room import ExpertRoom
from .running.kept_programs import KeptPrograms
from .running.live_numbers import LiveNumbers
from .shared_captures import NONE, ServingCapture, SharedCaptures


class NextCapture:
    """The numbers and sizes that a capture leaves open, the state that it leaves out, and the captures that serve anew.

    ``is_apart``: whether each rank captures for itself. ``idle``: parameters that the step was found not to update.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        dynamic: Mapping[str, Mapping[int, str]],
        reader: ArgumentReader,
        programs: KeptPrograms,
        room: ExpertRoom,
    ) -> None:
        self.name, self._function, self._reader, self._programs, self._room = name, function, reader, programs, room
        self.numbers, self.shared, self.idle = LiveNumbers(name), SharedCaptures(name, dynamic), Idle()
        self.is_apart = False

    def earlier(self, call: Call) -> list[Captured]:
        """The captures of the models of a call so far."""
        return self._programs.captures(call)

    def carried(self, call: Call) -> Carried:
        """The Python state that the programs so far write, of the models of a call: what may be inputs of the next."""
        return self.numbers.carried(compiled.captured for compiled in self._programs.of_models(call))

    def find(self, call: Call, all_gather_text: AllGatherText) -> tuple[ServingCapture, Carried]:
        """The capture that serves a call, if there is one, and the numbers that a new one takes as inputs.

        These are the Python numbers that have changed since the step was compiled, on any rank: the next program reads
        them at each call.
        """
        if not self._programs.compiled:
            return ServingCapture(), self.numbers.of_first(call)
        sites, changed = self.numbers.changes(call, self._programs.of_models(call))
        own = self.shared.number_for(call)
        gathered = [json.loads(text) for text in all_gather_text(json.dumps([own, changed]))]
        live = self.numbers.of_next(call, sites, [name for _, names in gathered for name in names])
        found = None if own == NONE else self.shared.of_number(own)
        return ServingCapture(found, all(number == own for number, _ in gathered)), live

    def why_not_cached(self, call: Call) -> str:
        """Why no entry of the cache can serve a call: what an earlier call of this process had decides, too."""
        last = self._programs.last
        reasons = {
            "its experts had more rows than it had room for": self._room.outgrown,
            "its schedule follows what was measured": last is not None and bool(last.left),
            "it has logs among its arguments": self._reader.logs,
            "the programs so far write to Python state": self.carried(call).now(),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def open_sizes(self, call: Call) -> TracedSizes:
        """The sizes of arguments that the next capture leaves open."""
        return self.shared.open_sizes(call, [each.captured for each in self._programs.of_models(call)])

    def note_logs(self, call: Call, found: LogsFound) -> None:
        """Read the arguments of a call anew, where containers among them are logs, or are none after all."""
        reader = self._reader
        if found.are_logs:
            reader.logs |= found.paths
        else:
            reader.logs -= found.paths
            reader.no_logs |= found.paths
        call.no_logs = reader.no_logs
        tensors = {leaf.name: leaf for leaf in call.given.tensors()}  # rows may have been exchanged
        given = reader.read(*call.given.given)
        given = replace(given, leaves=[tensors.get(leaf.name, leaf) for leaf in given.leaves])
        call.read_again(with_found(self._function, given))
