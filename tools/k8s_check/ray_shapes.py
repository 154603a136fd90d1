"""KubeRay's RayService, as far as our manifests use it: see ``shapes``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from k8s_check.pod_shapes import PodTemplate
from k8s_check.shapes import (
    Container,
    ContainerSecurity,
    Metadata,
    Port,
    PullPolicy,
    Resources,
    Shape,
    ValueFrom,
)

Manager = Literal["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]
"""The CRD's CEL rule allows these two."""


class AutoscalerOptions(Shape):
    """Of the container beside the head."""

    version: Literal["v1", "v2"] | None = None
    idle_timeout_seconds: int = 60
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"] | None = None
    image_pull_policy: PullPolicy | None = None
    resources: Resources = Resources()
    security_context: ContainerSecurity = ContainerSecurity()


class AuthOptions(Shape):
    """Ray's own calls and dashboard."""

    mode: Literal["disabled", "token"]
    enable_k8s_token_auth: bool | None = Field(default=None, alias="enableK8sTokenAuth")


class RedisPassword(Shape):
    """A value, or where it is."""

    value: str | None = None
    value_from: ValueFrom | None = None


class FaultTolerance(Shape):
    """Where the head keeps its state."""

    redis_address: str
    redis_password: RedisPassword | None = None
    external_storage_namespace: str | None = None


class Upgrade(Shape):
    """How a changed cluster comes in; the CRD takes any text for ``type``."""

    type: str | None = None
    cluster_upgrade_options: dict[str, str | int] | None = None


class Group(Shape):
    """What head and workers share."""

    ray_start_params: dict[str, str] = Field(default={})
    resources: dict[str, str] = Field(default={})
    template: PodTemplate

    @property
    def container(self) -> Container:
        """The one that runs Ray."""
        return self.template.spec.containers[0]


class HeadServiceSpec(Shape):
    """Of the head's service; the operator fills in what is left out."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None


class HeadService(Shape):
    """The service in front of the dashboard."""

    metadata: Metadata = Metadata()
    spec: HeadServiceSpec = HeadServiceSpec()


class Head(Group):
    """The head."""

    enable_ingress: bool | None = None
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None
    head_service: HeadService | None = None


class Workers(Group):
    """A group of workers."""

    group_name: str
    replicas: int | None = None
    min_replicas: int
    max_replicas: int
    idle_timeout_seconds: int | None = None
    suspend: bool | None = None
    num_of_hosts: int = 1


class Cluster(Shape):
    """A RayCluster's spec."""

    ray_version: str = ""
    enable_in_tree_autoscaling: bool = False
    autoscaler_options: AutoscalerOptions = AutoscalerOptions()
    auth_options: AuthOptions | None = None
    gcs_fault_tolerance_options: FaultTolerance | None = None
    head_group_spec: Head
    worker_group_specs: list[Workers] = Field(min_length=1)
    upgrade_strategy: Upgrade | None = None
    managed_by: Manager | None = None


class ServicePort(Shape):
    """Of the serve service."""

    name: str
    port: Port
    target_port: Port | str | None = None
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    app_protocol: str | None = None


class ServiceSpec(Shape):
    """Of the serve service."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    cluster_i_p: str | None = Field(default=None, alias="clusterIP")
    ports: list[ServicePort]
    publish_not_ready_addresses: bool = False


class ServeService(Shape):
    """The service in front of Serve."""

    metadata: Metadata = Metadata()
    spec: ServiceSpec


class RayServiceSpec(Shape):
    """What a RayService wants."""

    serve_config_v2: str = Field(alias="serveConfigV2")
    upgrade_strategy: Upgrade = Upgrade()
    ray_cluster_deletion_delay_seconds: int = 60
    exclude_head_pod_from_serve_svc: bool = False
    serve_service: ServeService | None = None
    managed_by: Manager | None = None
    ray_cluster_config: Cluster


class RayService(Shape):
    """The whole object."""

    api_version: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec

    @property
    def cluster(self) -> Cluster:
        """Its cluster's spec."""
        return self.spec.ray_cluster_config

    @property
    def head(self) -> Head:
        """Its head."""
        return self.cluster.head_group_spec

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Head and workers with their names."""
        yield "head", self.head
        for group in self.cluster.worker_group_specs:
            yield group.group_name, group
