"""Orca in one process: iteration-level scheduling and selective batching for generative language models.

Names are imported on first use, so that a client that needs only types and errors pays for neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from orca_core.channel import Channel
    from orca_core.config import EMBEDDED_MODEL, EngineConfig
    from orca_core.engine import Engine
    from orca_core.errors import InvalidRequestError, OrcaError, RequestTooLargeError
    from orca_core.types import (
        CancelOutcome,
        FinishReason,
        GenerationChunk,
        GenerationRequest,
        GenerationResult,
        Health,
        Load,
        ModelInfo,
        SamplingParams,
    )

__all__ = [
    "EMBEDDED_MODEL",
    "CancelOutcome",
    "Channel",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "GenerationChunk",
    "GenerationRequest",
    "GenerationResult",
    "Health",
    "InvalidRequestError",
    "Load",
    "ModelInfo",
    "OrcaError",
    "RequestTooLargeError",
    "SamplingParams",
]

_MODULE_OF: Final = {
    "Channel": "channel",
    "EMBEDDED_MODEL": "config",
    "Engine": "engine",
    "EngineConfig": "config",
    "InvalidRequestError": "errors",
    "OrcaError": "errors",
    "RequestTooLargeError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'types')}"), name)
