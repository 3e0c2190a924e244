"""
What explain answers in each of these situations, in words and as JSON: one row for each.

Names in braces stand for the jobs that a situation returns; `{job}` is the one that is explained.
"""

from __future__ import annotations

import json
import shlex
from typing import Any, NamedTuple

import click
import pytest
from tests.scheduler import situations as s
from tests.scheduler.conftest import on_postgres

from penstock.cli.main import cli
from penstock.core.jobs.explain import Explanation
from penstock.core.jobs.reason_base import SHORT
from penstock.core.jobs.reasons import REASONS
from penstock.core.jobs.states import SETTLED, JobState
from penstock.core.jobs.types import dispatch_id_of
from penstock.settings import describe, load


class Row(NamedTuple):
    """`json`: fields of the JSON; jobs by their names, reasons by their codes."""

    situation: Any
    words: str
    json: dict[str, Any]


TABLE = [
    Row(
        s.free,
        "Waiting for 0 s. Nothing is in its way: it starts with the next round.",
        {"reason": "", "gates": [], "short": "starts with the next round", "next_step": "the next round starts it", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.after_another_job,
        "Waiting for 0 s. It waits for job {parent} (QUEUED) to be DONE.",
        {"reason": "waits_for_parents", "gates": ["waits_for_parents"], "short": "waits for another job", "next_step": "the job that it waits for ends", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.after_a_job_that_failed,
        "Waiting for 0 s. It waits for job {parent} (FAILED) to be DONE, for job {other} (QUEUED) to be DONE, for job {third} (QUEUED) to be DONE and for 2 more jobs. `penstock retry {parent}` changes that.",
        {"reason": "waits_for_parents", "gates": ["waits_for_parents"], "short": "waits for 5 other jobs", "next_step": "the jobs that it waits for end", "way_out": "penstock retry {parent}"},
    ),
    Row(
        s.free_and_a_claim_waits,
        "Waiting for 0 s. It waits for a worker to claim it. A worker that may claim it last asked 12 s ago.",
        {"reason": "awaits_worker", "gates": ["awaits_worker"], "short": "waits for a worker to claim it", "next_step": "a worker claims it", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.stopping,
        "Waiting for 0 s. Host local starts no more jobs: its scheduler is stopping. `penstock up` changes that.",
        {"reason": "draining", "gates": ["draining"], "short": "the scheduler is stopping", "next_step": "a scheduler starts again", "way_out": "penstock up"},
    ),
    Row(
        s.drained,
        "Waiting for 0 s. Host local starts no more jobs: an operator drained it. `penstock undrain local` changes that.",
        {"reason": "draining", "gates": ["draining"], "short": "the host is drained", "next_step": "the drain ends", "way_out": "penstock undrain local"},
    ),
    Row(
        s.label_that_no_host_has,
        "Waiting for 0 s. No running host has the labels gpu and large. `penstock stop && penstock up --set host.labels=gpu,large` changes that.",
        {"reason": "label_missing", "gates": ["label_missing"], "short": "waits for a host with the labels gpu and large", "next_step": "a host with the labels gpu and large takes it", "way_out": "penstock stop && penstock up --set host.labels=gpu,large"},
    ),
    Row(
        s.label_of_another_host,
        "Waiting for 0 s. This host lacks the label gpu; render-1 has it. `penstock stop && penstock up --set host.labels=gpu` changes that.",
        {"reason": "label_missing", "gates": ["label_missing"], "short": "waits for a host with the label gpu", "next_step": "a host with the label gpu takes it", "way_out": "penstock stop && penstock up --set host.labels=gpu"},
    ),
    Row(
        s.busy_and_wants_normal,
        "Waiting for 0 s. The machine is busy (busy score 6.2 of 10, from cpu). This job starts when the load drops to NORMAL. `penstock edit {job} --when any` changes that.",
        {"reason": "not_quiet", "gates": ["not_quiet"], "short": "the machine is busy; waits for NORMAL", "next_step": "the load of the machine drops to NORMAL", "way_out": "penstock edit {job} --when any"},
    ),
    Row(
        s.large_and_panic,
        "Waiting for 0 s. The machine is overloaded (busy score 9.6 of 10, from memory). This job starts when the load drops to BUSY. Besides: It needs 70 units; 0 may be used now, because the machine is busy. `penstock stop && penstock up --set capacity.units=70` changes that.",
        {"reason": "not_quiet", "gates": ["not_quiet", "no_room"], "short": "the machine is overloaded; waits for BUSY", "next_step": "the load of the machine drops to BUSY", "way_out": "penstock stop && penstock up --set capacity.units=70"},
    ),
    Row(
        s.above_all_units_of_the_host,
        "Waiting for 0 s. It needs 80 units; this host gives 40 at most, by its settings. `penstock stop && penstock up --set capacity.units=80` changes that.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 80 units; the host gives 40 at most", "next_step": "a host with more units takes it", "way_out": "penstock stop && penstock up --set capacity.units=80"},
    ),
    Row(
        s.one_unit,
        "Waiting for 0 s. It needs 1 unit; 0 of 90 are free. Job {other} uses the rest.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 1 unit; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"]},
    ),
    Row(
        s.yielded_after_a_minute,
        "Waiting for 5 s. Its last attempt yielded to another job. It needs 50 units; 30 of 90 are free. Job {other} uses the rest.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 50 units; 30 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"]},
    ),
    Row(
        s.paused_while_another_job_has_all_units,
        "Waiting for 10 s. Everything is paused; `penstock resume` ends that. Besides: It needs 10 units; 0 of 90 are free.",
        {"reason": "paused", "gates": ["paused", "no_room"], "short": "everything is paused", "next_step": "the pause ends", "way_out": "penstock resume", "waited": [["turn", 10.0]]},
    ),
    Row(
        s.drained_while_another_job_has_all_units,
        "Waiting for 10 s. Host local starts no more jobs: an operator drained it. Besides: It needs 10 units; 0 of 90 are free. `penstock undrain local` changes that.",
        {"reason": "draining", "gates": ["draining", "no_room"], "short": "the host is drained", "next_step": "the drain ends", "way_out": "penstock undrain local"},
    ),
    Row(
        s.normal_and_wants_quiet,
        "Waiting for 0 s. The machine is in normal use (busy score 4.5 of 10, from cpu). This job starts when the load drops to QUIET. `penstock edit {job} --when normal` changes that.",
        {"reason": "not_quiet", "gates": ["not_quiet"], "short": "the machine is in normal use; waits for QUIET", "next_step": "the load of the machine drops to QUIET", "way_out": "penstock edit {job} --when normal"},
    ),
    Row(
        s.panic,
        "Waiting for 0 s. The machine is overloaded (busy score 9.6 of 10, from memory). This job starts when the load drops to BUSY. Besides: It needs 10 units; 0 may be used now, because the machine is busy. `penstock stop && penstock up --set capacity.units=50` changes that.",
        {"reason": "not_quiet", "gates": ["not_quiet", "no_room"], "short": "the machine is overloaded; waits for BUSY", "next_step": "the load of the machine drops to BUSY", "way_out": "penstock stop && penstock up --set capacity.units=50"},
    ),
    Row(
        s.no_signal,
        "Waiting for 0 s. The load of the machine is unknown (no fresh cpu reading), which counts as overloaded. This job starts when the load is known to be BUSY at most. Besides: It needs 10 units; 0 may be used now, because the machine is busy. `penstock stop && penstock up --set capacity.units=50` changes that.",
        {"reason": "not_quiet", "gates": ["not_quiet", "no_room"], "short": "the load of the machine is unknown (no fresh cpu reading)", "next_step": "the load of the machine drops to BUSY", "way_out": "penstock stop && penstock up --set capacity.units=50"},
    ),
    Row(
        s.signal_of_an_application,
        "Waiting for 0 s. The machine is busy (busy score 6.3 of 10, from p95_ms of shop). This job starts when the load drops to NORMAL. `penstock edit {job} --when any` changes that.",
        {"reason": "not_quiet", "gates": ["not_quiet"], "short": "the machine is busy; waits for NORMAL", "next_step": "the load of the machine drops to NORMAL", "way_out": "penstock edit {job} --when any"},
    ),
    Row(
        s.quiet_too_short,
        "Waiting for 0 s. The machine has been quiet for 10 s; this job waits for 600 s of quiet. Likely start in about 10 min. `penstock edit {job} --quiet-for 0s` changes that.",
        {"reason": "not_quiet_long_enough", "gates": ["not_quiet_long_enough"], "short": "waits for 600 s of quiet, 10 s so far", "next_step": "the machine has been quiet for 600 s", "way_out": "penstock edit {job} --quiet-for 0s"},
    ),
    Row(
        s.above_the_present_capacity,
        "Waiting for 0 s. It needs 80 units; 45 may be used now, because the machine is busy. `penstock stop && penstock up --set capacity.units=80` changes that.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 80 units; 45 may be used now", "next_step": "the load of the machine falls, so that jobs get more units", "way_out": "penstock stop && penstock up --set capacity.units=80"},
    ),
    Row(
        s.everything_paused,
        "Waiting for 0 s. Everything is paused; `penstock resume` ends that.",
        {"reason": "paused", "gates": ["paused"], "short": "everything is paused", "next_step": "the pause ends", "way_out": "penstock resume"},
    ),
    Row(
        s.addon_paused,
        "Waiting for 0 s. Addon a is paused; `penstock resume a` ends that.",
        {"reason": "paused", "gates": ["paused"], "short": "addon a is paused", "next_step": "the pause ends", "way_out": "penstock resume a"},
    ),
    Row(
        s.paused_twice_and_more,
        "Waiting for 0 s. Everything is paused; `penstock resume` ends that. Besides: Addon a is paused; `penstock resume a` ends that. Besides: Addon a has 1 in flight, its limit. Besides: It needs 10 units; 0 of 90 are free.",
        {"reason": "paused", "gates": ["paused", "paused", "cap_reached", "no_room"], "short": "everything is paused", "next_step": "the pause ends", "way_out": "penstock resume"},
    ),
    Row(
        s.earliest_start,
        "It starts in 90 s at the earliest. `penstock edit {job} --not-before-none` changes that.",
        {"reason": "not_ready", "gates": ["not_ready"], "short": "starts in 90 s at the earliest", "next_step": "its time comes", "way_out": "penstock edit {job} --not-before-none"},
    ),
    Row(
        s.earliest_start_and_paused,
        "Addon a is paused; `penstock resume a` ends that. Besides: It starts in about 15 min at the earliest.",
        {"reason": "paused", "gates": ["paused", "not_ready"], "short": "addon a is paused", "next_step": "the pause ends", "way_out": "penstock resume a"},
    ),
    Row(
        s.all_slots,
        "Waiting for 0 s. The only slot is taken. Job {other} counts for it. `penstock stop && penstock up --set caps.concurrent=2` changes that.",
        {"reason": "cap_reached", "gates": ["cap_reached"], "short": "the only slot is taken", "next_step": "a job that counts for this cap ends", "way_out": "penstock stop && penstock up --set caps.concurrent=2", "held_by": ["other"]},
    ),
    Row(
        s.cap_of_an_addon,
        "Waiting for 0 s. Addon a has 2 in flight, its limit. Job {second} and job {first} count for it. `penstock stop && penstock up --set addons.a.concurrent=3` changes that.",
        {"reason": "cap_reached", "gates": ["cap_reached"], "short": "addon a is at its limit of 2", "next_step": "a job that counts for this cap ends", "way_out": "penstock stop && penstock up --set addons.a.concurrent=3", "held_by": ["second", "first"]},
    ),
    Row(
        s.cap_of_a_type,
        "Waiting for 0 s. Type a/t has 1 in flight, its limit. Job {other} counts for it. `penstock stop && penstock up --set caps.types.a/t=2` changes that.",
        {"reason": "cap_reached", "gates": ["cap_reached"], "short": "type a/t is at its limit of 1", "next_step": "a job that counts for this cap ends", "way_out": "penstock stop && penstock up --set caps.types.a/t=2", "held_by": ["other"]},
    ),
    Row(
        s.cap_of_a_constraint,
        "Waiting for 0 s. Constraint disk_write_heavy has 1 in flight, its limit. Job {other} counts for it. `penstock stop && penstock up --set caps.constraints.disk_write_heavy=2` changes that.",
        {"reason": "cap_reached", "gates": ["cap_reached"], "short": "constraint disk_write_heavy is at its limit of 1", "next_step": "a job that counts for this cap ends", "way_out": "penstock stop && penstock up --set caps.constraints.disk_write_heavy=2", "held_by": ["other"]},
    ),
    Row(
        s.cap_with_many_holders,
        "Waiting for 0 s. Addon a has 4 in flight, its limit. Job {n3}, job {n2} and 2 more jobs count for it. `penstock stop && penstock up --set addons.a.concurrent=5` changes that.",
        {"reason": "cap_reached", "gates": ["cap_reached"], "short": "addon a is at its limit of 4", "next_step": "a job that counts for this cap ends", "way_out": "penstock stop && penstock up --set addons.a.concurrent=5", "held_by": ["n3", "n2", "n1", "n0"]},
    ),
    Row(
        s.cap_of_zero,
        "Waiting for 0 s. Type a/t may have no job in flight: its limit is 0. `penstock stop && penstock up --set caps.types.a/t=1` changes that.",
        {"reason": "cap_reached", "gates": ["cap_reached"], "short": "type a/t is at its limit of 0", "next_step": "the limit is raised", "way_out": "penstock stop && penstock up --set caps.types.a/t=1"},
    ),
    Row(
        s.cap_and_units,
        "Waiting for 0 s. Type a/t has 1 in flight, its limit. Job {other} counts for it. Besides: It needs 10 units; 5 of 90 are free. `penstock stop && penstock up --set caps.types.a/t=2` changes that.",
        {"reason": "cap_reached", "gates": ["cap_reached", "no_room"], "short": "type a/t is at its limit of 1", "next_step": "a job that counts for this cap ends", "way_out": "penstock stop && penstock up --set caps.types.a/t=2", "held_by": ["other"]},
    ),
    Row(
        s.budget_of_the_day,
        "Waiting for 0 s. The budget of addon a of this day is spent (1.50 of 1.50). The next day begins in about 6 h. Likely start in about 6 h. `penstock stop && penstock up --set addons.a.budget_day=3` changes that.",
        {"reason": "budget_spent", "gates": ["budget_spent"], "short": "this day's budget is spent (1.50 of 1.50)", "next_step": "the next day begins", "way_out": "penstock stop && penstock up --set addons.a.budget_day=3"},
    ),
    Row(
        s.budget_of_the_month,
        "Waiting for 0 s. The budget of addon a of this month is spent (1.50 of 1.00). The next month begins in about 14 days. Likely start in about 14 days. `penstock stop && penstock up --set addons.a.budget_month=2` changes that.",
        {"reason": "budget_spent", "gates": ["budget_spent"], "short": "this month's budget is spent (1.50 of 1.00)", "next_step": "the next month begins", "way_out": "penstock stop && penstock up --set addons.a.budget_month=2"},
    ),
    Row(
        s.budget_and_pause,
        "Waiting for 0 s. Addon a is paused; `penstock resume a` ends that. Besides: The budget of addon a of this day is spent (1.50 of 1.50). The next day begins in about 6 h.",
        {"reason": "paused", "gates": ["paused", "budget_spent"], "short": "addon a is paused", "next_step": "the pause ends", "way_out": "penstock resume a"},
    ),
    Row(
        s.no_units,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free. Job {other} uses the rest.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"]},
    ),
    Row(
        s.units_expected,
        "Waiting for 41 s. It needs 8 units; 5 of 90 are free, and enough are expected in 19 s. Job {large} uses the rest. Likely start in 19 s, when job {large} ends.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 8 units; 5 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {large}", "held_by": ["large"], "waited": [["no_room", 41.0]]},
    ),
    Row(
        s.units_of_several,
        "Waiting for 0 s. It needs 20 units; 3 of 90 are free. Job {n0}, job {n1} and 1 more job use the rest.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 20 units; 3 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {n0}", "held_by": ["n0", "n1", "n2"]},
    ),
    Row(
        s.units_kept,
        "Waiting for 0 s. 90 units are kept for job {large}. `penstock edit {job} --priority urgent` changes that.",
        {"reason": "room_kept", "gates": ["room_kept"], "short": "90 units are kept for another job", "next_step": "the job that units are kept for starts", "way_out": "penstock edit {job} --priority urgent", "ahead": [["large", "band"]]},
    ),
    Row(
        s.queued_ahead,
        "Waiting for 0 s. Job {first} of priority 90 goes first and needs the same units. `penstock edit {job} --priority urgent` changes that.",
        {"reason": "queued_ahead", "gates": ["queued_ahead"], "short": "a job of priority 90 goes first", "next_step": "the jobs that go first have started", "way_out": "penstock edit {job} --priority urgent", "ahead": [["first", "band"]]},
    ),
    Row(
        s.line_ahead,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free. Job {other} uses the rest. 3 jobs of the same kind are before it. `penstock edit {job} --priority urgent` changes that.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock edit {job} --priority urgent", "held_by": ["other"], "line_ahead": 3},
    ),
    Row(
        s.one_in_line_ahead,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free. Job {other} uses the rest. 1 job of the same kind is before it. `penstock edit {job} --priority urgent` changes that.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock edit {job} --priority urgent", "held_by": ["other"], "line_ahead": 1},
    ),
    Row(
        s.ahead_by_band_and_share,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free. Job {other} uses the rest. Job {band} of b goes first (higher priority); then 1 more. `penstock edit {job} --priority urgent` changes that.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock edit {job} --priority urgent", "held_by": ["other"], "ahead": [["band", "band"], ["share", "share"]]},
    ),
    Row(
        s.ahead_is_paused,
        "Waiting for 0 s. It needs 60 units; 30 of 90 are free. Job {other} uses the rest.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 60 units; 30 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"]},
    ),
    Row(
        s.ahead_needs_a_label,
        "Waiting for 0 s. It needs 60 units; 30 of 90 are free. Job {other} uses the rest.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 60 units; 30 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"]},
    ),
    Row(
        s.ahead_is_not_ready,
        "Waiting for 0 s. It needs 60 units; 30 of 90 are free. Job {other} uses the rest.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 60 units; 30 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"]},
    ),
    Row(
        s.no_worker_ever,
        "Waiting for 0 s. No worker for type 'thumnail' has been seen since the scheduler started 0 s ago; known types: resize, thumbnail. Did you mean thumbnail?",
        {"reason": "no_worker", "gates": ["no_worker"], "short": "no worker for type thumnail seen; did you mean thumbnail?", "next_step": "a worker asks for jobs of type thumnail", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.no_worker_at_all,
        "Waiting for 0 s. No worker for type 't' has been seen since the scheduler started 0 s ago; known types: none.",
        {"reason": "no_worker", "gates": ["no_worker"], "short": "no worker for type t has been seen", "next_step": "a worker asks for jobs of type t", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.no_worker_long_after_the_start,
        "Waiting for 0 s. No worker for type 't' has been seen; known types: none.",
        {"reason": "no_worker", "gates": ["no_worker"], "short": "no worker for type t has been seen", "next_step": "a worker asks for jobs of type t", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.no_worker_and_paused,
        "Waiting for 0 s. Addon a is paused; `penstock resume a` ends that. Besides: No worker for type 't' has been seen since the scheduler started 0 s ago; known types: none.",
        {"reason": "paused", "gates": ["paused", "no_worker"], "short": "addon a is paused", "next_step": "the pause ends", "way_out": "penstock resume a"},
    ),
    Row(
        s.no_worker_and_too_few_units,
        "Waiting for 0 s. It needs 60 units; 30 of 90 are free. Job {other} uses the rest. Besides: No worker for type 'index' has been seen since the scheduler started 0 s ago; known types: t. 1 job of the same kind is before it.",
        {"reason": "no_room", "gates": ["no_room", "no_worker"], "short": "needs 60 units; 30 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {job}", "held_by": ["other"]},
    ),
    Row(
        s.no_worker_and_reserved,
        "10 units are reserved; its worker has 12 s to ask for the lease. No worker for type 't' has been seen since the scheduler started 18 s ago; known types: none.",
        {"reason": "no_worker", "gates": [], "short": "reserved; waits for its worker", "next_step": "its worker asks for the lease", "way_out": "penstock cancel {job}", "waited": [["reserved", 18.0]]},
    ),
    Row(
        s.no_worker_after_a_start_timeout,
        "No worker took it up, once. Next reservation in 30 s. Besides: No worker for type 't' has been seen since the scheduler started 30 s ago; known types: none.",
        {"reason": "not_ready", "gates": ["not_ready", "no_worker"], "short": "no worker took it up; next in 30 s", "next_step": "its time comes", "way_out": "penstock cancel {job}", "last_failure": [1, None, ""], "waited": [["reserved", 30.0]]},
    ),
    Row(
        s.no_worker_after_three_start_timeouts,
        "Waiting for 0 s. No worker took it up, 3 times. No worker for type 't' has been seen since the scheduler started 5 min ago; known types: none.",
        {"reason": "no_worker", "gates": ["no_worker"], "short": "no worker for type t has been seen", "next_step": "a worker asks for jobs of type t", "way_out": "penstock cancel {job}", "last_failure": [3, None, ""], "waited": [["start_delay", 210.0], ["reserved", 90.0]]},
    ),
    Row(
        s.worker_gone,
        "Waiting for 0 s. Its worker has gone: the last request for such jobs was 5 min ago.",
        {"reason": "worker_gone", "gates": ["worker_gone"], "short": "its worker was last seen 5 min ago", "next_step": "a worker for it comes back", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.worker_gone_after_a_run,
        "Waiting for 55 s. Attempt 1 of 2 failed (it broke). Its worker has gone: the last request for such jobs was 60 s ago.",
        {"reason": "worker_gone", "gates": ["worker_gone"], "short": "its worker was last seen 60 s ago", "next_step": "a worker for it comes back", "way_out": "penstock cancel {job}", "last_failure": [1, 2, "it broke"], "waited": [["turn", 55.0], ["retry_delay", 5.0]]},
    ),
    Row(
        s.worker_of_a_scheduler_before,
        "Waiting for 0 s. Such jobs ran before, and no worker has asked for them since the scheduler started.",
        {"reason": "worker_gone", "gates": ["worker_gone"], "short": "its worker has not come since the scheduler started", "next_step": "a worker for it comes back", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.type_that_ran_under_a_scheduler_before,
        "Waiting for 0 s. No worker for type 'tt' has been seen since the scheduler started 0 s ago; known types: t. Did you mean t?",
        {"reason": "no_worker", "gates": ["no_worker"], "short": "no worker for type tt seen; did you mean t?", "next_step": "a worker asks for jobs of type tt", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.ahead_has_no_worker_after_three_timeouts,
        "Waiting for 0 s. It needs 60 units; 30 of 90 are free. Job {other} uses the rest.",
        {"reason": "no_room", "gates": ["no_room"], "ahead": [], "short": "needs 60 units; 30 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"]},
    ),
    Row(
        s.worker_came_a_moment_ago,
        "Waiting for 1 s. Attempt 1 of 2 failed (it broke). Nothing is in its way: it starts with the next round.",
        {"reason": "", "gates": [], "short": "starts with the next round", "next_step": "the next round starts it", "way_out": "penstock cancel {job}", "last_failure": [1, 2, "it broke"], "waited": [["retry_delay", 5.0], ["turn", 1.0]]},
    ),
    Row(
        s.worker_full,
        "Waiting for 0 s. All 2 threads of worker w1 are taken. Job {first} and job {second} run there.",
        {"reason": "workers_full", "gates": ["workers_full"], "short": "its workers have no free thread", "next_step": "a job of its worker ends", "way_out": "penstock cancel {job}", "held_by": ["first", "second"]},
    ),
    Row(
        s.worker_with_one_thread_full,
        "Waiting for 0 s. The only thread of worker w1 is taken. Job {first} runs there.",
        {"reason": "workers_full", "gates": ["workers_full"], "short": "its workers have no free thread", "next_step": "a job of its worker ends", "way_out": "penstock cancel {job}", "held_by": ["first"]},
    ),
    Row(
        s.two_workers_full,
        "Waiting for 0 s. All 2 threads of worker w1 are taken, and so are those of 1 more. Job {first}, job {second} and 1 more job run there.",
        {"reason": "workers_full", "gates": ["workers_full"], "short": "its workers have no free thread", "next_step": "a job of its worker ends", "way_out": "penstock cancel {job}", "held_by": ["first", "second", "?"]},
    ),
    Row(
        s.runner_full,
        "Waiting for 0 s. The only slot of the runner is taken. Job {first} runs there. `penstock stop && penstock up --set runner.slots=2` changes that.",
        {"reason": "workers_full", "gates": ["workers_full"], "short": "all slots of the runner are taken", "next_step": "a job of its worker ends", "way_out": "penstock stop && penstock up --set runner.slots=2", "held_by": ["first"]},
    ),
    Row(
        s.runner_full_of_functions,
        "Waiting for 0 s. All 2 slots of the runner for functions are taken. Job {first} and job {second} run there. `penstock stop && penstock up --set runner.workers=3` changes that.",
        {"reason": "workers_full", "gates": ["workers_full"], "short": "all slots of the runner for functions are taken", "next_step": "a job of its worker ends", "way_out": "penstock stop && penstock up --set runner.workers=3", "held_by": ["first", "second"]},
    ),
    Row(
        s.runner_disabled,
        "Waiting for 0 s. The runner of host local is disabled (`runner.enabled = false`): it runs no commands and functions. `penstock stop && penstock up --set runner.enabled=true` changes that.",
        {"reason": "runner_disabled", "gates": ["runner_disabled"], "short": "the runner is disabled", "next_step": "a runner or a worker that claims commands starts", "way_out": "penstock stop && penstock up --set runner.enabled=true"},
    ),
    Row(
        s.runner_disabled_and_reserved,
        "10 units are reserved; its worker has 30 s to ask for the lease. The runner of host local is disabled (`runner.enabled = false`): it runs no commands and functions. `penstock stop && penstock up --set runner.enabled=true` changes that.",
        {"reason": "runner_disabled", "gates": [], "short": "reserved; waits for its worker", "next_step": "its worker asks for the lease", "way_out": "penstock stop && penstock up --set runner.enabled=true"},
    ),
    Row(
        s.retry_of_an_error,
        "Attempt 1 of 4 failed (exit code 7). Next attempt in about 10 min.",
        {"reason": "not_ready", "gates": ["not_ready"], "short": "attempt 1 of 4 failed; next in about 10 min", "next_step": "its time comes", "way_out": "penstock cancel {job}", "last_failure": [1, 4, "exit code 7"]},
    ),
    Row(
        s.retry_of_a_crash,
        "Attempt 1 of 6 failed (worker crashed). Next attempt in 60 s.",
        {"reason": "not_ready", "gates": ["not_ready"], "short": "attempt 1 of 6 failed; next in 60 s", "next_step": "its time comes", "way_out": "penstock cancel {job}", "last_failure": [1, 6, ""]},
    ),
    Row(
        s.retry_after_the_scheduler_was_killed,
        "Attempt 1 of 6 was cut off: the scheduler was killed or stopped unexpectedly. Next attempt in 60 s.",
        {"reason": "not_ready", "gates": ["not_ready"], "short": "scheduler killed in attempt 1 of 6; next in 60 s", "next_step": "its time comes", "way_out": "penstock cancel {job}", "last_failure": [1, 6, ""]},
    ),
    Row(
        s.retry_while_unavailable,
        "Attempt 1 of 6 failed (disk is away). Next attempt in about 2 min.",
        {"reason": "not_ready", "gates": ["not_ready"], "short": "attempt 1 of 6 failed; next in about 2 min", "next_step": "its time comes", "way_out": "penstock cancel {job}", "last_failure": [1, 6, "disk is away"]},
    ),
    Row(
        s.retry_is_due_but_there_are_no_units,
        "Waiting for 1 s. Attempt 1 of 2 failed (exit code 7). It needs 50 units; 30 of 90 are free. Job {other} uses the rest.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 50 units; 30 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"], "last_failure": [1, 2, "exit code 7"], "waited": [["retry_delay", 5.0], ["turn", 1.0]]},
    ),
    Row(
        s.retry_and_paused,
        "Attempt 1 of 2 failed (exit code 7). Addon a is paused; `penstock resume a` ends that. Besides: It starts in about 10 min at the earliest.",
        {"reason": "paused", "gates": ["paused", "not_ready"], "short": "addon a is paused", "next_step": "the pause ends", "way_out": "penstock resume a", "last_failure": [1, 2, "exit code 7"]},
    ),
    Row(
        s.yielded_and_waits,
        "Waiting for 0 s. Its last attempt yielded to another job. It needs 50 units; 30 of 90 are free. Job {other} uses the rest.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 50 units; 30 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"]},
    ),
    Row(
        s.asked_to_yield,
        "Running for 0 s on worker w1. It was asked to yield to job {high} (request 1 of 2), and is stopped in about 2 min at the latest. It has no checkpoint: what this attempt has done is lost, and it will start over. `--no-preempt` at submit prevents that.",
        {"reason": "asked_to_yield", "gates": [], "short": "asked to yield to another job", "next_step": "it yields", "way_out": "penstock cancel {high}", "preemption": [1, False]},
    ),
    Row(
        s.asked_to_yield_with_a_checkpoint,
        "Running for 0 s on worker w1. It was asked to yield to job {high} (request 1 of 2), and is stopped in about 2 min at the latest. It will go on from its last checkpoint. `--no-preempt` at submit prevents that.",
        {"reason": "asked_to_yield", "gates": [], "short": "asked to yield to another job", "next_step": "it yields", "way_out": "penstock cancel {high}", "preemption": [1, True]},
    ),
    Row(
        s.waits_for_a_victim,
        "Waiting for 12 s. It needs 10 units; 0 of 90 are free. Job {low} uses the rest. Job {low} was asked to yield (request 1 of 2), and is stopped in 108 s at the latest; it then starts over: it has no checkpoint.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {low}", "held_by": ["low"], "waited": [["no_room", 12.0]], "preemption": [1, False]},
    ),
    Row(
        s.waits_for_a_victim_that_was_asked_again,
        "Waiting for 60 s. It needs 10 units; 0 of 90 are free. Job {low} uses the rest. Job {low} was asked to yield (request 2 of 2), and is stopped in 60 s at the latest; it then goes on from its checkpoint.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {low}", "held_by": ["low"], "waited": [["no_room", 60.0]], "preemption": [2, True]},
    ),
    Row(
        s.not_preemptible,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free. Job {low} uses the rest. Job {low} is not preemptible, so it is not asked to yield.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {low}", "held_by": ["low"]},
    ),
    Row(
        s.would_preempt_with_a_higher_priority,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free. Job {low} uses the rest. `penstock edit {job} --priority urgent` changes that.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock edit {job} --priority urgent", "held_by": ["low"]},
    ),
    Row(
        s.deadline_out_of_reach,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free, and enough are expected in 100 s. Job {other} uses the rest. Likely start in 100 s, when job {other} ends. It is not expected to meet its deadline, which is in 60 s.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"], "deadline_reachable": False},
    ),
    Row(
        s.deadline_within_reach,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free, and enough are expected in 30 s. Job {other} uses the rest. Likely start in 30 s, when job {other} ends.",
        {"reason": "no_room", "gates": ["no_room"], "short": "needs 10 units; 0 of 90 are free", "next_step": "running jobs end and free their units", "way_out": "penstock cancel {other}", "held_by": ["other"], "deadline_reachable": True},
    ),
    Row(
        s.deadline_passed,
        "FAILED 0 s ago (deadline passed). It waited 8 s for units. `penstock retry {job}` queues it again.",
        {"reason": "deadline_passed", "gates": [], "short": "its deadline passed while it waited in the queue", "next_step": "a person retries it", "way_out": "penstock retry {job}", "waited": [["no_room", 8.0]]},
    ),
    Row(
        s.reserved,
        "10 units are reserved; its worker has 12 s to ask for the lease.",
        {"reason": "reserved", "gates": [], "short": "reserved; waits for its worker", "next_step": "its worker asks for the lease", "way_out": "penstock cancel {job}", "waited": [["reserved", 18.0]]},
    ),
    Row(
        s.runs,
        "Running for 5 s on worker w1, expected to end in 7 s.",
        {"reason": "", "gates": [], "short": "running for 5 s", "next_step": "its attempt ends", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.runs_with_a_limit,
        "Running for 5 s on worker w1. It is stopped in 55 s at the latest (max runtime exceeded).",
        {"reason": "", "gates": [], "short": "running for 5 s", "next_step": "its attempt ends", "way_out": "penstock cancel {job}"},
    ),
    Row(
        s.runs_again,
        "Running for 2 s on worker w2. Before that: attempt 1 of 2 failed (exit code 7). It waited 5 s for the delay before a retry.",
        {"reason": "", "gates": [], "short": "running for 2 s", "next_step": "its attempt ends", "way_out": "penstock cancel {job}", "last_failure": [1, 2, "exit code 7"], "waited": [["retry_delay", 5.0]]},
    ),
    Row(
        s.told_to_stop,
        "Running for 5 s and told to stop (canceled); given up in 25 s at the latest.",
        {"reason": "canceled", "gates": [], "short": "told to stop (canceled)", "next_step": "its worker stops", "way_out": "penstock cancel --now {job}"},
    ),
    Row(
        s.runs_after_a_wait,
        "Running for 0 s on worker w1. It waited 25 s for units.",
        {"reason": "", "gates": [], "short": "running for 0 s", "next_step": "its attempt ends", "way_out": "penstock cancel {job}", "waited": [["no_room", 25.0]]},
    ),
    Row(
        s.done,
        "DONE 3 s ago.",
        {"reason": "completed", "gates": [], "short": "", "next_step": "", "way_out": ""},
    ),
    Row(
        s.done_after_a_wait,
        "DONE 3 s ago. It waited 25 s for units.",
        {"reason": "completed", "gates": [], "short": "", "next_step": "", "way_out": "", "waited": [["no_room", 25.0]]},
    ),
    Row(
        s.done_after_a_pause_a_retry_and_a_delay,
        "DONE 0 s ago. It waited 2 min: 60 s for the delay before a retry, 45 s while paused, 30 s for its earliest start, 4 s for its worker to start it.",
        {"reason": "completed", "gates": [], "short": "", "next_step": "", "way_out": "", "waited": [["retry_delay", 60.0], ["paused", 45.0], ["not_ready", 30.0], ["reserved", 4.0]]},
    ),
    Row(
        s.failed_at_once,
        "FAILED 0 s ago (job error): exit code 7. That was attempt 1 of 1. `penstock retry {job}` queues it again.",
        {"reason": "job_error", "gates": [], "short": "exit code 7", "next_step": "a person retries it", "way_out": "penstock retry {job}", "last_failure": [1, 1, "exit code 7"]},
    ),
    Row(
        s.failed_after_all_attempts,
        "FAILED 0 s ago (job error): KeyError: 7. That was attempt 2 of 2. It waited 5 s for the delay before a retry. `penstock retry {job}` queues it again.",
        {"reason": "job_error", "gates": [], "short": "KeyError: 7", "next_step": "a person retries it", "way_out": "penstock retry {job}", "last_failure": [2, 2, "KeyError: 7"], "waited": [["retry_delay", 5.0]]},
    ),
    Row(
        s.blocked_by_a_budget,
        "BLOCKED 0 s ago (cost limit reached). A budget of its addon is spent. `penstock retry {job}` queues it again.",
        {"reason": "cost_limit_reached", "gates": [], "short": "cost limit reached", "next_step": "a person retries it", "way_out": "penstock retry {job}"},
    ),
    Row(
        s.blocked_by_its_limit,
        "BLOCKED 0 s ago (cost limit reached). It has spent 2.00 of 1.00 USD. `penstock retry {job}` queues it again.",
        {"reason": "cost_limit_reached", "gates": [], "short": "cost limit reached", "next_step": "a person retries it", "way_out": "penstock retry {job}"},
    ),
    Row(
        s.canceled_in_the_queue,
        "CANCELED 0 s ago. It waited 7 s while paused.",
        {"reason": "canceled", "gates": [], "short": "", "next_step": "", "way_out": "", "waited": [["paused", 7.0]]},
    ),
    Row(
        s.canceled_while_running,
        "CANCELED 0 s ago: ended by SIGTERM.",
        {"reason": "canceled", "gates": [], "short": "", "next_step": "", "way_out": ""},
    ),
]  # fmt: skip

