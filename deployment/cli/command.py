"""What a shell calls."""

from __future__ import annotations

import signal


def main() -> int:
    """Run one command: ``deployment.cli.main``. Ctrl-C while its modules are still read ends it without a traceback."""
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # or they are ignored, and stay so
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deployment.cli.main import main as run

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
