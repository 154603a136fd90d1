"""An ingress that is short of CPU: its replicas hear of it, and no token is lost or late for ever because of that."""

from __future__ import annotations

from tests.deployment.plane_cases import Make, assert_undisturbed, make, ready

__all__ = ["make"]


async def test_replicas_are_told_once_of_each_change_and_all_streams_end_as_ever(make: Make) -> None:
    plane = await ready(make, "a", "b")
    interval_s = 0.0
    for link in plane.dispatcher._links:
        link._delivery._interval_s = lambda: interval_s
    clients = [plane.ask(4, 12) for _ in range(4)]
    await plane.step(3)
    assert plane.replicas.paces == []
    interval_s = 0.01
    await plane.step(1)
    assert sorted(plane.replicas.paces) == [("a", 0.01), ("b", 0.01)]
    paced = [each.outlet.pace_s for far in plane.replicas.all.values() for each in far.replica._attached.values()]
    assert paced == [0.01, 0.01]
    await plane.step(2)
    assert [len(client.tokens) for client in clients] == [3] * 4  # held at the replica, or here
    await plane.beat()  # what waits there goes with whatever else leaves
    interval_s = 0.0
    await plane.run_out()
    assert sorted(plane.replicas.paces) == [("a", 0.0), ("a", 0.01), ("b", 0.0), ("b", 0.01)]
    for client in clients:
        assert_undisturbed(client, resumes=0)
    plane.assert_idle()
