"""From an overlay's folder to objects: ``kubectl kustomize``, and YAML in which nothing is given twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent.parent
OVERLAYS: Final = ROOT / "k8s" / "overlays"
COMPONENTS: Final = ROOT / "k8s" / "components"
KUBECTL_VARIABLE: Final = "ORCA_KUBECTL"

Object = dict[str, Any]


class RenderError(Exception):
    """Kustomize refused; the text is what it said."""


class _Loader(yaml.CSafeLoader):
    """YAML where a key given twice is an error: kubectl keeps the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def overlays() -> list[Path]:
    """The folders of all overlays."""
    return sorted(path.parent for path in OVERLAYS.glob("*/kustomization.yaml"))


def find_kubectl() -> str | None:
    """``$ORCA_KUBECTL``, the one of this environment (k8s/requirements.txt), or the one on the path."""
    chosen = os.environ.get(KUBECTL_VARIABLE)
    if chosen:
        return chosen
    own = Path(sys.executable).with_name("kubectl")
    return str(own) if os.access(own, os.X_OK) else shutil.which("kubectl")


def render(kubectl: str, folder: Path) -> str:
    """All objects of an overlay as one text. Raises ``RenderError``."""
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RenderError(done.stderr.strip())
    return done.stdout


def render_with_everything(kubectl: str, folder: Path) -> str:
    """An overlay with all the components it does not have by itself, as somebody could put them into its list.

    Raises ``RenderError``.
    """
    own = yaml.safe_load((folder / "kustomization.yaml").read_text())
    listed = {Path(each).name for each in own["components"]}
    others = [each for each in sorted(COMPONENTS.iterdir()) if not each.name.startswith("config-")]
    with tempfile.TemporaryDirectory() as place:
        root = Path(place).resolve()  # kustomize compares real paths
        together = {
            "resources": [os.path.relpath(folder, root)],
            "components": [os.path.relpath(each, root) for each in others if each.name not in listed],
            "images": own["images"],
        }
        (root / "kustomization.yaml").write_text(yaml.safe_dump(together))
        return render(kubectl, root)


def parse(text: str) -> list[Object]:
    """The objects of a text. Raises ``RenderError`` for what is no YAML, or no object."""
    try:
        documents = [each for each in yaml.load_all(text, Loader=_Loader) if each is not None]
    except yaml.YAMLError as error:
        raise RenderError(f"not valid YAML: {' '.join(str(error).split())}") from None
    for document in documents:
        if not isinstance(document, dict) or "kind" not in document:
            raise RenderError("a document is no Kubernetes object: it has no kind")
    return documents
