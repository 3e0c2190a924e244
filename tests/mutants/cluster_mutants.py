"""Bugs planted in the workers on a cluster. Their tests need Ray, and an environment that has it."""

from __future__ import annotations

NEEDS = "ray"

CREW = "penstock/local/cluster/crew.py"
POOL = "tests/cluster/test_cluster_pool.py"
CRASHES = "tests/cluster/test_cluster_crashes.py"


def planted(name, file, old, new, *tests):
    return f"cluster: {name}", file, old, new, tests


MUTANTS = [
    planted(
        "a worker gets several calls at once",
        "penstock/local/cluster/worker.py",
        "        return self.ready and not self.calls and self.condition is Condition.LIVE\n",
        "        return self.ready and self.condition is Condition.LIVE\n",
        f"{POOL}::test_what_waits_goes_to_whoever_is_free",
        f"{CRASHES}::test_a_killed_worker_fails_the_call_that_it_ran_and_no_other",
    ),
    planted(
        "a death is heard only by the next call",
        CREW,
        "            dead=lambda _, error: self._lost(worker, link, error) if error is not None else None,\n",
        "            dead=lambda _, error: None,\n",
        f"{CRASHES}::test_an_idle_worker_that_is_killed_is_noticed_at_once",
    ),
    planted(
        "a cancel is not told to the worker",
        CREW,
        "        self._courier.post(self._cancel, worker, worker.link, call.dispatch)\n",
        "",
        f"{POOL}::test_a_running_call_sees_its_cancel_and_keeps_its_worker",
    ),
    planted(
        "a cancelled call that no worker has is run all the same",
        CREW,
        "            self._inbox.remove(call)\n",
        "",
        f"{POOL}::test_a_call_cancelled_before_it_begins_never_runs",
    ),
    planted(
        "what no worker had yet is lost when they are stopped",
        CREW,
        "            self._requeue(inbox, [], clock())\n",
        "",
        f"{CRASHES}::test_stopped_workers_give_back_what_they_ran_and_go_on_when_started",
    ),
    planted(
        "a requeued call goes behind those that never began",
        CREW,
        "            insort(self._inbox, call, key=_in_order)\n",
        "            self._inbox.append(call)\n",
        f"{CRASHES}::test_a_requeued_call_comes_before_those_that_never_began",
    ),
    planted(
        "workers are left on the cluster",
        CREW,
        "        self._courier.post(self._see_out, worker, worker.link, worker.ready)\n",
        "        self._courier.post(self._bury, worker, worker.link)\n",
        f"{POOL}::test_closing_leaves_no_actor_and_no_process",
    ),
    planted(
        "a worker without a place on the cluster holds up the others",
        "penstock/local/cluster/worker.py",
        "        return self.ready and not self.calls and self.condition is Condition.LIVE\n",
        "        return not self.calls and self.condition is Condition.LIVE\n",
        f"{POOL}::test_more_workers_than_the_cluster_holds_hold_nobody_up",
    ),
    planted(
        "a worker outlives its lease",
        "penstock/local/cluster/actor.py",
        "        os.kill(os.getpid(), signal.SIGKILL)\n",
        "",
        f"{CRASHES}::test_a_worker_whose_pool_has_fallen_silent_ends_itself",
    ),
    planted(
        "nobody keeps a lease up",
        "penstock/local/cluster/actor.py",
        "        self._until = sent + self._lag + self._lease\n",
        "        self._until = min(self._until, sent + self._lag + self._lease)\n",
        f"{CRASHES}::test_beats_keep_a_worker_alive_past_its_lease",
    ),
    planted(
        "a worker that does not answer is waited for without end",
        "penstock/local/cluster/link.py",
        "            return clock() < self.lease_over()\n",
        "            return True\n",
        f"{CRASHES}::test_a_worker_that_hears_nothing_ends_itself_before_its_call_is_run_elsewhere",
    ),
    planted(
        "a lost machine's call is run again while its lease lasts",
        "penstock/local/cluster/engine.py",
        '    return node is None or any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())\n',
        "    return True\n",
        f"{CRASHES}::test_a_lost_machine_is_given_the_time_of_its_lease",
    ),
    planted(
        "a result that Ray cannot bring costs its worker",
        CREW,
        "        if isinstance(error, self._ray.exceptions.RayTaskError):\n",
        "        if False:\n",
        f"{POOL}::test_a_result_that_ray_cannot_bring_fails_its_call_and_leaves_the_worker",
    ),
    planted(
        "deadlines are taken for moments of another machine's clock",
        CREW,
        "call.deadline - clock()\n",
        "call.deadline\n",
        f"{POOL}::test_a_function_knows_its_call",
    ),
    planted(
        "arrays are what lies in the object store",
        "penstock/local/cluster/packing.py",
        "buffers=[bytearray(buffer) for buffer in buffers])\n",
        "buffers=buffers)\n",
        f"{POOL}::test_arrays_arrive_whole_and_may_be_written_to",
    ),
    planted(
        "what is in the script travels by name",
        "penstock/local/cluster/packing.py",
        "        data, buffers = wire.pack_arguments(fn, args, kwargs, portable=True)\n",
        "        data, buffers = wire.pack_arguments(fn, args, kwargs)\n",
        f"{CRASHES}::test_functions_of_a_script_travel_by_value",
    ),
    planted(
        "Ray is asked after the program has disconnected",
        "penstock/local/cluster/engine.py",
        '        raise Unreachable("the program has disconnected from Ray")\n',
        "        pass\n",
        f"{CRASHES}::test_a_program_that_disconnects_is_told_so",
    ),
]
