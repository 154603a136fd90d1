"""Generates `docs/configuration.md` from the sections of `AppConfig`; `--check` only says whether it is fresh.

Types, defaults and ranges come from pydantic; what a key means is the string below it in the source.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deployment import config_sections
from deployment.config import AppConfig

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "configuration.md"
INTRODUCTION = """# Configuration

Generated from `deployment/config_sections.py` by `make docs`.

One YAML file is a Ray Serve config: `orca-serve up`, `serve run`, `serve deploy` and KubeRay's `serveConfigV2` take the
same text. What follows is its `args`; every key may be left out. Unknown keys are errors that name the nearest known
one, and `orca-serve check FILE` says everything that is wrong at once. Complete examples:
[local-cpu.yaml](../configs/local-cpu.yaml), [one-gpu.yaml](../configs/one-gpu.yaml),
[fleet.yaml](../configs/fleet.yaml); how to choose: [operations.md](operations.md).

```yaml
http_options: {host: 127.0.0.1, port: 8000}   # --host, --http-port
grpc_options:
  port: 9000                                   # --grpc-port
  grpc_servicer_functions:
    - deployment.grpc_api.add_orca_service
    - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
applications:
  - name: orca
    import_path: deployment.app:build
    route_prefix: /
    args:
      model: {source: smollm2-135m-instruct}
      replicas: {min: 2, max: 2}
```

The two ports must differ. Beside these, Serve's own options are passed on: `proxy_location`, `http_options`
(`root_path`, `request_timeout_s`, `keep_alive_timeout_s`, `ssl_*`), `grpc_options` (`request_timeout_s`,
`enable_reflection`), `logging_config` and so on.
"""


def main() -> int:
    """Generate, or compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the committed page is stale")
    page = "\n".join([INTRODUCTION, *sections()])
    if not parser.parse_args().check:
        TARGET.write_text(page)
        return 0
    if TARGET.is_file() and TARGET.read_text() == page:
        return 0
    print(f"{TARGET.relative_to(ROOT)} is not what the configuration gives; run: make docs", file=sys.stderr)
    return 1


def sections() -> Iterator[str]:
    """One chapter a section: what it is about, and a table of its keys."""
    texts = described(inspect.getsource(config_sections))
    for name, field in AppConfig.model_fields.items():
        section: Any = field.annotation
        yield f"## {name}\n"
        yield f"{one_line(inspect.getdoc(section) or '')}\n"
        yield "| key | type | default | range | meaning |\n|---|---|---|---|---|"
        for key, each in section.model_fields.items():
            text = texts[section.__name__].get(key)
            if text is None:
                raise SystemExit(f"{section.__name__}.{key} has no text below it")
            yield f"| `{key}` | {kind_of(section, key)} | {default_of(each)} | {range_of(each)} | {one_line(text)} |"
        yield ""


def described(source: str) -> dict[str, dict[str, str]]:
    """Class -> key -> the string that follows the key's definition."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_texts(node)) for node in classes}


def _texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            yield field.target.id, str(ast.literal_eval(after.value))


def kind_of(section: type[BaseModel], key: str) -> str:
    """The type as a reader of YAML says it: choices in full, `null` where it may be."""
    schema = section.model_json_schema()["properties"][key]
    kinds: list[str] = []
    for option in schema.get("anyOf", [schema]):
        choices = option.get("enum") or ([option["const"]] if "const" in option else [])
        kinds += [f"`{choice}`" for choice in choices] or [option["type"]]
    return ", ".join(kinds)


def default_of(field: FieldInfo) -> str:
    """As YAML writes it."""
    if field.default_factory is not None:
        return "null"  # the environment may say otherwise: the text tells
    value = field.default
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int) else f"`{value}`" if value else ""


def range_of(field: FieldInfo) -> str:
    """The bounds that pydantic checks; what depends on other keys is in the text."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "not empty", "max_length": "characters ≤"}
    bounds = []
    for constraint in field.metadata:
        for name, sign in signs.items():
            bound = getattr(constraint, name, None)
            if bound is not None:
                bounds.append(sign if name == "min_length" else f"{sign} {bound:g}")
    return ", ".join(bounds)


def one_line(text: str) -> str:
    """Markdown of a docstring: one line, code in single quotes, nothing that ends a cell."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