#: Where the store is shared, explain answers for the fleet.
FLEET = [
    Row(
        s.other_host_could,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free. Job {other} uses the rest. Host b-host could run it.",
        {"reason": "no_room", "hosts": [["b-host", ""]]},
    ),
    Row(
        s.no_host_could,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free. Job {other} uses the rest. "
        "Host b-host: the machine is overloaded; waits for NORMAL. Host c-host: the host is drained. "
        "1 more host cannot run it now.",
        {
            "reason": "no_room",
            "hosts": [["b-host", "not_quiet"], ["c-host", "draining"], ["d-host", "no_room"]],
        },
    ),
    Row(
        s.a_host_without_its_worker,
        "Waiting for 0 s. It needs 10 units; 0 of 90 are free. Job {other} uses the rest. "
        "Host b-host: it has no worker for the job.",
        {"reason": "no_room", "hosts": [["b-host", "worker_elsewhere"]]},
    ),
    Row(
        s.worker_on_another_host,
        "Waiting for 0 s. Its worker is on host b-host; this host has none for it. Host b-host could run it.",
        {
            "reason": "worker_elsewhere",
            "gates": ["worker_elsewhere"],
            "short": "waits for a worker on host b-host",
            "next_step": "a worker on host b-host claims it",
            "hosts": [["b-host", ""]],
            "ahead": [],
        },
    ),
    Row(
        s.worker_on_another_host_that_is_full,
        "Waiting for 0 s. Its worker is on hosts b-host and c-host; this host has none for it. "
        "Host b-host: needs 10 units; 5 may be used now. Host c-host: the host is drained.",
        {
            "reason": "worker_elsewhere",
            "gates": ["worker_elsewhere"],
            "hosts": [["b-host", "no_room"], ["c-host", "draining"]],
            "held_by": [],
        },
    ),
    Row(
        s.worker_on_another_host_of_a_paused_addon,
        "Waiting for 0 s. Addon a is paused; `penstock resume a` ends that. "
        "Besides: Its worker is on host b-host; this host has none for it.",
        {"reason": "paused", "gates": ["paused", "worker_elsewhere"]},
    ),
    Row(
        s.drained_here_and_free_there,
        "Waiting for 0 s. Host local starts no more jobs: an operator drained it. Host b-host could run it. "
        "`penstock undrain local` changes that.",
        {"reason": "draining", "hosts": [["b-host", ""]], "way_out": "penstock undrain local"},
    ),
]  # fmt: skip


