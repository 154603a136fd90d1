"""``python -m deployment.cli.paced CONFIG``: ``orca-serve up`` with replicas that have no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deployment.cli.up import GrpcPort, HttpPort, PlainProxy, RayAddress, run, set_environment

if TYPE_CHECKING:
    from deployment.cli.launcher import Launcher


def main(
    config: Annotated[str, typer.Argument(help="A Serve config file.")],
    iteration_ms: Annotated[float, typer.Option(min=0, help="How long an iteration takes.")] = 5.0,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    address: RayAddress = None,
    plain_proxy: PlainProxy = False,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain."""
    set_environment(plain_proxy)

    def prepare() -> Launcher:
        from deployment.app import application
        from deployment.bench.paced import paced_replica
        from deployment.cli.launcher import Launcher
        from deployment.serve_file import load_serve_file

        file = load_serve_file(config).with_overrides(http_port=http_port, grpc_port=grpc_port)
        replica_class = paced_replica(iteration_ms / 1000)
        return Launcher(file, address, False, lambda app: application(app, replica_class))

    run(prepare)


if __name__ == "__main__":
    typer.run(main)
