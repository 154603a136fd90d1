"""The OpenAI HTTP face over a fake service, and the least that can be asked of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployment.config_sections import LimitsSection
from deployment.http_api import build_app
from tests.deployment.fake_service import MODEL, WORDS, FakeService

TEXT = "".join(WORDS)
COMPLETION = {"model": MODEL.model_id, "prompt": "Hi"}
CHAT = {"model": MODEL.model_id, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def service() -> FakeService:
    return FakeService()


def client_of(service: FakeService, **limits: Any) -> httpx.AsyncClient:
    app = build_app(service, LimitsSection(**limits), wall_clock=lambda: 1700000000.5)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://orca")


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; ``[DONE]`` stays text."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
