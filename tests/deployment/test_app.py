from __future__ import annotations

import inspect

import pytest
from ray import serve

from deployment import app
from deployment.config import AppConfig
from deployment.ingress import Ingress
from deployment.replica import Replica
from deployment.router import PinnedRouter
from deployment.served_ingress import ServedIngress
from deployment.served_replica import ServedReplica
from orca_core.errors import ConfigError

ARGS = {"replicas": {"min": 2, "max": 2, "num_cpus": 0.5}, "drain": {"timeout_s": 7}}


def test_the_builder_is_typed() -> None:
    """As strings (lazy annotations), Serve would hand the builder a plain dict."""
    assert inspect.signature(app.build).parameters["config"].annotation is AppConfig


@pytest.mark.parametrize("config", [ARGS, AppConfig.parse(ARGS)])
def test_an_application_is_built_from_a_config_or_a_mapping(config: object) -> None:
    assert isinstance(app.build(config), serve.Application)  # type: ignore[arg-type]


def test_a_wrong_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"did you mean replicas\.num_cpus"):
        app.build({"replicas": {"num_cpu": 1}})  # type: ignore[arg-type]


def test_slots_are_the_limit_not_serve() -> None:
    config = AppConfig.parse(ARGS)
    for options in (app.replica_options(config), app.ingress_options(config)):
        assert options["max_ongoing_requests"] >= 10_000
        assert options["graceful_shutdown_timeout_s"] == 7


def test_resources_come_from_the_config() -> None:
    config = AppConfig.parse({"replicas": {"num_gpus": 1, "num_cpus": 4}, "ingress": {"replicas": 2, "num_cpus": 0.5}})
    assert app.replica_options(config)["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 1}
    assert app.ingress_options(config)["ray_actor_options"] == {"num_cpus": 0.5}
    assert app.ingress_options(config)["num_replicas"] == 2


def test_a_fixed_number_of_replicas_does_not_scale() -> None:
    options = app.replica_options(AppConfig.parse(ARGS))
    assert options["num_replicas"] == 2
    assert "autoscaling_config" not in options


def test_a_range_of_replicas_scales() -> None:
    options = app.replica_options(AppConfig.parse({"replicas": {"min": 1, "initial": 2, "max": 5}}))
    scaling = options["autoscaling_config"]
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 2, 5)
    assert "num_replicas" not in options
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (0, 0), "Serve would wait on top of our policy"
    assert scaling.policy.policy_function == "deployment.autoscaling.QueueDepthPolicy"
    assert scaling.metrics_interval_s == AppConfig().autoscaling.interval_s
    assert options["graceful_shutdown_timeout_s"] >= AppConfig().limits.max_request_seconds, "who leaves, finishes"


def test_calls_go_where_the_ingress_says() -> None:
    routing = app.replica_options(AppConfig.parse(ARGS))["request_router_config"]
    assert routing.get_request_router_class().__name__ == PinnedRouter.__name__


def test_requests_wait_in_the_ingress_alone() -> None:
    """A replica accepts what its ledger can hold now, and nothing else."""
    engine = AppConfig.parse({"limits": {"max_waiting_requests": 7}}).engine_config()
    assert (engine.max_waiting_requests, engine.max_waiting_slots) == (0, 0)


def test_the_served_classes_are_the_plain_ones() -> None:
    assert issubclass(ServedReplica, Replica)
    assert issubclass(ServedIngress, Ingress)
    assert not isinstance(Replica, serve.Deployment)
