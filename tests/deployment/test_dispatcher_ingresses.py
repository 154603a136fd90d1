"""The serving plane in virtual time: ingresses that die, and everything at random."""

from __future__ import annotations

import random

import pytest

from tests.deployment.far_replicas import FarReplica, FarReplicas
from tests.deployment.plane import INTERVAL_S, SILENCE_S, Client, Clock, Plane, replicas_of, settle
from tests.deployment.plane_cases import Make, assert_undisturbed, make, ready, where

__all__ = ["make"]


async def test_a_replica_frees_what_a_dead_ingress_had(make: Make) -> None:
    now = Clock(0.0)
    replicas = FarReplicas()
    replicas.add(FarReplica("a", clock=now, heartbeat_s=1.0))
    plane, other = make(replicas), make(replicas)
    for each in (plane, other):
        await each.poll()
    dead, lives = plane.ask(4, 12), other.ask(4, 12)
    await plane.step(2)
    for _ in range(40):  # it polls no more
        now.now += INTERVAL_S
        await other.poll()
        replicas.all["a"].replica._beat_now()
    await settle()
    assert where(plane) == {"a": 1}
    await other.run_out()
    assert_undisturbed(lives)
    assert not dead.finished


async def test_a_second_link_of_an_ingress_ends_what_was_on_the_first(make: Make) -> None:
    plane = await ready(make, "a")
    plane.ask(4, 12)
    await plane.step(2)
    links = plane.dispatcher._links
    second = plane.replicas.attach("a", links.ingress_id, "second")
    await settle()
    assert where(plane) == {"a": 0}
    second.cancel()


@pytest.mark.parametrize("seed", range(4))
async def test_a_burst_over_several_ingresses_is_spread_evenly(make: Make, seed: int) -> None:
    """Field case E1. A replica that has just reported has no more to do than one that is about to."""
    rng = random.Random(seed)
    replicas = replicas_of("a", "b", "c", "d", n_slots=4096)
    planes = [make(replicas, seed=10 * seed + number) for number in range(3)]
    for plane in planes:
        await plane.poll()
    for number in range(48):
        planes[number % 3].ask(4, 36)
        await settle()
        if rng.random() < 0.2:
            replicas.all[rng.choice("abcd")].engine.step()
            await settle()
    shares = sorted(len(far.engine.running) for far in replicas.all.values())
    assert sum(shares) == 48
    assert shares[-1] <= 1.5 * shares[0], shares


@pytest.mark.parametrize("seed", range(6))
async def test_everything_at_random(make: Make, seed: int) -> None:
    """Kills, freezes, drains, new replicas and cancels among streams: each ends whole, or as it was asked to."""
    rng = random.Random(seed)
    plane = make(replicas_of("r0", "r1", "r2", n_slots=60), seed=seed, max_resumes=50)
    await plane.poll()
    cancelled: set[Client] = set()
    for turn in range(60):
        if rng.random() < 0.7:
            plane.ask(rng.randint(1, 8), rng.randint(1, 20))
        disturb(plane, rng, turn, cancelled)
        await plane.step(rng.randint(0, 2))
        await plane.pass_time(INTERVAL_S)
    for far in plane.replicas.all.values():
        far.thaw()
    await plane.pass_time(SILENCE_S * 2)
    await plane.run_out()
    for client in plane.clients:
        if client not in cancelled:
            assert_undisturbed(client, resumes=client.got[-1].resumes)
    plane.assert_idle()


def disturb(plane: Plane, rng: random.Random, turn: int, cancelled: set[Client]) -> None:
    alive = [far for name, far in plane.replicas.all.items() if far.runs and name in plane.replicas.names]
    act = rng.random()
    if len(alive) > 1 and act < 0.2:
        victim = rng.choice(alive)
        if act < 0.08:
            victim.kill()
        elif act < 0.14:
            victim.freeze()
        else:
            plane.replicas.names.discard(victim.name)
    elif act < 0.3:
        plane.replicas.add(FarReplica(f"n{turn}", 60))
    elif act < 0.4 and plane.clients:
        client = rng.choice(plane.clients)
        cancelled.add(client)
        client.stream.cancel()
    elif act < 0.45:
        for far in plane.replicas.all.values():
            far.thaw()
