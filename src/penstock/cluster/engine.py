"""
The options of a pool on a cluster (usable without Ray), and the connection to Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import PenstockError
from penstock.pools.child import protocol
from penstock.pools.child.protocol import RemoteError, pack_error
from penstock.pools.options import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """
    The options of a pool on a Ray cluster.

    `address` is where the cluster is, if the program has not connected to one itself (`ray.init`): "auto" is
    the one of this machine, or the one that RAY_ADDRESS names; "local" starts one for this program. `cpus`,
    `gpus` and `resources` are what one worker takes. `runtime_env` is Ray's: how code and packages reach the
    other machines.

    `lease` is how long, in seconds, a worker goes on without a heartbeat from the pool before it ends itself,
    and therefore how long the pool waits before it gives the call of a worker on a lost machine to another. A
    function that keeps the interpreter's lock for longer than that loses its worker.

    For example:

        ray = penstock.Cluster(address="10.0.0.5:6379", cpus=2)
        with penstock.WorkerPool(64, kind="cluster", cluster=ray) as pool:
            results = list(pool.map(simulate, seeds))
    """

    address: str = "auto"
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = None
    lease: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise TypeError(f'address is {self.address!r}; it must be "auto", "local" or host:port')
        if self.address.startswith("ray://"):
            raise ValueError(
                f"address is {self.address!r}; Ray's client mode does not report a worker's death: give the "
                "address of a cluster that this machine is a part of (host:port)"
            )
        for name, amount in {"cpus": self.cpus, "gpus": self.gpus, **self.resources}.items():
            if not isinstance(amount, (int, float)) or isinstance(amount, bool) or amount < 0:
                raise ValueError(f"{name} is {amount!r}; it must be a number, 0 or more")
        seconds("lease", self.lease)
        if self.lease < 1:
            raise ValueError(f"lease is {self.lease!r}; it must be at least 1 second")


class NoCluster(PenstockError):
    """There is no cluster for the pool's workers. The message says what to do."""

    code = "no_cluster"


class ClusterUnreachable(PenstockError):
    """Ray or a worker does not answer."""

    code = "unreachable"


def connect(terms: Cluster) -> Any:
    """The module `ray`, connected by the program itself, else to `terms.address`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # the user has not agreed to send any
    try:
        import ray  # noqa: PLC0415  # it takes a second to import
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise ModuleNotFoundError(
            "workers on a cluster need Ray; pip install 'penstock[cluster]'", name="ray"
        ) from missing
    if not ray.is_initialized():
        try:
            ray.init(address=terms.address)
        except (ConnectionError, ValueError) as error:
            raise NoCluster(
                f"no cluster at address {terms.address!r} ({error}); start one (ray start --head), give its "
                'address (Cluster(address="host:port")), or call ray.init before you make the pool'
            ) from error
    return ray


def most_workers(ray: Any, terms: Cluster) -> int:
    """How many workers would fit into the empty cluster."""
    has = ray.cluster_resources()
    wants = {"CPU": terms.cpus, "GPU": terms.gpus, **terms.resources}
    return int(
        max(1, min((has.get(name, 0) // amount for name, amount in wants.items() if amount), default=1))
    )


def check_connected(ray: Any) -> None:
    """
    Raise without a connection. Call it before any request: Ray would otherwise start a cluster of its own.
    """
    if not ray.is_initialized():
        raise ClusterUnreachable("the program has disconnected from Ray")


def is_certain(ray: Any, error: BaseException, node: str | None) -> bool:
    """
    Whether the worker is certainly dead, and not only out of reach. A machine that the cluster has given up
    may still run. The cluster ends the actors of a program that has disconnected.
    """
    if not ray.is_initialized():
        return True
    if not isinstance(error, ray.exceptions.ActorDiedError):
        return False
    return node is None or any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def failed_by_ray(error: BaseException) -> tuple[int, bytes, float, int]:
    """The answer to an ended call whose result Ray could not transfer: only this call fails."""
    return (
        protocol.ERROR,
        pack_error(RemoteError(f"Ray could not transfer the result: {in_words(error)}")),
        0.0,
        0,
    )


def in_words(error: BaseException | None) -> str:
    """Ray's description of a death, without the names and numbers at its beginning."""
    words = " ".join(line for line in str(error or "it left").splitlines() if not line.startswith("\t"))
    start = max(words.find("The actor is dead"), words.find("The actor never ran"), 0)
    return words[start : start + 400].strip()
