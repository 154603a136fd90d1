"""What the overlays of k8s/ leave for you to say, and a kustomization of your own must not."""

from __future__ import annotations

from typing import Any, Final

from k8s_check.render import Object

_EXAMPLE: Final = ".example.com"


def example_images(objects: list[Object]) -> list[str]:
    """Images in a registry that is an example: `images:` in an outer kustomization goes by the *renamed* name."""
    found: dict[str, None] = {}
    for each in objects:
        _collect(each, found)
    return [
        f"image {image!r} is of an example's registry: images: [{{name: {image.partition(':')[0]}, newName: …}}]"
        for image in found
    ]


def _collect(each: Any, found: dict[str, None]) -> None:
    if isinstance(each, dict):
        image = each.get("image")
        if isinstance(image, str) and image.partition("/")[0].endswith(_EXAMPLE):
            found[image] = None
        for part in each.values():
            _collect(part, found)
    elif isinstance(each, list):
        for part in each:
            _collect(part, found)
