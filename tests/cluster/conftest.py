"""
A real Ray cluster on this machine, one for all tests (it takes seconds to start), and nothing left on it after any of them.

Ray is not part of the environment of `make test`: `make test-cluster` has one of its own.
"""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import tempfile
import threading
from functools import partial
from importlib.util import find_spec

import pytest

import penstock
from tests.pools.conftest import children
from tests.pools.test_pool_calls import gate  # noqa: F401  # a fixture
from tests.waiting import until

NODE = {
    "num_cpus": 4,
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
    "node_ip_address": "127.0.0.1",
}


@pytest.fixture(scope="session")
def machines():
    """The cluster itself: machines can be added to it and taken away."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed here; `make test-cluster` has an environment with it")
    folder = tempfile.mkdtemp(
        prefix="ray-", dir="/tmp"
    )  # a short one: sockets lie in it; and not a user's own
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or Ray would write one into the home directory
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # elsewhere that means: loopback, and nothing else
        "RAY_raylet_start_wait_time_s": "60",
        # A lost machine is noticed within two seconds instead of half a minute.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "2",
    }  # before the import: some of it is read then
    import ray
    from ray.cluster_utils import Cluster

    before = set(children())
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    until(lambda: set(children()) <= before, 30)
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(machines):
    yield
    gc.collect()
    until(lambda: not actors())
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("penstock-pool")])


@pytest.fixture
def make_pool(machines):
    """A pool whose workers are on the cluster; restarts do not wait, because tests do."""
    return partial(
        penstock.WorkerPool, kind="cluster", cluster=penstock.Cluster(cpus=0.5), restart_delay=0.001
    )


def actors():
    """What the cluster itself says is alive."""
    from ray._private.state import actors as all_actors

    return [actor for actor in all_actors().values() if actor["State"] != "DEAD"]
