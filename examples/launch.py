"""torchrun that ends quietly: Ctrl-C and a rank that fails leave no traceback of the launcher.

Takes torchrun's arguments:

    python examples/launch.py --standalone --nproc-per-node 2 examples/train_gpt.py --steps 100

``torchrun`` itself runs the examples just as well; it prints more when they end early.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

NOTE = "SPMD_EXAMPLE_ENDED"  # the environment variable that names the file of ``note_end_as_asked``


def end_on_ctrl_c() -> None:
    """From here on Ctrl-C prints one line and ends this rank, whatever it is busy with.

    A ``KeyboardInterrupt`` would wait for a collective to return, and reach the other ranks as an error of the network.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=wait_for_ctrl_c, daemon=True).start()


def wait_for_ctrl_c() -> None:
    """Wait for the signal, print a line on rank 0, and leave the other ranks a moment to receive it before exiting."""
    signal.sigwait({signal.SIGINT})
    show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
    output = os.dup(1)
    for stream in (1, 2):  # no more output from the rest of the program
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if os.environ.get("RANK", "0") == "0":
        os.write(output, f"{show_cursor}\nStopped by Ctrl-C.\n".encode())
    time.sleep(0.2)
    os._exit(130)


def note_end_as_asked() -> None:
    """Let the launcher know that the ranks have saved after SIGTERM, and that all is well."""
    if NOTE in os.environ and os.environ.get("RANK", "0") == "0":
        Path(os.environ[NOTE]).touch()


def main() -> int:
    """Run torchrun; return 130 after Ctrl-C, and after a failure the exit code of the rank that failed.

    After SIGTERM, which torchrun passes on to the ranks, return 0 if they noted that they ended as asked.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ[NOTE] = str(Path(folder, "ended"))
        return run_torchrun()


def run_torchrun() -> int:
    """Run it in this process; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # quiet while torch is imported; torchrun sets its own handler
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()  # in the launcher alone; the ranks log for themselves
    try:
        run.run(run.parse_args(sys.argv[1:]))
    except SignalException as stopped:
        if stopped.sigval == signal.SIGTERM and Path(os.environ[NOTE]).exists():
            return 0
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:  # a rank that was killed could not report it
            print(f"rank {rank} was killed by signal {-failure.exitcode}", file=sys.stderr)
        return abs(failure.exitcode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
