"""What can be said of a cluster where there is none: options that are wrong, and what is missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import penstock
from penstock.cluster.engine import NoCluster


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'penstock\[cluster\]'"):
        penstock.WorkerPool(2, kind="cluster")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'penstock\[cluster\]'"):
        penstock.GraphExecutor(cluster=penstock.Cluster())


def test_without_a_cluster_the_error_says_how_to_have_one(monkeypatch):
    def nobody_answers(address):
        raise ConnectionError("no answer")

    nowhere = SimpleNamespace(is_initialized=lambda: False, init=nobody_answers)
    monkeypatch.setitem(sys.modules, "ray", nowhere)

    with pytest.raises(NoCluster, match=r"'10.0.0.9:6379' \(no answer\); start one \(ray start --head\)"):
        penstock.WorkerPool(2, kind="cluster", cluster=penstock.Cluster(address="10.0.0.9:6379"))


def test_a_pool_has_as_many_workers_as_the_scarcest_resource_allows(monkeypatch):
    from penstock.cluster.engine import most_workers

    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 10.0, "GPU": 3.0})

    assert 5 == most_workers(ray, penstock.Cluster(cpus=2))
    assert 3 == most_workers(ray, penstock.Cluster(cpus=2, gpus=1))
    assert 1 == most_workers(ray, penstock.Cluster(resources={"tpu": 1}))
    assert 1 == most_workers(ray, penstock.Cluster(cpus=0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": ""}, "address is ''"),
        ({"address": "ray://head:10001"}, "client mode does not report a worker's death"),
        ({"cpus": -1}, "cpus is -1"),
        ({"gpus": "two"}, "gpus is 'two'"),
        ({"resources": {"tpu": -2}}, "tpu is -2"),
        ({"lease": 0.5}, "lease is 0.5; it must be at least 1 second"),
        ({"lease": None}, "lease is None"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        penstock.Cluster(**options)


def test_terms_of_a_cluster_are_for_pools_on_one():
    with pytest.raises(TypeError, match='cluster= is for kind="cluster"'):
        penstock.WorkerPool(1, cluster=penstock.Cluster())
    with pytest.raises(
        ValueError, match="kind is 'clutser'; it must be one of 'process', 'thread', 'cluster'"
    ):
        penstock.WorkerPool(1, kind="clutser")
