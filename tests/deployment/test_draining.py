"""The end of a service, asked for through a handle that was met at its beginning."""

from __future__ import annotations

from typing import Any

from deployment.cli.draining import Doors


class Handle:
    """Ingresses that say how many requests are open; ``n_open``: one answer after the other. Or nobody answers."""

    def __init__(self, *n_open: int, meets: bool = True) -> None:
        self._n_open = list(n_open)
        self._meets = meets
        self.asked: list[str] = []

    def broadcast(self, method: str) -> Handle:
        self.asked.append(method)
        return self

    async def results_async(self, timeout_s: float) -> list[Any]:
        assert timeout_s > 0
        if self.asked[-1] == "share" and not self._meets:
            raise TimeoutError
        return [self._n_open.pop(0) if len(self._n_open) > 1 else self._n_open[0]]


def test_they_are_met_at_once_and_asked_until_nothing_is_open() -> None:
    handle = Handle(0, 2, 1, 0)
    doors = Doors(handle)
    assert handle.asked == ["share"]
    doors.close(30.0)
    assert handle.asked == ["share", "drain", "drain", "drain"]


def test_what_is_open_when_the_time_is_over_is_ended() -> None:
    handle = Handle(3)
    Doors(handle).close(0.0)
    assert handle.asked[-1] == "end_open"


def test_an_ingress_that_does_not_answer_yet_is_asked_again() -> None:
    handle = Handle(0, meets=False)
    Doors(handle).close(30.0)
    assert "drain" in handle.asked
