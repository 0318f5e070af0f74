"""``check="nan"``: after each call, the first module or parameter in which a value is NaN or Inf."""

from __future__ import annotations

from passes import SpmdError

from .watch import Spec, Watch, Watches

_PHASES = {"forward": "*.output", "gradient": "*.grad", "update": "*"}
_STATISTICS = {"forward": "overflow"}  # modules may return a mask of -Inf; of the other phases "nan"


class NotFinite:
    """Looks at the outputs of modules, gradients and parameters of each call, in the order in which a step has them.

    ``name``: of the step. ``is_deferred``: the update is that of the next call, whose outputs show what it wrote.
    """

    def __init__(self, name: str, watches: Watches, is_deferred: bool) -> None:
        self._name = name
        phases = ["forward"] if is_deferred else [*_PHASES]
        specs = {
            phase: Spec(_PHASES[phase], (_STATISTICS.get(phase, "nan"),), as_one=False, if_any=True) for phase in phases
        }
        self._watches = {phase: watches.add(Watch(spec, every=1)) for phase, spec in specs.items()}

    def check(self, call: int, record: str) -> None:
        """Raise ``SpmdError`` if the call of this number has such a value: on all ranks, since counts are of all.

        ``record``: the folder in which calls are recorded, if they are.
        """
        for phase, watch in self._watches.items():
            values = watch.values if watch.call == call else {}
            found = [name for name, counts in values.items() if any(counts.values())]
            if not found:
                continue
            # Modules return in the order of forward; backward comes to parameters in about the opposite one.
            first = found[-1] if phase == "gradient" else found[0]
            (count,) = values[first].values()
            more = f", and {len(found) - 1} more of {len(values)}" if len(found) > 1 else ""
            replay = f"run `python -m spmd replay {record} --call {call}`" if record else "record(folder) the step"
            raise SpmdError(
                f"call {call} of {self._name} has NaN or Inf first in {phase}: {int(count)} elements of "
                f"{first}{more}. The call has ended and its state is what the plain step leaves: load a checkpoint to "
                f"go on; {replay} to find the op and its line"
            )
