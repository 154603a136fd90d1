"""docs/api.md against the code: every field, status, header, endpoint and argument, and none that is not there."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from deployment import client, openai_fields
from deployment.auth import HEADER
from deployment.client_messages import ClientChunk
from deployment.config_sections import LimitsSection
from deployment.errors import ERROR_RULES
from deployment.grpc_api import SERVICE_NAME, TIMEOUT_KEY
from deployment.grpc_arrival import REQUEST_ID_KEY
from deployment.grpc_errors import ERROR_DOMAIN, STATUS_DETAILS_KEY
from deployment.http_api import REPLICA_HEADER, TIMEOUT_HEADER, build_app
from deployment.http_arrival import REQUEST_ID_HEADER
from deployment.openai_requests import parse_chat, parse_completion
from deployment.pb.orca.v1 import orca_pb2 as pb
from orca_core import errors
from orca_core.errors import InvalidRequestError, OrcaError
from orca_core.params import DEFAULT_MAX_NEW_TOKENS, MAX_STOP_BYTES, MAX_STOP_STRINGS, SAMPLING_RANGES, SamplingParams
from orca_core.types import ROLES
from tests.deployment.fake_service import FakeService

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
NAMED = re.compile(r"`([^`]+)`")
SERVICE = pb.DESCRIPTOR.services_by_name["OrcaService"]
LIMITS = LimitsSection()

Parse = Callable[..., Any]
FACES: dict[str, tuple[Parse, dict[str, Any]]] = {
    "completions": (parse_completion, {"prompt": "Hi"}),
    "chat": (parse_chat, {"messages": [{"role": "user", "content": "Hi"}]}),
}


def section(heading: str) -> str:
    """From a heading to the next one of its level or above."""
    level = heading.index(" ")
    start = PAGE.index(f"\n{heading}\n") + len(heading) + 2
    end = re.search(rf"^#{{1,{level}}} ", PAGE[start:], re.MULTILINE)
    return PAGE[start : start + end.start()] if end else PAGE[start:]


def rows(text: str, first: str) -> list[list[str]]:
    """The cells of the rows of all tables whose first column has that title."""
    found, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[0] == first:
            inside = True
        elif inside and not cells[0].startswith("---"):
            found.append(cells)
    return found


def name(cell: str) -> str:
    match = NAMED.fullmatch(cell)
    assert match, f"{cell} is not one name"
    return match[1]


def of_face(face: str, table: list[list[str]]) -> dict[str, list[str]]:
    assert {row[1] for row in table} <= {"both", *FACES}
    found = [(name(row[0]), row[2:]) for row in table if row[1] in ("both", face)]
    assert len(dict(found)) == len(found), "a field has two rows"
    return dict(found)


# ---- HTTP


class Asked(dict[str, Any]):
    """A body that notes what is looked for in it."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)


def lacking(face: str) -> dict[str, Callable[[Any], bool]]:
    own = openai_fields._UNSUPPORTED_CHAT if face == "chat" else openai_fields._UNSUPPORTED_COMPLETION
    return {**openai_fields._UNSUPPORTED, **own}


def parsed(face: str, **given: Any) -> Asked:
    parse, body = FACES[face]
    asked = Asked({**body, **given})
    parse(asked, LIMITS, "id")
    return asked


@pytest.mark.parametrize("face", FACES)
def test_the_fields_that_count_are_those_that_are_read(face: str) -> None:
    told = of_face(face, rows(section("### Fields that count"), "field"))
    assert set(told) == parsed(face, stream=True, stream_options={}).names - set(lacking(face))


@pytest.mark.parametrize("face", FACES)
def test_the_fields_that_are_refused(face: str) -> None:
    told = of_face(face, rows(section("### Fields that are refused"), "field"))
    assert set(told) == set(lacking(face))
    for field, (harmless,) in told.items():
        for value in NAMED.findall(harmless):
            parsed(face, **{field: json.loads(value)})
        with pytest.raises(InvalidRequestError) as caught:
            parsed(face, **{field: {"matters": "much"}})
        assert caught.value.field == field
        if not harmless:
            assert not any(lacking(face)[field](value) for value in (False, True, 0, 1, "", [], {}, "none", "auto"))


@pytest.mark.parametrize("face", FACES)
def test_what_is_said_to_do_nothing_does_nothing(face: str) -> None:
    text = section("### Fields that count")
    (said,) = re.findall(r"accepted and does nothing: (.*?) and\s+whatever", text, re.DOTALL)
    names = NAMED.findall(said)
    assert len(names) > 3
    assert not parsed(face, **dict.fromkeys(names, "x")).names & set(names)


def test_roles_and_limits() -> None:
    counting = of_face("chat", rows(section("### Fields that count"), "field"))
    assert all(f"`{role}`" in counting["messages"][0] for role in ROLES)
    assert str(MAX_STOP_STRINGS) in counting["stop"][0]
    assert str(MAX_STOP_BYTES) in counting["stop"][0]
    assert str(DEFAULT_MAX_NEW_TOKENS) in counting["max_tokens"][0]
    assert str(LIMITS.max_choices) in counting["n"][0]
    for limit in set(re.findall(r"`limits\.(\w+)`", PAGE)):
        assert hasattr(LIMITS, limit)


def test_the_endpoints() -> None:
    told = {name(row[0]) for row in rows(section("## HTTP"), "endpoint")}
    routes = build_app(FakeService()).routes
    served = {(method, re.sub(":path", "", route.path)) for route in routes for method in route.methods}  # type: ignore[attr-defined]
    assert told == {f"{method} {path}" for method, path in served if method != "HEAD"}


