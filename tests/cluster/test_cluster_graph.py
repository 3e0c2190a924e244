"""Graphs with nodes on a cluster, beside nodes in threads and processes of this machine."""

from __future__ import annotations

import os
import signal

import calls

import penstock
from tests.cluster.conftest import actors
from tests.pools.conftest import children
from tests.pools.test_pool_ending import lines
from tests.waiting import until

TERMS = penstock.Cluster(cpus=0.5)


def test_a_graph_runs_its_nodes_where_they_say(machines):
    g = penstock.Graph("everywhere")
    g.add(calls.pid, name="here")
    g.add(calls.pid, name="beside", lane="process")
    g.add(calls.pid, name="there", lane="cluster")
    with penstock.GraphExecutor(compute=1, processes=1, cluster=TERMS) as executor:
        result = executor.run(g.compile(), timeout=60, trace=True)
        pids = {actor["Pid"] for actor in actors()}

        assert os.getpid() == result["here"]
        assert result["beside"] in children()
        assert result["there"] in pids
        assert {"compute", "process", "cluster"} == {event.lane for event in result.trace.events}


def test_a_killed_worker_has_its_node_run_again_and_no_other(machines, gate, tmp_path):
    log = tmp_path / "log"
    g = penstock.Graph("retried")
    for name in ("first", "second"):
        inputs = {
            "mark_path": penstock.Const(str(log)),
            "value": penstock.Const(name),
            "gate_path": penstock.Const(str(gate)),
        }
        g.add(calls.mark_and_wait, name=name, lane="cluster", inputs=inputs)
    options = {"crash_policy": "restart-requeue-in-flight", "restart_delay": 0.001}
    with penstock.WorkerPool(2, kind="cluster", cluster=TERMS, **options) as pool:
        with penstock.GraphExecutor(compute=1, cluster=pool) as executor:
            run = executor.submit(g.compile(), timeout=90)
            until(lambda: sorted(lines(log)) == ["first", "second"], 60)
            os.kill(pool.internals.group.workers[0].pid, signal.SIGKILL)
            until(lambda: len(lines(log)) == 3, 60)
            gate.touch()

            assert "ok" == run.result(60).status
        assert 1 == pool.snapshot().totals["requeued"]
        assert 1 == pool.submit(calls.echo, 1).result(
            60
        )  # the executor is closed; a pool that it was given is not


def test_a_map_goes_to_the_whole_cluster(machines):
    g = penstock.Graph("mapped")
    g.add(calls.add, name="more", over="many", each="a", lane="cluster", inputs={"b": penstock.Const(1)})
    g.add(make_numbers, name="many")
    with penstock.GraphExecutor(compute=1, cluster=TERMS) as executor:
        assert list(range(1, 21)) == executor.run(g.compile(), timeout=60)["more"]


def test_a_run_that_is_cancelled_ends_its_node_on_the_cluster(machines, tmp_path):
    log = tmp_path / "log"
    g = penstock.Graph("canceled")
    g.add(calls.until_cancelled, name="node", lane="cluster", inputs={"path": penstock.Const(str(log))})
    with penstock.GraphExecutor(compute=1, cluster=TERMS) as executor:
        run = executor.submit(g.compile())
        until(lambda: lines(log) == ["began"], 60)
        run.cancel()

        assert "canceled" == run.result(60).status
        until(lambda: lines(log) == ["began", "saw it"])


def test_a_node_on_the_cluster_knows_how_much_time_its_run_has(machines):
    g = penstock.Graph("timed")
    g.add(time_left, name="left", lane="cluster")
    with penstock.GraphExecutor(compute=1, cluster=TERMS) as executor:
        assert 30 < executor.run(g.compile(), timeout=60)["left"] <= 60


def test_a_function_can_be_scheduled_on_the_cluster(machines):
    with penstock.GraphExecutor(compute=1, cluster=TERMS) as executor:
        assert 3 == executor.schedule(calls.add, 1, 2, lane="cluster").result(60)


def make_numbers():
    return list(range(20))


def time_left():
    return penstock.current_run().remaining
