"""Ray, where it is installed and there is a cluster to be had."""

from __future__ import annotations

import os
from typing import Any

from penstock.core.errors import PenstockError
from penstock.local import wire
from penstock.local.cluster.options import Cluster
from penstock.local.remote import RemoteError, pack_error


class NoCluster(PenstockError):
    """There is no cluster for the pool's workers. The text says what to do."""

    code = "no_cluster"


class ClusterUnreachable(PenstockError):
    """The engine does not answer, or the worker does not."""

    code = "unreachable"


def connect(terms: Cluster) -> Any:
    """The module `ray`, connected: as the program has done it itself, or else to `terms.address`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked whether to send any
    try:
        import ray  # noqa: PLC0415  # only for those who ask for it: it takes a second
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
                f"no cluster at address {terms.address!r} ({error}); start one (ray start --head), give its address "
                '(Cluster(address="host:port")), or call ray.init before you make the pool'
            ) from error
    return ray


def most_workers(ray: Any, terms: Cluster) -> int:
    """How many workers the cluster could hold now, were it empty."""
    has = ray.cluster_resources()
    wants = {"CPU": terms.cpus, "GPU": terms.gpus, **terms.resources}
    return int(
        max(1, min((has.get(name, 0) // amount for name, amount in wants.items() if amount), default=1))
    )


def check_connected(ray: Any) -> None:
    """Before whatever is asked of it: Ray would start a cluster of its own rather than say no."""
    if not ray.is_initialized():
        raise ClusterUnreachable("the program has disconnected from Ray")


def is_certain(ray: Any, error: BaseException, node: str | None) -> bool:
    """
    Whether the worker is dead, and not merely out of reach. A machine that the cluster has given up may still run; the
    actors of a program that has disconnected are ended by the cluster.
    """
    if not ray.is_initialized():
        return True
    if not isinstance(error, ray.exceptions.ActorDiedError):
        return False
    return node is None or any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def failed_by_ray(error: BaseException) -> tuple[int, bytes, float, int]:
    """The answer to a call that came to an end and whose result Ray could not bring: it fails alone."""
    return wire.ERROR, pack_error(RemoteError(f"Ray could not bring the result: {in_words(error)}")), 0.0, 0


def in_words(error: BaseException | None) -> str:
    """Ray's account of a death, without the names and numbers that come first."""
    words = " ".join(line for line in str(error or "it left").splitlines() if not line.startswith("\t"))
    start = max(words.find("The actor is dead"), words.find("The actor never ran"), 0)
    return words[start : start + 400].strip()
