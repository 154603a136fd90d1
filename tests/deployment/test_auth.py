"""API keys: the file, its reloads, and both faces behind it."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2

from deployment import auth
from deployment.auth import MAX_KEYS_BYTES, ApiKeys, CountedKeys, KeyGuard, NoKeys, key_check, read_keys
from deployment.grpc_api import SERVICE_NAME
from deployment.http_api import build_app
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub
from orca_core.errors import ConfigError, UnauthenticatedError
from tests.deployment.fake_service import MODEL, FakeService
from tests.deployment.grpc_server import FakeIngress, serving

KEY = "sk-first-7f3a"
OTHER = "sk-second-99"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"# team one\n{KEY}\n\n  {OTHER}   # the other one\r\n")
    return file


@pytest.fixture
def keys(path: Path, clock: Clock) -> ApiKeys:
    return ApiKeys(path, clock)


def lets_in(keys: ApiKeys, *authorizations: str | bytes) -> bool:
    try:
        keys.check(authorizations)
    except UnauthenticatedError:
        return False
    return True


def replace(path: Path, text: str) -> None:
    """As an administrator should: in one step."""
    new = path.with_name("new")
    new.write_text(text)
    new.rename(path)


@pytest.mark.parametrize("given", [f"Bearer {KEY}", f"bearer  {OTHER} ", f"BEARER {KEY}".encode()])
def test_a_known_key_opens(keys: ApiKeys, given: str | bytes) -> None:
    assert lets_in(keys, given)


@pytest.mark.parametrize("given", [
    (), ("",), ("Bearer",), ("Bearer ",), (KEY,), (f"Basic {KEY}",), (f"Bearer {KEY}x",), (f"Bearer {KEY[:-1]}",),
    ("Bearer #",), ("Bearer \udcff",), (b"Bearer \xff",), (f"Bearer {KEY}", f"Bearer {KEY}"),
    (f"Bearer {KEY} {OTHER}",), ("Bearer # team one",),
])  # fmt: skip
def test_nothing_else_does(keys: ApiKeys, given: tuple[str | bytes, ...]) -> None:
    assert not lets_in(keys, *given)


def test_every_hash_is_compared(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which key it was, or how much of one was right, must not show in the time it takes."""
    compared: list[bytes] = []
    real = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append(b) or real(a, b))
    for given in (KEY, OTHER, "wrong"):
        compared.clear()
        lets_in(keys, f"Bearer {given}")
        assert len(compared) == 2
        assert KEY.encode() not in compared


def test_a_replaced_file_counts_within_a_second(keys: ApiKeys, path: Path, clock: Clock) -> None:
    replace(path, "sk-new\n")
    clock.now = auth.CHECK_PERIOD_S - 0.01
    assert not lets_in(keys, "Bearer sk-new")
    clock.now = auth.CHECK_PERIOD_S
    assert lets_in(keys, "Bearer sk-new")
    assert not lets_in(keys, f"Bearer {KEY}")


def test_the_file_is_looked_at_once_a_second(keys: ApiKeys, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    real = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **given: looks.append(self) or real(self, **given))
    for tenth in range(35):
        clock.now = tenth / 10
        lets_in(keys, f"Bearer {KEY}")
    assert len(looks) == 3


