"""What a pool wants of a cluster. Made without Ray, so that options can be written down where it is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.local.options import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """
    `address` is where the cluster is, if the program has not connected to one itself (`ray.init`): "auto" is the one of
    this machine, or the one that RAY_ADDRESS names; "local" starts one for this program. `cpus`, `gpus` and `resources` are
    what one worker takes of it. `runtime_env` is Ray's: how code and packages reach the other machines.

    `lease` is how long, in seconds, a worker goes on without hearing from the pool before it ends itself, and therefore
    how long the pool waits before it gives the call of a worker on a lost machine to another. A function that keeps the
    interpreter's lock for longer than that costs its worker.
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
                f"address is {self.address!r}; Ray's client mode does not tell of a worker's death, so give the address "
                "of a cluster that this machine is a part of (host:port)"
            )
        for name, amount in {"cpus": self.cpus, "gpus": self.gpus, **self.resources}.items():
            if not isinstance(amount, (int, float)) or isinstance(amount, bool) or amount < 0:
                raise ValueError(f"{name} is {amount!r}; it must be a number, 0 or more")
        seconds("lease", self.lease)
        if self.lease < 1:
            raise ValueError(f"lease is {self.lease!r}; it must be at least 1 second")
