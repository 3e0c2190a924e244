"""Bugs planted in the tracker and the runner."""

from __future__ import annotations

TRACKER = "tests/core/test_tracker.py"
PREEMPT = "tests/core/test_preempt.py"
RUNNING = "tests/runner/test_running.py"
ENDING = "tests/runner/test_ending.py"
CONTEXT = "tests/runner/test_context.py"
LOST = "tests/runner/test_lost.py"
AHEAD = "tests/runner/test_ahead.py"

MUTANTS = [
    (
        "tracker: the last reason wins",
        "penstock/core/tracker.py",
        "        flight.reason = flight.reason or reason\n",
        "        flight.reason = reason\n",
        (TRACKER,),
    ),
    (
        "tracker: what the run says beats why it was told to end",
        "penstock/core/tracker.py",
        "None if flight is None else flight.reason or how",
        "None if flight is None else how",
        (TRACKER,),
    ),
    (
        "tracker: a drain waits for who is slower already",
        "penstock/core/tracker.py",
        "{step: min(moment, plan[step]) for step, moment in before.items()}",
        "plan",
        (TRACKER,),
    ),
    (
        "preemption: a victim that frees too little",
        "penstock/core/preempt.py",
        "next((flight for flight in lower if want.fits_without([*ending, flight.demand])), None)",
        "next(iter(lower), None)",
        (PREEMPT,),
    ),
    (
        "preemption: while there is room",
        "penstock/core/preempt.py",
        "    if isinstance(decision(floor.books), Admitted):\n",
        "    if waiting is None:\n",
        (PREEMPT,),
    ),
    (
        "preemption: forced after the first deadline",
        "penstock/core/preempt.py",
        "    if cycle.asked == 1:\n",
        "    if cycle.asked == 0:\n",
        (PREEMPT,),
    ),
    (
        "runner: a warden does not inherit orphans",
        "penstock/runner/warden.py",
        "        become_subreaper()\n",
        "",
        (f"{ENDING}::test_a_warden_needs_no_help_to_end_its_tree",),
    ),
    (
        "runner: only the process group is killed",
        "penstock/runner/warden.py",
        "            send(process, signal.SIGKILL)\n        self._kill_at",
        "            pass\n        self._kill_at",
        (f"{ENDING}::test_after_a_cancel",),
    ),
    (
        "runner: a run is over when its first process is",
        "penstock/runner/warden.py",
        "        except ChildProcessError:\n            return True\n        return False\n\n    def _report",
        "        except ChildProcessError:\n            return True\n        return True\n\n    def _report",
        (f"{ENDING}::test_a_warden_needs_no_help_to_end_its_tree",),
    ),
    (
        "runner: a warden goes on when the scheduler is gone",
        "penstock/runner/warden.py",
        '            self._kill("the scheduler is gone")\n',
        "",
        (f"{ENDING}::test_when_the_scheduler_is_killed_either_the_launcher_or_the_warden_is_enough",),
    ),
    (
        "runner: a lease that is not renewed ends nothing",
        "penstock/runner/warden.py",
        '            self._kill("the lease was not renewed in time")\n',
        "            self._until = None\n",
        (f"{ENDING}::test_when_a_lease_cannot_be_renewed_the_warden_ends_the_tree_by_itself",),
    ),
    (
        "runner: what a killed warden leaves is not looked for",
        "penstock/runner/launcher.py",
        "        for stray in strays:\n",
        "        for stray in ():\n",
        (f"{ENDING}::test_when_one_of_our_processes_is_killed_nothing_is_left_and_the_job_lands",),
    ),
    (
        "runner: the root does not die with its warden",
        "penstock/runner/warden.py",
        "        die_with_the_parent(warden)\n",
        "",
        (f"{ENDING}::test_a_new_scheduler_first_ends_what_the_killed_one_left",),
    ),
    (
        "runner: a stopped warden is waited for",
        "penstock/runner/crew.py",
        "            run.warden.force()\n",
        "            pass\n",
        (f"{ENDING}::test_a_warden_that_is_stopped_does_not_save_its_tree",),
    ),
    (
        "runner: the whole environment is passed on",
        "penstock/runner/options.py",
        "for name, value in os.environ.items() if self._passes(name)}",
        "for name, value in os.environ.items()}",
        (f"{RUNNING}::test_a_job_sees_a_clean_world",),
    ),
    (
        "runner: a link is followed",
        "penstock/runner/output.py",
        "os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC",
        (f"{RUNNING}::test_a_link_in_place_of_an_output_folder_is_not_followed",),
    ),
    (
        "runner: any function may be run",
        "penstock/runner/payload.py",
        'if said not in self.names and path not in self.paths and f"{module}:*" not in self.paths:',
        "if not path:",
        (f"{RUNNING}::test_a_bad_payload_is_refused_with_its_field",),
    ),
    (
        "runner: what a function leaves running stays",
        "penstock/runner/warm.py",
        'if frame.get("left") or (not worker.calls and worker.left_behind()):',
        "if False:",
        (f"{RUNNING}::test_what_a_function_leaves_running_is_ended_with_its_worker",),
    ),
    (
        "runner: a token outlives its run",
        "penstock/runner/runner.py",
        "            self._tokens.pop(run.token, None)\n",
        "",
        (f"{CONTEXT}::test_a_token_is_good_for_its_run_and_no_longer",),
    ),
    (
        "runner: a phase that was asked to stop goes on",
        "penstock/runner/worker.py",
        "        if context.should_yield:\n            value.close()\n            raise JobYielded\n",
        "",
        (f"{CONTEXT}::test_a_generator_stops_between_phases_and_no_phase_is_done_twice",),
    ),
    (
        "runner: heartbeats stop",
        "penstock/runner/runner.py",
        "        standings = self._store.renew(beats) if beats else []\n",
        "        standings = []\n",
        (f"{ENDING}::test_a_job_that_takes_many_leases_and_hears_nobody_runs_once",),
    ),
    (
        "runner: a lost tree gives its units back",
        "penstock/runner/runner.py",
        "            self._lost[run] = hold_units(self._house, run)\n",
        "",
        (f"{LOST}::test_a_tree_that_survives_sigkill_keeps_its_units_until_it_is_gone",),
    ),
    (
        "runner: a shutdown waits for the store",
        "penstock/runner/runner.py",
        "not (self._runs or self._ended) or boot_time() >= last",
        "not (self._runs or self._ended)",
        (f"{LOST}::test_a_store_that_does_not_answer_does_not_hold_up_a_shutdown",),
    ),
    (
        "runner: an end that could not be written is forgotten",
        "penstock/runner/runner.py",
        "        desk, ended = self._house.desk, list(self._ended)\n",
        "        desk, ended = self._house.desk, list(self._ended)\n        self._ended.clear()\n",
        (f"{LOST}::test_an_end_that_cannot_be_written_is_written_later",),
    ),
    (
        "runner: a preempted worker of an add-on is not told",
        "penstock/engine/desk.py",
        "stop is None and dispatch_id in self._yields",
        "False",
        (
            "tests/client/test_worker.py::test_a_preempted_function_is_asked_to_yield_and_goes_on_from_its_checkpoint",
        ),
    ),
    (
        "runner: a dead warden is kept for the next command",
        "penstock/runner/crew.py",
        '            warden.watch_over("")\n',
        "",
        (f"{RUNNING}::test_a_warden_that_is_killed_while_it_waits_for_a_command_is_not_given_one",),
    ),
    (
        "runner: a job runs beside what is left of its last attempt",
        "penstock/runner/runner.py",
        "(*self._lost, *self._runs.values())",
        "()",
        (f"{LOST}::test_its_job_does_not_run_here_again_until_then",),
    ),
    (
        "runner: a worker does not look for its ticket",
        "penstock/runner/worker.py",
        '            if not self._tickets.take(frame["call"]):\n',
        "            if False:\n",
        (
            f"{AHEAD}::test_one_that_waits_in_a_workers_hands_is_canceled_at_once_and_the_one_before_it_goes_on",
        ),
    ),
    (
        "runner: a worker does not wait until its output is read",
        "penstock/runner/worker.py",
        "            while not self._page.all_read(self._pipes):\n",
        "            while False:\n",
        (f"{AHEAD}::test_what_each_printed_is_its_own",),
    ),
    (
        "runner: every call in a dead worker's hands has crashed",
        "penstock/runner/warm.py",
        "            self._return(worker)\n            self._watch.drop(worker)\n",
        "            self._watch.drop(worker)\n",
        (f"{AHEAD}::test_when_the_worker_dies_only_the_call_that_it_ran_has_crashed",),
    ),
    (
        "runner: calls wait behind a long one",
        "penstock/runner/warm.py",
        "            if now - worker.heard_at >= _STUCK_SEC:\n                self._return(worker)\n",
        "            pass\n",
        (f"{AHEAD}::test_who_waits_behind_a_call_that_takes_longer_than_expected_is_run_by_another_worker",),
    ),
    (
        "runner: calls are claimed ahead of a worker that is at something long",
        "penstock/runner/warm.py",
        "bool(w.calls) and w.heard_at < late",
        "False",
        (f"{AHEAD}::test_with_no_other_worker_they_go_back_to_the_queue_and_stay_there",),
    ),
    (
        "runner: a worker goes on beside what its function left",
        "penstock/runner/worker.py",
        "            if self._left_something():\n",
        "            if False:\n",
        (
            f"{AHEAD}::test_a_function_that_leaves_a_process_running_ends_with_its_worker_and_the_next_has_another",
        ),
    ),
]
