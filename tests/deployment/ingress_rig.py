"""What tests of the ingress have in common."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from deployment.config import AppConfig
from deployment.ingress import Ingress
from deployment.serving import GenerationCall, ServedChunk
from orca_core.types import SamplingParams

FEW = SamplingParams(max_new_tokens=3)
CONFIG = AppConfig.parse(
    {"model": {"id": "our-name"}, "limits": {"max_prompt_bytes": 100, "max_stop_strings": 2, "max_waiting_slots": 640}}
)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def a_call(**given: Any) -> GenerationCall:
    return GenerationCall(**{"sampling": FEW, "prompt": "hello", **given})


async def read(ingress: Ingress, call: GenerationCall) -> list[ServedChunk]:
    async with aclosing(ingress.generate(call)) as stream:
        return [served async for served in stream]


async def counters(ingress: Ingress) -> dict[str, int]:
    return (await ingress.status()).counters