def fields_of(explanation: Explanation, names: dict[str, str]) -> dict[str, Any]:
    """The JSON, with names in place of ids."""
    data = json.loads(json.dumps(explanation.as_json()))
    names_of = {job_id: name for name, job_id in names.items()}
    failure, preemption = data["last_failure"], data["preemption"]
    return data | {
        "gates": [gate["reason"] for gate in data["gates"]],
        "held_by": [names_of.get(job_id, "?") for job_id in data["held_by"]],
        "ahead": [[names_of.get(head["job_id"], "?"), head["why"]] for head in data["ahead"]],
        "last_failure": failure and [failure["attempt"], failure["of"], failure["error"]],
        "preemption": preemption and [preemption["asked"], preemption["checkpoint"]],
        "waited": [[wait["reason"], wait["sec"]] for wait in data["waited"]],
        "hosts": [[host["host"], host["reason"]] for host in data["hosts"]],
        "way_out": with_names(data["way_out"], names),
    }


def with_names(text: str, names: dict[str, str]) -> str:
    for name, job_id in names.items():
        text = text.replace(job_id[-8:], f"{{{name}}}")
    return text


def check(kit, row: Row) -> None:
    kit, job_id, names = row.situation(kit)
    names = {**names, "job": job_id}
    explanation = kit.job_service.explain(job_id)
    data = fields_of(explanation, names)

    assert with_names(explanation.text, names) == row.words
    assert {name: data[name] for name in row.json} == row.json
    assert len(explanation.short) <= SHORT
    for head in explanation.ahead:
        assert could_start(kit, head.job_id), "a job that cannot start is named as ahead"


