"""The examples of docs/api.md against a running service, and what they say of ids."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from deployment.pb.orca.v1 import orca_pb2 as pb
from tests.e2e.conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(server: Server) -> dict[str, list[str]]:
    """By language, with the ports of this service."""
    text = PAGE.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{server.http_port}")
    text = text.replace("127.0.0.1:9000", server.target)
    found: dict[str, list[str]] = {}
    for language, block in BLOCK.findall(text):
        found.setdefault(language, []).append(block)
    return found


def run(block: str) -> tuple[dict[str, Any], str]:
    """What a block leaves behind, and what it prints."""
    names: dict[str, Any] = {"__name__": "example"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names, printed.getvalue()


def test_the_examples(settled: Server) -> None:
    found = blocks(settled)
    (shell,) = found.pop("sh")
    said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    body = json.loads(said)
    assert (body["id"], body["usage"]["completion_tokens"] <= 16) == ("cmpl-demo-1", True)

    http, official, stream, failing, blocking, asynchronous = found.pop("python")
    names, _ = run(http)
    assert names["text"]
    assert names["finish_reason"] in ("stop", "length")
    names, _ = run(official)
    assert names["answer"].id == "chatcmpl-demo-2"
    names, printed = run(stream)
    assert printed.splitlines()[-2].endswith(f" {names['message'].request_id}")
    assert printed.splitlines()[-1] == names["message"].request_id
    names, printed = run(failing)
    assert (printed[:20], printed[-15:]) == ("NOT_FOUND NOT_FOUND ", " demo-3 demo-3\n")
    assert dict(names["info"].metadata) == {"kind": "model", "name": "another"}
    names, printed = run(blocking)
    assert "come back" not in printed
    assert names["chunk"].finish_reason is not None
    assert names["whole"].text in printed
    _, printed = run(asynchronous)
    assert len(json.loads(printed.replace("'", '"'))) == 2

    (error,) = found.pop("json")
    answer = httpx.post(
        f"http://127.0.0.1:{settled.http_port}/v1/completions", json={"prompt": "Hi", "temperature": -1}, timeout=60
    )
    assert (answer.status_code, answer.json()) == (400, json.loads(error))
    assert not found


@pytest.mark.parametrize(("own", "metadata"), [("", ()), ("", (("request_id", "meta-1"),)), ("mine", ())])
def test_a_stream_that_fails_is_named_as_its_messages_were(
    settled: Server, own: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    sampling = pb.Sampling(max_new_tokens=900, ignore_eos=True)
    request = pb.GenerateRequest(prompt="Once", request_id=own, sampling=sampling)
    call = settled.stub.Generate(request, metadata=(*metadata, ("orca-timeout-s", "0.5")))
    names: set[str] = set()
    with pytest.raises(grpc.RpcError) as caught:
        names.update(message.request_id for message in call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    (request_id,) = names
    assert request_id == (own or dict(metadata).get("request_id") or request_id)
    ids = [value for key, value in caught.value.trailing_metadata() if key == "request_id"]
    assert ids == [request_id]
    status_bytes = dict(caught.value.trailing_metadata()).get("grpc-status-details-bin")
    if status_bytes is not None:  # Serve's own proxy leaves it out
        named = error_details_pb2.RequestInfo()
        assert [each.Unpack(named) for each in status_pb2.Status.FromString(status_bytes).details].count(True) == 1
        assert named.request_id == request_id


def test_a_generation_over_http_can_be_cancelled_by_its_id(settled: Server) -> None:
    url = f"http://127.0.0.1:{settled.http_port}/v1/completions"
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url, json=body, headers={"x-request-id": "over-http"}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        cancelled = settled.stub.Cancel(pb.CancelRequest(request_id="over-http"), timeout=10)
        assert cancelled.outcome == pb.CancelResponse.CANCELLED
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"
