"""Bugs planted in the workers on a cluster. Their tests need Ray, and an environment that has it."""

from __future__ import annotations

from tests.mutants.planting import Mutant

NEEDS = "ray"

MUTANTS = [
    Mutant(
        "cluster: a worker gets several calls at once",
        "penstock/cluster/actor.py",
        "ClusterWorker.free",
        "        return self.ready and not self.calls and self.condition is Condition.LIVE\n",
        "        return self.ready and self.condition is Condition.LIVE\n",
        (
            "tests/cluster/test_cluster_pool.py::test_what_waits_goes_to_whoever_is_free",
            "tests/cluster/test_cluster_crashes.py::test_a_killed_worker_fails_the_call_that_it_ran_and_no_other",
        ),
    ),
    Mutant(
        "cluster: a death is heard only by the next call",
        "penstock/cluster/workers.py",
        "ClusterWorkers._open",
        "            dead=lambda _, error: self._on_error(worker, link, error) if error is not None else None,\n",
        "            dead=lambda _, error: None,\n",
        ("tests/cluster/test_cluster_crashes.py::test_an_idle_worker_that_is_killed_is_noticed_at_once",),
    ),
    Mutant(
        "cluster: a cancel is not told to the worker",
        "penstock/cluster/workers.py",
        "ClusterWorkers.stop_call",
        "        self._ray_thread.run(self._cancel, worker, worker.link, call.dispatch)\n",
        "",
        ("tests/cluster/test_cluster_pool.py::test_a_running_call_sees_its_cancel_and_keeps_its_worker",),
    ),
    Mutant(
        "cluster: a canceled call that no worker has is run all the same",
        "penstock/cluster/workers.py",
        "ClusterWorkers.stop_call",
        "            self._inbox.remove(call)\n",
        "",
        ("tests/cluster/test_cluster_pool.py::test_a_call_cancelled_before_it_begins_never_runs",),
    ),
    Mutant(
        "cluster: what no worker had yet is lost when they are stopped",
        "penstock/cluster/workers.py",
        "ClusterWorkers.stop",
        "            self._requeue(inbox, [], clock())\n",
        "",
        (
            "tests/cluster/test_cluster_crashes.py::test_stopped_workers_give_back_what_they_ran_and_go_on_when_started",
        ),
    ),
    Mutant(
        "cluster: a requeued call goes behind those that never began",
        "penstock/cluster/workers.py",
        "ClusterWorkers.dispatch_pending",
        "            insort(self._inbox, call, key=_in_order)\n",
        "            self._inbox.append(call)\n",
        ("tests/cluster/test_cluster_crashes.py::test_a_requeued_call_comes_before_those_that_never_began",),
    ),
    Mutant(
        "cluster: workers are left on the cluster",
        "penstock/cluster/workers.py",
        "ClusterWorkers._send_exit",
        "        self._ray_thread.run(self._retire_actor, worker, worker.link, worker.ready)\n",
        "        self._ray_thread.run(self._confirm_death, worker, worker.link)\n",
        ("tests/cluster/test_cluster_pool.py::test_closing_leaves_no_actor_and_no_process",),
    ),
    Mutant(
        "cluster: a worker without a place on the cluster holds up the others",
        "penstock/cluster/actor.py",
        "ClusterWorker.free",
        "        return self.ready and not self.calls and self.condition is Condition.LIVE\n",
        "        return not self.calls and self.condition is Condition.LIVE\n",
        ("tests/cluster/test_cluster_pool.py::test_more_workers_than_the_cluster_holds_hold_nobody_up",),
    ),
    Mutant(
        "cluster: a worker outlives its lease",
        "penstock/cluster/actor.py",
        "Actor._keep_lease",
        "        os.kill(os.getpid(), signal.SIGKILL)\n",
        "",
        ("tests/cluster/test_cluster_crashes.py::test_a_worker_whose_pool_has_fallen_silent_ends_itself",),
    ),
    Mutant(
        "cluster: nobody keeps a lease up",
        "penstock/cluster/actor.py",
        "Actor.heartbeat",
        "        self._until = sent + self._lag + self._lease\n",
        "        self._until = min(self._until, sent + self._lag + self._lease)\n",
        ("tests/cluster/test_cluster_crashes.py::test_beats_keep_a_worker_alive_past_its_lease",),
    ),
    Mutant(
        "cluster: a worker that does not answer is waited for without end",
        "penstock/cluster/actor.py",
        "ActorLink.heartbeat",
        "            return clock() < self.lease_over()\n",
        "            return True\n",
        (
            "tests/cluster/test_cluster_crashes.py::test_a_worker_that_hears_nothing_ends_itself_before_its_call_is_run_elsewhere",
        ),
    ),
    Mutant(
        "cluster: a lost machine's call is run again while its lease lasts",
        "penstock/cluster/engine.py",
        "is_certain",
        '    return node is None or any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())\n',
        "    return True\n",
        ("tests/cluster/test_cluster_crashes.py::test_a_lost_machine_is_given_the_time_of_its_lease",),
    ),
    Mutant(
        "cluster: a result that Ray cannot bring costs its worker",
        "penstock/cluster/workers.py",
        "ClusterWorkers._settled",
        "        if isinstance(error, self._ray.exceptions.RayTaskError):\n",
        "        if False:\n",
        (
            "tests/cluster/test_cluster_pool.py::test_a_result_that_ray_cannot_bring_fails_its_call_and_leaves_the_worker",
        ),
    ),
    Mutant(
        "cluster: deadlines are taken for moments of another machine's clock",
        "penstock/cluster/workers.py",
        "ClusterWorkers._send",
        "call.deadline - clock()\n",
        "call.deadline\n",
        ("tests/cluster/test_cluster_pool.py::test_a_function_knows_its_call",),
    ),
    Mutant(
        "cluster: arrays are what lies in the object store",
        "penstock/cluster/actor.py",
        "unpack",
        "buffers=[bytearray(buffer) for buffer in buffers])\n",
        "buffers=buffers)\n",
        ("tests/cluster/test_cluster_pool.py::test_arrays_arrive_whole_and_may_be_written_to",),
    ),
    Mutant(
        "cluster: what is in the script travels by name",
        "penstock/cluster/workers.py",
        "ClusterPacker._pack",
        "        data, buffers = protocol.pack_arguments(fn, args, kwargs, portable=True)\n",
        "        data, buffers = protocol.pack_arguments(fn, args, kwargs)\n",
        ("tests/cluster/test_cluster_crashes.py::test_functions_of_a_script_travel_by_value",),
    ),
    Mutant(
        "cluster: Ray is asked after the program has disconnected",
        "penstock/cluster/engine.py",
        "check_connected",
        '        raise ClusterUnreachable("the program has disconnected from Ray")\n',
        "        pass\n",
        ("tests/cluster/test_cluster_crashes.py::test_a_program_that_disconnects_is_told_so",),
    ),
]