def test_the_headers() -> None:
    for each in (HEADER, TIMEOUT_HEADER, REQUEST_ID_HEADER, REPLICA_HEADER, TIMEOUT_KEY, REQUEST_ID_KEY):
        assert f"`{each}" in PAGE
    answers = {name(row[0]).lower() for row in rows(section("### Answers"), "header")}
    assert answers == {REQUEST_ID_HEADER, REPLICA_HEADER, "retry-after", "x-should-retry", "www-authenticate"}


# ---- gRPC


SCALARS = {value: key[5:].lower() for key, value in vars(FieldDescriptor).items() if key.startswith("TYPE_")}


def type_of(field: FieldDescriptor) -> str:
    """As the schema writes it."""
    message, enum = field.message_type, field.enum_type
    if message is not None and message.GetOptions().map_entry:
        return f"map<{', '.join(type_of(each) for each in message.fields)}>"
    plain = message.name if message is not None else enum.name if enum is not None else SCALARS[field.type]
    if field.is_repeated:
        return f"repeated {plain}"
    alone = field.containing_oneof is not None and field.containing_oneof.name == f"_{field.name}"
    return f"optional {plain}" if alone else plain


def test_the_rpcs() -> None:
    told = {name(row[0]): row[1:] for row in rows(section("## gRPC"), "RPC")}
    assert set(told) == {method.name for method in SERVICE.methods}
    for method in SERVICE.methods:
        stream = "stream of " if method.server_streaming else ""
        assert told[method.name][0] == f"`{method.input_type.name}` → {stream}`{method.output_type.name}`"
    assert SERVICE_NAME in PAGE
    assert ERROR_DOMAIN in section("## Errors")
    assert STATUS_DETAILS_KEY in section("## Errors")


def headed() -> Iterator[tuple[tuple[str, ...], str]]:
    for heading in re.findall(r"^(#### .*)$", section("### Messages"), re.MULTILINE):
        yield tuple(NAMED.findall(heading)), section(heading)


def test_every_message_has_a_place() -> None:
    told = [message for messages, _ in headed() for message in messages]
    assert sorted(told) == sorted(pb.DESCRIPTOR.message_types_by_name)


@pytest.mark.parametrize(("messages", "text"), [pytest.param(*each, id=each[0][0]) for each in headed()])
def test_the_fields_of_messages(messages: tuple[str, ...], text: str) -> None:
    told = {(name(row[0]), row[1]) for row in rows(text, "field")}
    known = [field for message in messages for field in pb.DESCRIPTOR.message_types_by_name[message].fields]
    assert told == {(field.name, type_of(field)) for field in known}
    enums = [field.enum_type for field in known if field.enum_type is not None]
    assert all(f"`{value.name}`" in text for enum in enums for value in enum.values)


def test_sampling_has_its_ranges_and_defaults() -> None:
    table = {name(row[0]): row[1:] for row in rows(section("#### `Sampling`"), "field")}
    for field, legal in SAMPLING_RANGES.items():
        assert table[field][1] == str(legal)
    for field in fields(SamplingParams):
        default = table[field.name][2]
        if field.name == "max_new_tokens":
            assert default == str(DEFAULT_MAX_NEW_TOKENS)
        elif isinstance(field.default, bool):
            assert default == str(field.default).lower()
        elif isinstance(field.default, int | float):
            assert float(default) == field.default
        else:
            assert default in ("", "none", "random")


# ---- errors


def kinds(kind: type[OrcaError] = OrcaError) -> Iterator[type[OrcaError]]:
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from kinds(child)


def test_the_table_of_errors_is_the_codes() -> None:
    table = {name(row[0]): [cell.strip("`") for cell in row[1:5]] for row in rows(section("## Errors"), "code")}
    shown = {code for code, rule in ERROR_RULES.items() if not rule.opaque} | {"internal"}
    classes = {kind.code: kind.__name__ for kind in kinds() if "code" in vars(kind)}
    assert table == {
        code: [rule.grpc_code.name, str(rule.http_status), rule.openai_type, classes[code]]
        for code, rule in ERROR_RULES.items()
        if code in shown
    }
    assert all(f"`{code}`" in section("## Errors") for code in ERROR_RULES)


# ---- Python


def arguments(method: Any) -> set[str]:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}


@pytest.mark.parametrize("kind", [client.OrcaClient, client.AsyncOrcaClient])
def test_the_client(kind: type) -> None:
    table = {row[0]: row[1] for row in rows(section("## Python"), "method")}
    public = {each: getattr(kind, each) for each in dir(kind) if not each.startswith("_")}
    made = "`OrcaClient`, `AsyncOrcaClient`"
    assert set(table) == {made, *(f"`{each}`" for each in public)}
    for method, called in ((made, kind.__init__), *((f"`{each}`", function) for each, function in public.items())):
        told = {each.rstrip("=") for each in NAMED.findall(table[method])} - {"Sampling", client.DEFAULT_ADDRESS}
        assert told == arguments(called), method
    assert f"`{client.DEFAULT_ADDRESS}`" in table[made]
    assert str(int(client.DEFAULT_KEEPALIVE_S)) in table[made]


def test_the_chunks_of_the_client() -> None:
    assert all(f"`{field.name}`" in section("## Python") for field in fields(ClientChunk))