def could_start(kit, job_id) -> bool:
    """Whether units alone are between this job and its start."""
    gates = {gate.reason for gate in kit.job_service.explain(job_id).gates}
    return kit.store.job(job_id).state is JobState.QUEUED and gates <= {
        "no_room",
        "queued_ahead",
        "room_kept",
    }


def clause_of(kit, job_id) -> str:
    """The clause of a list for this job."""
    job = kit.store.job(job_id)
    ended = job.state in SETTLED or job.state is JobState.QUEUED
    last = kit.store.dispatches([dispatch_id_of(job_id, job.fence)]) if job.fence and ended else {}
    [clause] = kit.job_service.explainer.standings([job], last)
    return clause


#: A list tries no round, so it does not know which job goes first and for which one units are kept.
FROM_A_ROUND = {"queued_ahead", "room_kept"}


@pytest.mark.parametrize(
    "row",
    [row for row in [*TABLE, *FLEET] if "gates" in row.json and row.json["reason"] not in FROM_A_ROUND],
    ids=lambda row: row.situation.__name__,
)
def test_a_list_says_in_short_what_explain_says(every_kit, row):
    if row in FLEET and not every_kit.store.shared:
        pytest.skip("only hosts of one database know of each other")
    kit, job_id, _ = row.situation(every_kit)
    explanation, clause = kit.job_service.explain(job_id), clause_of(kit, job_id)

    if explanation.line_ahead and explanation.reason not in ("paused", "draining"):
        assert clause.startswith(f"behind {explanation.line_ahead} job")
    elif explanation.reason == "no_room" and "are free" in explanation.short:
        assert clause == explanation.short.partition(";")[0] + "; too few are free"
    elif explanation.state is JobState.QUEUED and explanation.reason == "":
        assert clause == "waits for its turn"
    elif explanation.state is not JobState.RUNNING:
        assert clause == explanation.short


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.situation.__name__)
def test_every_situation_is_told_in_words_and_as_json(kit, row):
    check(kit, row)


