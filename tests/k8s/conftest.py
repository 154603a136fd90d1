"""Rendered overlays, each made once; whoever needs kubectl is skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from k8s_check.facts import Facts, read_facts
from k8s_check.render import KUBECTL_VARIABLE, OVERLAYS, ROOT, Object, find_kubectl, parse, render_with_everything
from k8s_check.render import render as render_overlay


@pytest.fixture(scope="session")
def facts() -> Facts:
    return read_facts(ROOT)


@pytest.fixture(scope="session")
def kubectl() -> str:
    found = find_kubectl()
    if found is None:
        pytest.skip(f"no kubectl: make k8s-tools, or {KUBECTL_VARIABLE}=PATH")
    return found


@pytest.fixture(scope="session")
def rendered(kubectl: str) -> Callable[[str], list[Object]]:
    """The objects of an overlay; ``NAME+`` with all components. Not to be changed: copy them."""

    @cache
    def objects(name: str) -> list[Object]:
        folder = OVERLAYS / name.removesuffix("+")
        make = render_with_everything if name.endswith("+") else render_overlay
        return parse(make(kubectl, folder))

    return objects
