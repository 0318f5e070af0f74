"""Ctrl-C that ends a rank with one line, whatever it is busy with."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time


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