@pytest.mark.parametrize("row", [*TABLE[::3], *FLEET], ids=lambda row: row.situation.__name__)
def test_the_answer_is_the_same_on_a_server_and_there_it_is_the_fleets(row, postgres_emptied):
    kit = on_postgres(postgres_emptied())
    try:
        check(kit, row)
        assert kit.store.audit() == []
    finally:
        kit.store.close()


def test_the_table_has_at_least_sixty_situations_and_every_reason_that_a_scheduler_gives():
    codes = {code for row in [*TABLE, *FLEET] for code in row.json.get("gates", ())}

    assert len({row.situation for row in TABLE}) >= 60
    assert set(REASONS) - {"nobody_runs", "no_function"} == codes  # those two only an embedding program gives


def test_every_queued_job_has_a_way_out_and_a_next_step():
    waiting = [row for row in TABLE if row.json["gates"]]

    assert [
        row.situation.__name__ for row in waiting if not row.json["way_out"] or not row.json["next_step"]
    ] == []


@pytest.mark.parametrize(
    "way_out",
    sorted({row.json["way_out"] for row in TABLE if row.json["way_out"].startswith("penstock")}),
)
def test_every_way_out_is_a_command_that_exists(way_out):
    *before, last = way_out.split(" && ")
    assert before in ([], ["penstock stop"])
    _, verb, *words = shlex.split(last)
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None

    if "--set" in words:
        key, _, value = words[words.index("--set") + 1].partition("=")
        assert describe(load(environ={}, flags={key: value}))
    else:
        with command.make_context(verb, [word.strip("{}") for word in words], resilient_parsing=False):
            pass
