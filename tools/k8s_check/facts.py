"""What the rest of the project says, and the manifests must agree with."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deployment.haproxy import BINARY_VARIABLE, CALL_LIMITS, RESTART, RETRY_ON, UNWELL

SERVE_ENVIRONMENT: Final = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    **CALL_LIMITS,
    **RETRY_ON,
    **RESTART,
    **UNWELL,
}
"""What ``orca-serve up`` sets for its Ray, and the nodes of a cluster have to set themselves: docs/operations.md."""

SHARED_PREFIXES: Final = ("RAY_SERVE_", "ORCA_", "HF_")
"""Variables that must be the same on head and workers: the application is built on one and runs on the other."""

NEEDED: Final = (*SERVE_ENVIRONMENT, BINARY_VARIABLE, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S")


@dataclass(frozen=True, slots=True)
class Facts:
    """``version``: of orca-serve. ``ray_version``: the one it was tested with."""

    version: str
    ray_version: str

    @property
    def tag(self) -> str:
        """Of the image."""
        return f"{self.version}-ray{self.ray_version}"


def read_facts(root: Path) -> Facts:
    """From ``pyproject.toml`` and ``constraints.txt``. Raises ``ValueError`` where Ray is not pinned."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    pin = re.search(r"^ray==(\S+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    if pin is None:
        raise ValueError("constraints.txt pins no ray")
    return Facts(str(version), pin.group(1))
