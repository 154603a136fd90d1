"""A service that listens on the address of one interface alone: ``http_options.host``, ``up --host``."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from deployment.client import OrcaClient
from tests.e2e.paced_service import paced_service

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(180)]

HOST = "127.0.0.2"


def test_both_faces_answer_there_and_nobody_elsewhere(tmp_path: Path) -> None:
    args = (
        "engine: {device: cpu, n_slots: 4096, max_model_len: 1024}",
        "replicas: {min: 1, max: 1, num_cpus: 1}",
        "model: {id: here}",
    )
    with paced_service(tmp_path, 5.0, *args, top=f"http_options: {{host: {HOST}}}") as service:
        http, grpc = service.server.http_port, service.server.grpc_port
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"http://{HOST}:{http}/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3
        with OrcaClient(f"{HOST}:{grpc}") as client:
            assert client.model().model_id == "here"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{http}/livez", timeout=10)
