"""What can be said of the image without building it: `make image` and tools/image_test.sh do that."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from image import BUILDERS, ROOT, TORCH, command_line, find_builder, main
from k8s_check.facts import Facts, read_facts

DOCKERFILE = (ROOT / "Dockerfile").read_text()
FACTS = Facts("1.2", "9.9.9")


@pytest.mark.parametrize("builder", BUILDERS)
def test_the_tag_names_this_version_and_its_ray(builder: str) -> None:
    command = command_line(builder, "cpu", FACTS, ["--build-arg", "BASE=mine"])
    assert command[0] == builder
    assert command[command.index("-t") + 1] == "orca-serve:1.2-ray9.9.9"
    assert command[-3:] == ["--build-arg", "BASE=mine", "."]


def test_cuda_is_another_image_with_another_torch() -> None:
    cpu, cuda = (command_line("docker", device, FACTS, []) for device in ("cpu", "cuda"))
    assert [here for here, there in zip(cuda, cpu, strict=True) if here != there] == [
        "orca-serve-cuda:1.2-ray9.9.9",
        "TORCH_INDEX=https://pypi.org/simple",
    ]


def test_a_docker_without_an_engine_is_passed_over() -> None:
    assert find_builder(lambda builder: builder == "podman") == "podman"
    assert find_builder(lambda _: False) is None


def test_make_image_says_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--builder", "podman", "--for", "cuda", "--print", "--no-cache"]) == 0
    assert f"orca-serve-cuda:{read_facts(ROOT).tag}" in (said := capsys.readouterr().out)
    assert said.endswith("--no-cache .\n")


def test_the_default_torch_of_the_dockerfile_is_that_of_the_cpu_image() -> None:
    assert re.findall(r"^ARG TORCH_INDEX=(\S+)$", DOCKERFILE, re.MULTILINE) == [TORCH["cpu"][1]]


def test_what_is_copied_is_there_and_gets_through_the_ignore_file() -> None:
    copied = {
        source for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for source in line.split()
    }
    let_through = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert copied == let_through
    assert all((ROOT / source).exists() for source in copied)


def test_it_installs_what_a_server_needs_and_this_project_from_nowhere_else() -> None:
    (snippet,) = re.findall(r'^RUN python3 -c "(.*?)" > ', DOCKERFILE, re.MULTILINE | re.DOTALL)
    code = snippet.replace("\\\n", "")
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {re.split(r"[^\w-]", line)[0] for line in said.splitlines()}
    assert {"grpcio", "pydantic", "ray", "safetensors", "torch", "transformers"} <= names
    assert not any(name.startswith("orca") for name in names)


def test_the_haproxy_of_the_manifests_is_put_there() -> None:
    manifest = (ROOT / "k8s" / "base" / "rayservice.yaml").read_text()
    (path,) = set(re.findall(r"RAY_SERVE_HAPROXY_BINARY_PATH, value: (\S+)}", manifest))
    assert re.search(rf"^COPY --from=build \S+/orca-haproxy {re.escape(path)}$", DOCKERFILE, re.MULTILINE)


def test_it_runs_as_the_user_of_the_manifests() -> None:
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["1000:100"]


def test_the_readme_runs_what_make_image_makes() -> None:
    named = re.findall(r"docker run .*(orca-serve:\S+)", (ROOT / "README.md").read_text())
    assert named == [f"orca-serve:{read_facts(ROOT).tag}"]


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: make k8s-tools")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
