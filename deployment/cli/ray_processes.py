"""Whether the Ray that ``up`` started is still all there."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

_PARTS: Final = {
    "gcs_server": "Ray's control service (gcs_server)",
    "raylet": "Ray's node manager (raylet)",
}


class RayProcesses:
    """The children of this process without which Ray starts no actor any more, to be made when it has started.

    Replicas and ingresses that are there go on for a while, but what fails from then on is not mended, and Ray ends
    this process itself a minute after it has missed its control service.
    """

    def __init__(self) -> None:
        import psutil

        self._parts = {child: _PARTS[name] for child in psutil.Process().children() if (name := child.name()) in _PARTS}

    def lost(self) -> str | None:
        """A line that names the first one that has ended; ``None`` = none has. Some microseconds."""
        import psutil

        for process, name in self._parts.items():
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            return f"{name} has ended: what fails now would not be mended"
        return None
