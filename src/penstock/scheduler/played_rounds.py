"""
The rounds of a play: which host runs one and when, what the round sees, and what its result changes.

`start` runs rounds until no host can start anything. The round itself is `run_round`, as in the scheduler. A
host runs one only if something can have changed for it, and the round sees only the queues for which it can
do something (the docstring of `playing` says why this is enough).
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from penstock.core.jobs.admission import Kept
from penstock.core.jobs.ordering import QueuedJob, band_ends_at, head_key
from penstock.core.jobs.reasons import BudgetSpent, CapReached, Paused
from penstock.core.jobs.round import (
    MOST_PICKS,
    Pick,
    Placement,
    RoundResult,
    RunningJob,
    run_round,
)
from penstock.core.jobs.types import AddonId, EndReason, Moment
from penstock.scheduler.dispatcher import FOR_EVER
from penstock.scheduler.played_attempts import PlayedAttempts
from penstock.scheduler.played_hosts import HostInPlay, Rivals, RunInPlay, WorkerInPlay
from penstock.scheduler.played_queues import NOWHERE, PlayedQueue
from penstock.scheduler.played_state import MomentKind, Play, PlayedState
from penstock.scheduler.played_waiting import PlayedQueues

#: Looked up once: in Python 3.11 the lookup of an enum's member takes longer than its use.
_LEASE: Final = Placement.LEASE


class PlayedRounds:
    """Runs the rounds of all hosts of a play. To ask a host means to run the rounds of its workers."""

    def __init__(self, play: Play, queues: PlayedQueues, attempts: PlayedAttempts) -> None:
        self._play, self._queues, self._attempts = play, queues, attempts

    # which host is asked

    def start(self) -> None:
        """Ask hosts until none of them can start a job."""
        play = self._play
        hosts = play.hosts
        if len(hosts) == 1 and not play.ask and self._order_changed(hosts[0]):
            play.ask[0] = None
        while play.ask or play.heads:
            if len(hosts) == 1:
                must_ask = bool(play.ask) or self._some_head_fits(hosts[0])
                play.ask.clear()
                play.heads.clear()
                if must_ask and self._queues.ready:
                    self._ask_host(hosts[0])
            elif play.ask:
                number = max(play.ask, key=lambda number: (play.free.of(number), -number))
                del play.ask[number]
                self._ask_host(hosts[number])
            else:
                number, _ = play.heads.popitem()
                self._offer_head(self._queues.all[number])

    def _some_head_fits(self, host: HostInPlay) -> bool:
        """Whether a new head may start: it fits, and would not take units that are kept for another job."""
        free, now = host.units - host.ledger.units, self._play.now
        # With several workers each round may keep units for a different job, so kept units do not decide
        # here.
        kept = host.kept if host.alone and host.kept_holds else None
        for queue in map(self._queues.all.__getitem__, self._play.heads):
            if (head := queue.head) is not None and queue.cost <= free:
                ends_at = head.ends_at(now)
                if kept is None or ends_at == now or kept.lets_past(queue.cost, ends_at):
                    return True
        return False

    def _order_changed(self, host: HostInPlay) -> bool:
        """
        Whether the job that units are kept for is no longer the first: the order of heads changes with time.
        Then a job that was refused may start before it, or units are kept for another job.
        """
        play, rivals = self._play, host.rivals
        if not host.alone:  # the round of each worker may keep units for a different job
            return host.keeps and self._some_queue_fits(host)
        if host.kept is None or not self._some_queue_fits(host):
            return False
        if rivals is None or rivals.head_changes != play.waiting.head_changes or rivals.until <= play.now:
            rivals = host.rivals = self._rivals(host)
        heads = rivals.heads
        if len(heads) > 1:
            heads = [min(heads, key=lambda head: self._key_of(head, host))]
        return not heads or heads[0].job_id != host.kept.job_id

    def _rivals(self, host: HostInPlay) -> Rivals:
        play, until = self._play, FOR_EVER
        units, patience = host.units, play.ordering.patience
        free = units - host.ledger.units
        firsts: dict[tuple[AddonId, bool], QueuedJob] = {}
        for queue in self._queues.ready.values():
            head = queue.head
            if head is None or queue.cost > units:
                continue
            if queue.cost > free:
                if head.passed_at is None:
                    continue
                if play.now - head.passed_at < patience:
                    until = min(until, head.passed_at + patience)
                    continue
            key = (queue.admission_class.addon_id, queue.urgent)
            first = firsts.get(key)
            if first is None or (head.turn, head.no) < (first.turn, first.no):
                firsts[key] = head
        # Until the band of a head changes, only the heads of the best band and urgency can be the first.
        best: tuple[int, bool] | None = None
        heads: list[QueuedJob] = []
        for (_, urgent), head in firsts.items():
            rank = head_key(head, urgent, 0.0, play.now, play.aging)[:2]
            until = min(until, band_ends_at(head.turn, play.now, play.aging) or FOR_EVER)
            if best is None or rank < best:
                best, heads = rank, []
            if rank == best:
                heads.append(head)
        return Rivals(heads, play.waiting.head_changes, until)

    def _key_of(self, head: QueuedJob, host: HostInPlay) -> tuple[int, bool, float, Moment, int]:
        play = self._play
        queue = self._queues.all[play.waiting.queue[head.no]]
        share = host.ledger.share(queue.admission_class.addon_id, play.now, play.sharing)
        return head_key(head, queue.urgent, share, play.now, play.aging)

    def tick(self, number: int) -> None:
        """Ask a host that keeps units, if it may keep them for another job now; plan its next tick."""
        host = self._play.hosts[number]
        host.tick_planned = False
        # A single host is checked at every moment by `start`.
        if len(self._play.hosts) > 1 and self._order_changed(host):
            self._play.ask[host.number] = None
        self._plan_tick(host)

    def _plan_tick(self, host: HostInPlay) -> None:
        play = self._play
        keeps = host.kept is not None if host.alone else host.keeps
        if keeps and not host.tick_planned and self._some_queue_fits(host):
            host.tick_planned = True
            play.plan(play.next_tick(), MomentKind.TICK, host.number)

    def _some_queue_fits(self, host: HostInPlay) -> bool:
        return self._queues.cheapest <= host.units - host.ledger.units

    def _offer_head(self, queue: PlayedQueue) -> None:
        """Ask the hosts that may have room for the head of this queue, until one of them starts it."""
        play = self._play
        head = queue.head
        if head is None:
            return
        for number in play.free.at_least(queue.cost):
            host = play.hosts[number]
            kept = host.kept if host.alone else None
            if kept is not None and not kept.lets_past(queue.cost, head.ends_at(play.now)):
                continue
            if (
                not any(worker.free > 0 and worker.runs(queue) for worker in host.workers)
                and not host.reserves
            ):
                continue
            result = self._ask_host(host)
            if queue.head is not head:
                if queue.head is not None:
                    play.heads[queue.number] = None
                return
            if result is not None and _holds_everywhere(result, head):
                return

    def _ask_host(self, host: HostInPlay) -> RoundResult | None:
        """Let the workers of a host claim until none of them gets a job. Returns the last result."""
        if host.alone:
            worker, result = host.workers[0], None
            while (free := worker.free) > 0 and (latest := self._round(host, worker, free)) is not None:
                result = latest
                if len(result.picks) < MOST_PICKS and not self._may_go_on(result):
                    break
            return result
        play, result = self._play, None
        started, host.keeps = True, False
        while started:
            started = False
            for worker in host.workers:
                if worker.delay and not self._claims_now(host, worker):
                    continue
                started |= self._take_up(host, worker)
                while (limit := worker.next_limit(play.now)) > 0 and (
                    claimed := self._round(host, worker, limit)
                ) is not None:
                    result = claimed
                    started |= bool(result.picks)
                    if len(result.picks) < limit:
                        break
                    if worker.delay:  # it claims for its other places later, and they count as free
                        self._claim_later(host, worker)
                        break
            if host.reserves and (reserved := self._round(host, None)) is not None:
                result = reserved
                started |= bool(result.picks)
        for worker in host.workers:
            if worker.delay and self._claims_now(host, worker):
                worker.seen = (host.changes, play.entries)
        return result

    def _claims_now(self, host: HostInPlay, worker: WorkerInPlay) -> bool:
        """
        Whether the worker claims at this moment. If it has not learned of a change yet, plan a later claim.
        """
        play = self._play
        if worker.claims_at == play.now or worker.seen == (host.changes, play.entries):
            self._attempts.show_room(host, worker)
            return True
        if worker.claims_at < play.now and worker.free > 0:
            self._claim_later(host, worker)
        return False

    def _claim_later(self, host: HostInPlay, worker: WorkerInPlay) -> None:
        play = self._play
        worker.claims_at = play.now + worker.delay
        play.plan(worker.claims_at, MomentKind.ASK, host.number)

    def _may_go_on(self, result: RoundResult) -> bool:
        """
        Whether another round may start more jobs: kept units may now be kept for longer, because jobs that
        passed the kept one run, or for another job.
        """
        if not result.picks or result.kept is None:
            return False
        return result.picks_before_kept < len(result.picks) or not self._play.ordering.patience

    # a round

    def _round(
        self, host: HostInPlay, worker: WorkerInPlay | None, limit: int | None = None
    ) -> RoundResult | None:
        """
        Run one round for a worker that claims `limit` jobs; without a worker, one that reserves. Returns None
        without a round if no job could start in it.
        """
        play = self._play
        queues = self._queues_for(host, worker)
        if not queues:
            return None
        view, ledger = host.view, host.ledger
        view.now, view.queues = play.now, queues
        if not host.alone:
            # A copy, as in a store: units that the round sets aside must not change the accounts.
            accounts = {addon: replace(account) for addon, account in ledger.accounts.items()}
            view.ledger = replace(ledger, counts=dict(ledger.counts), accounts=accounts)
        result = run_round(play.round_inputs(host, worker), most_leases=limit)
        if result.set_aside:  # `_dispatch` drops the queues that are empty otherwise
            for queue in queues:
                self._queues.drop_empty(queue)
        self._take_over(host, worker, result)
        return result

    def _queues_for(self, host: HostInPlay, worker: WorkerInPlay | None) -> list[PlayedQueue]:
        """
        The queues for which a round of this host can do something; none if no job can start. A head that does
        not fit matters only if the round would mark it as passed over, or keep units for it.
        """
        play = self._play
        if not self._some_queue_fits(host):
            return []
        units, now, patience = host.units, play.now, play.ordering.patience
        free = units - host.ledger.units
        ready = self._queues.ready.values()
        chosen = [queue for queue in ready if queue.cost <= free]
        if worker is None:
            present = host.present.at(now)
            startable = any(not present.claims(queue.admission_class) for queue in chosen)
        else:
            startable = host.alone or any(worker.runs(queue) for queue in chosen)
        if not startable:
            return []
        waited: dict[int, PlayedQueue] = {}
        for queue in ready:
            head = queue.head
            if free < queue.cost <= units and head is not None:
                if head.passed_at is None:
                    chosen.append(queue)
                elif now - head.passed_at >= patience:
                    # Of queues that are alike, units are kept for the first head only.
                    first = waited.setdefault(queue.alike, queue).head
                    if first is not None and (head.turn, head.no) < (first.turn, first.no):
                        waited[queue.alike] = queue
        chosen += waited.values()
        return chosen

    # what follows

    def _take_over(self, host: HostInPlay, worker: WorkerInPlay | None, result: RoundResult) -> None:
        """Carry out what the round decided."""
        play = self._play
        for pick in result.set_aside:
            queue = self._queues.all[play.waiting.queue[pick.waiting.no]]
            self._queues.put(queue, pick.waiting.turn, pick.waiting.no)
        for waiting in result.passed:
            self._queues.all[play.waiting.queue[waiting.no]].mark_passed(waiting.no, play.now)
        for pick in result.picks:
            self._dispatch(host, worker, pick)
        if result.picks:
            play.free.changed(host)
        if worker is not None and not host.alone:
            self._attempts.show_room(host, worker, claimed=True)
        self._keep(host, result.kept)
        host.kept_holds = not self._may_go_on(result)

    def _keep(self, host: HostInPlay, kept: Kept | None) -> None:
        play = self._play
        before, host.kept, host.rivals = host.kept, kept, None
        if before is not None:
            play.keeping[before.job_id].discard(host.number)
        if kept is not None:
            host.keeps = True
            play.keeping[kept.job_id].add(host.number)
            self._plan_tick(host)

    def _dispatch(self, host: HostInPlay, worker: WorkerInPlay | None, pick: Pick) -> None:
        play = self._play
        job, queue = pick.waiting.no, self._queues.all[play.waiting.queue[pick.waiting.no]]
        ready_at = pick.waiting.turn + pick.waiting.priority * play.aging.per_point
        as_seen = RunningJob(queue.cost, play.now, pick.ends_at)
        run = RunInPlay(job, queue, host, pick.waiting, ready_at, as_seen=as_seen)
        play.waiting.queue[job] = NOWHERE
        if not host.alone:
            host.ledger.take(queue.admission_class, play.now, play.sharing, queue.keys)
            if queue.head is not None:
                play.heads[queue.number] = None
        elif len(play.hosts) > 1 and queue.head is not None:
            play.heads[queue.number] = None
        self._queues.start(queue, job, run.priority)
        host.runs[job] = run
        if pick.offer is _LEASE:
            self._attempts.lease(run, worker, play.now)
        else:
            play.state[job], play.host[job] = PlayedState.RUNNING, host.number
            host.reserved[job] = run
            play.count_change(host)
            run.over_at, run.reason = play.now + play.rules.reserve_for, EndReason.START_TIMEOUT
        self._attempts.push_end(run)

    def _take_up(self, host: HostInPlay, worker: WorkerInPlay) -> bool:
        """Lease jobs that are reserved for such a worker."""
        taken = False
        for job, run in list(host.reserved.items()):
            if worker.free > 0 and worker.claims[0].fits(run.queue.admission_class):
                del host.reserved[job]
                self._attempts.lease(run, worker, self._play.now)
                self._attempts.push_end(run)
                taken = True
        if taken:
            self._attempts.show_room(host, worker, claimed=True)
        return taken


def _holds_everywhere(result: RoundResult, head: QueuedJob) -> bool:
    """Whether the head was refused for a reason that holds on every host."""
    for denial in result.denials:
        if denial.waiting is head:
            match denial.reason:
                case Paused() | BudgetSpent():
                    return True
                case CapReached(scope=scope):
                    return scope != "concurrent"
                case _:
                    return False
    return False
