"""Bugs planted in the worker pools."""

from __future__ import annotations

CALLS = "tests/local/test_pool_calls.py"
ENDING = "tests/local/test_pool_ending.py"
CRASHES = "tests/local/test_pool_crashes.py"
BUFFERS = "tests/local/test_buffers.py"
EXECUTOR = "tests/local/test_executor.py"
HOOKS = "tests/local/test_hooks_and_numbers.py"

MUTANTS = [
    (
        "pool: a canceled key does not stick",
        "penstock/local/keys.py",
        "        self._canceled[key] = reason\n",
        "",
        (f"{ENDING}::test_a_cancelled_key_stays_cancelled_until_cleared",),
    ),
    (
        "pool: a cancel is not told to the worker",
        "penstock/local/crew.py",
        "        worker.ring_cancel()\n",
        "",
        (f"{ENDING}::test_a_running_call_sees_its_cancel_and_keeps_its_worker",),
    ),
    (
        "pool: a canceled call that has not begun costs its neighbour the worker",
        "penstock/local/mortal.py",
        "            if worker.running == dispatch:\n",
        "            if worker.running:\n",
        (f"{ENDING}::test_a_cancelled_call_that_has_not_begun_does_not_cost_its_neighbour_the_worker",),
    ),
    (
        "pool: only the worker is killed, not what its function started",
        "penstock/local/process.py",
        "                os.killpg(self.process.pid, signal.SIGKILL)\n",
        "                os.kill(self.process.pid, signal.SIGKILL)\n",
        (f"{ENDING}::test_ending_a_worker_ends_what_its_function_started",),
    ),
    (
        "pool: everything in the pipe of a dead worker is blamed",
        "penstock/local/mortal.py",
        "            begun = worker.calls.get(worker.running)\n",
        "            begun = next(reversed(worker.calls.values()), None)\n",
        (f"{CRASHES}::test_calls_that_the_dead_worker_had_not_begun_are_not_failed",),
    ),
    (
        "pool: crashes in a row are never forgiven",
        "penstock/local/crew.py",
        "                self.crashes = 0\n",
        "",
        (f"{CRASHES}::test_a_success_forgives_the_crashes_before_it",),
    ),
    (
        "pool: workers outlive a killed parent",
        "penstock/local/child.py",
        "    die_with_the_parent(lifeline_fd, parent)\n",
        "",
        (f"{CRASHES}::test_no_worker_outlives_a_parent_that_is_killed",),
    ),
    (
        "pool: a worker maps its arguments shared",
        "penstock/local/segments.py",
        "        flags = mmap.MAP_PRIVATE\n",
        "        flags = mmap.MAP_SHARED\n",
        (f"{BUFFERS}::test_what_a_function_did_to_its_array_does_not_reach_the_next_attempt",),
    ),
    (
        "pool: shared memory is given back while a view on it lives",
        "penstock/local/segments.py",
        "        weakref.finalize(shared, self.done.append, ref.segment).atexit = False\n",
        "        self.done.append(ref.segment)\n",
        (f"{BUFFERS}::test_an_array_that_a_function_keeps_stays_as_it_is",),
    ),
    (
        "pool: a done-callback may block the watch",
        "penstock/local/blocking.py",
        "    if own_threads.yes:\n        return False\n",
        "",
        (f"{CALLS}::test_submit_from_a_done_callback_never_blocks",),
    ),
    (
        "pool: submit blocks a running event loop",
        "penstock/local/blocking.py",
        "    return events is None or events._get_running_loop() is None\n",
        "    return True\n",
        (f"{CALLS}::test_submit_from_a_running_event_loop_never_blocks_it",),
    ),
    (
        "pool: an early grant is mistaken for a result to come",
        "penstock/local/watch.py",
        "            while call._state is PENDING and not (for_room and call.asleep is None):\n",
        "            while call._state is PENDING:\n",
        (f"{ENDING}::test_a_call_cancelled_in_the_queue_gives_its_place_to_the_next_waiter",),
    ),
    (
        "pool: nobody reads for a loop that is blocked",
        "penstock/local/watch.py",
        "        if self._loop is not None and clock() - self._loop_read_at < _STUCK:\n",
        "        if self._loop is not None:\n",
        (f"{EXECUTOR}::test_a_loop_that_blocks_does_not_stop_the_pool",),
    ),
    (
        "pool: nobody looks out for a call that turns out to be long",
        "penstock/local/thread.py",
        "            self._brief = 0\n            self._rouse()\n",
        "            self._brief = 0\n",
        (f"{CALLS}::test_a_long_call_after_many_brief_ones_holds_nobody_up",),
    ),
    (
        "pool: nobody settles what ended before a call that turns out to be long",
        "penstock/local/thread.py",
        "        self._settle(None)\n",
        "",
        (f"{CALLS}::test_a_call_that_ended_is_told_while_a_long_one_runs_behind_it",),
    ),
    (
        "pool: what did not fit into a pipe before its worker came is forgotten",
        "penstock/local/crew.py",
        "            else:\n                self._watch.wait_for_room(worker)\n",
        "",
        (f"{EXECUTOR}::test_what_is_too_much_for_a_pipe_reaches_the_worker_in_parts",),
    ),
    (
        "pool: a map that nobody reads is forgotten",
        "penstock/local/pool.py",
        "                unread.finish()\n",
        "                unread.close()\n",
        (f"{EXECUTOR}::test_a_map_that_nobody_reads_still_runs_to_its_end",),
    ),
    (
        "pool: a hook that raises is not caught",
        "penstock/local/hooks.py",
        '            except Exception:  # a hook is foreign code, and what it tells of has happened all the same\n                log.exception("the hook %r failed", hook)\n            finally:\n',
        "            finally:\n",
        (f"{HOOKS}::test_a_hook_that_raises_is_logged_and_nothing_else_breaks",),
    ),
    (
        "pool: a hook that raises ends the round of the others",
        "penstock/local/hooks.py",
        "        for hook in hooks:\n            try:\n                hook(what)\n",
        "        for hook in hooks:\n            hook(what)\n            try:\n                pass\n",
        (f"{HOOKS}::test_a_hook_that_raises_keeps_the_news_from_no_other",),
    ),
    (
        "pool: a hook that raises for one call of a run misses the rest",
        "penstock/local/hooks.py",
        "    for call in calls:\n        try:\n            hook(call)\n",
        "    for call in calls:\n        hook(call)\n        try:\n            pass\n",
        (f"{HOOKS}::test_a_hook_that_raises_for_one_call_of_a_run_hears_of_the_others",),
    ),
    (
        "pool: a run of calls enters past the bound",
        "penstock/core/queue.py",
        "        entered = int(min(self.room(), len(tickets)))\n",
        "        entered = len(tickets)\n",
        (f"{EXECUTOR}::test_what_a_run_of_calls_finds_no_room_for_is_left_outside",),
    ),
    (
        "pool: calls of a run are numbered alike",
        "penstock/core/queue.py",
        "        for ticket in islice(tickets, entered):\n            serial += 1\n",
        "        serial += entered\n        for ticket in islice(tickets, entered):\n",
        ("tests/core/test_queue_model.py",),
    ),
    (
        "pool: a map pulls more than its pool has room for",
        "penstock/local/mapping.py",
        "        room = int(min(self._pool._gate.queue.room(), width - len(self._calls)))\n",
        "        room = 1000\n",
        (f"{EXECUTOR}::test_map_pulls_its_items_as_results_are_taken",),
    ),
    (
        "pool: a map gathers items of a slow source",
        "penstock/local/mapping.py",
        "            if clock() - began > _GATHER:\n                break\n",
        "",
        (f"{EXECUTOR}::test_a_map_does_not_keep_a_result_back_for_a_slow_source",),
    ),
    (
        "pool: a map takes what has failed for a result",
        "penstock/local/mapping.py",
        " and calls[0]._exception is None):\n",
        "):\n",
        (f"{EXECUTOR}::test_a_map_with_much_room_raises_what_one_of_its_calls_raised",),
    ),
    (
        "pool: what is reserved counts as room",
        "penstock/core/queue.py",
        "startable - self.pending - self.reserved)\n",
        "startable - self.pending)\n",
        ("tests/core/test_queue_model.py",),
    ),
    (
        "pool: a future tells those again who saw that it is done",
        "penstock/local/call.py",
        "            self._state = state\n            crowd = self._crowd\n",
        "            self._state = state\n            crowd = self._crowd\n            if crowd is not None and crowd.condition is not None:\n                self._announce(crowd, crowd.condition, state)\n",
        (f"{EXECUTOR}::test_who_sees_that_a_future_is_done_is_not_told_again",),
    ),
    (
        "pool: who asks for a future's lock while it is settled is forgotten",
        "penstock/local/call.py",
        "        if self.body is _SETTLING:\n",
        "        if False:\n",
        (f"{EXECUTOR}::test_who_asks_for_the_lock_while_it_is_settled_gets_it_after",),
    ),
]