def test_a_rewrite_in_place_counts(keys: ApiKeys, path: Path, clock: Clock) -> None:
    before = path.stat()
    path.write_text(path.read_text().replace(KEY, KEY[::-1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    clock.now = 2.0
    assert lets_in(keys, f"Bearer {KEY[::-1]}")


@pytest.mark.parametrize("harm", ["gone", "folder", "two words", "not ascii"])
def test_an_unusable_file_keeps_the_keys(
    keys: ApiKeys, path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    if harm in ("gone", "folder"):
        path.unlink()
        if harm == "folder":
            path.mkdir()
    else:
        replace(path, "sk-new with-more\n" if harm == "two words" else "sk-n\u00e9w\n")
    with caplog.at_level(logging.INFO):
        for second in range(2, 6):
            clock.now = float(second)
            assert lets_in(keys, f"Bearer {KEY}")
            assert not lets_in(keys, "Bearer sk-new")
    assert len(caplog.records) == 1, "said once, not every second"
    assert "sk-" not in caplog.text
    if path.is_dir():
        path.rmdir()
    replace(path, "sk-back\n")
    clock.now = 7.0
    assert lets_in(keys, "Bearer sk-back")


def test_a_file_that_was_emptied_lets_nobody_in(keys: ApiKeys, path: Path, clock: Clock) -> None:
    replace(path, "# all of them revoked\n")
    clock.now = 2.0
    assert not lets_in(keys, f"Bearer {KEY}")
    assert not lets_in(keys, "Bearer ")


def test_no_key_is_ever_logged_or_shown(keys: ApiKeys, path: Path, clock: Clock,
                                        caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    with caplog.at_level(logging.DEBUG):
        replace(path, f"{KEY}\nsk-third\n")
        clock.now = 2.0
        lets_in(keys, "Bearer sk-wrong")
    assert "2 API keys" in caplog.text
    for shown in (caplog.text, repr(keys), str(vars(keys)), str(UnauthenticatedError())):
        assert "sk-" not in shown


def test_what_cannot_be_used_at_the_start_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# none\n")
    for path, words in ((tmp_path / "none", "No such file"), (empty, "holds no key")):
        with pytest.raises(ConfigError, match=words) as caught:
            key_check(str(path))
        assert caught.value.field == "auth.api_keys_file"
    assert isinstance(key_check(None), NoKeys)


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbfsk-1\n")
    assert read_keys(tmp_path / "bom") == [b"sk-1"]


# ---- HTTP


@pytest.fixture
async def client(keys: ApiKeys) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(FakeService(), keys=keys)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://orca") as client:
        yield client


WITH_KEY = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("url", ["/v1/models", "/v1/status", "/nowhere", "/livez/", "/x/livez", "//livez"])
async def test_http_needs_a_key(client: httpx.AsyncClient, url: str) -> None:
    refused = await client.get(url)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert (await client.get(url, headers=WITH_KEY)).status_code != 401


async def test_http_probes_need_none(client: httpx.AsyncClient) -> None:
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/readyz")).status_code == 200


async def test_http_generation(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL.model_id, "prompt": "Hi"}
    assert (await client.post("/v1/completions", json=body)).status_code == 401
    assert (await client.post("/v1/completions", json=body, headers=WITH_KEY)).status_code == 200


async def test_a_refused_body_is_not_read(keys: ApiKeys) -> None:
    async def receive() -> Any:
        raise AssertionError("read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    refused: list[str] = []
    guard = KeyGuard(build_app(FakeService()), CountedKeys(keys, lambda error: refused.append(error.code)))
    await guard(
        {"type": "http", "path": "/v1/completions", "headers": [(b"authorization", b"Bearer x")]}, receive, send
    )
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 401
    assert refused == ["unauthenticated"]


async def test_a_prefix_of_the_server_leaves_probes_open(keys: ApiKeys) -> None:
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None: ...

    for path in ("/orca/livez", "/orca/v1/models"):
        await KeyGuard(app, keys)({"type": "http", "path": path, "root_path": "/orca", "headers": []}, send, send)  # type: ignore[arg-type]
    assert reached == ["/orca/livez"]


# ---- gRPC


async def code_of(channel: grpc.aio.Channel, method: str, data: bytes, *metadata: tuple[str, str]) -> grpc.StatusCode:
    path = f"/{SERVICE_NAME}/{method}"
    call = channel.unary_stream(path) if method == "Generate" else channel.unary_unary(path)
    answer = call(data, metadata=metadata)
    try:
        await (anext(aiter(answer)) if method == "Generate" else answer)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_grpc_needs_a_key_for_everything_but_health(keys: ApiKeys) -> None:
    service = FakeIngress()
    service.keys = keys
    request = pb.GenerateRequest(prompt="Hi").SerializeToString()
    empty = [(name, b"") for name in ("Cancel", "Tokenize", "Detokenize", "GetModel", "GetStatus")]
    with serving(service) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            for method, data in [("Generate", request), ("Complete", request), *empty, ("Complete", b"\xff\xff")]:
                for wrong in ((), (("authorization", "Bearer wrong"),)):
                    assert await code_of(channel, method, data, *wrong) is grpc.StatusCode.UNAUTHENTICATED, method
            assert not service.calls
            good = ("authorization", f"Bearer {KEY}")
            for method, data in [("Generate", request), ("Complete", request), ("GetModel", b"")]:
                assert await code_of(channel, method, data, good) is grpc.StatusCode.OK
            assert await code_of(channel, "Complete", b"\xff\xff", good) is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError, match="missing or unknown API key"):
                await OrcaServiceStub(channel).GetModel(pb.GetModelRequest())  # type: ignore[no-untyped-call]
    health = await service.Check(health_pb2.HealthCheckRequest(), None)  # type: ignore[arg-type]
    assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_what_is_no_file_is_not_read(path: str) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        key_check(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="is not a file"):
        key_check(str(pipe))


def test_a_file_of_keys_has_a_size(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with path.open("wb") as file:
        file.truncate(MAX_KEYS_BYTES + 1)
    with pytest.raises(ConfigError, match="more than"):
        key_check(str(path))
