"""From an event to its receivers: which get a message, which repeats are counted instead, and what a restart or an absent receiver changes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from signal import SIGKILL

import pytest
from tests.waiting import LONG, alive, until

from penstock.alerts.delivery import Message, MessageRefused, Messenger, ReceiverAway, Spool, Stopped
from penstock.alerts.receivers import CommandReceiver
from penstock.core.jobs.alerts import Repeats, pause
from penstock.core.jobs.changes import Change, Note
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.types import HOUR, MINUTE, SECOND
from penstock.settings.settings import LeaseSettings
from penstock.stores.api import Apply, committed

T0 = 1_900_000_000 * SECOND


def texts(receiver):
    return [message["text"] for message in receiver.received]


# Which receivers get a message


def test_an_alert_reaches_log_command_and_webhook(alerting, receiver, tmp_path, caplog):
    program = "import json, os, sys; json.dump([json.load(sys.stdin), dict(os.environ)], open(sys.argv[1] + '~', 'w')); os.rename(sys.argv[1] + '~', sys.argv[1])"
    file = tmp_path / "got.json"
    alerting.start(webhook=receiver.url, command=(sys.executable, "-c", program, str(file)))

    alerting.alert(job_id="job-1234567890", data={"spent": 3})
    until(lambda: receiver.received and file.exists())

    [message] = receiver.received
    read, environ = json.loads(file.read_text())
    assert message == read
    assert ("alert", "cost_warning", "photos", "k", "about k", 0, {"spent": 3}) == tuple(
        message[name] for name in ("type", "kind", "addon_id", "key", "text", "repeated", "data")
    )
    assert "about k" == environ["PENSTOCK_ALERT_TEXT"]
    assert "job-1234567890" == environ["PENSTOCK_ALERT_JOB_ID"]
    assert {"PENSTOCK_ALERT"} == {name[:14] for name in environ if name.startswith("PENSTOCK_")}
    assert ["alert: about k"] == [record.getMessage() for record in caplog.records]
    until(lambda: not alerting.messages() and not alerting.messages("command"))


def test_the_log_can_be_left_out(alerting, receiver, caplog):
    alerting.start(webhook=receiver.url, log=False)

    alerting.alert()
    until(lambda: receiver.received)

    assert [] == caplog.records


def test_an_addon_has_a_receiver_of_its_own_besides_that_of_all(alerting, receivers):
    everything, photos = receivers(), receivers()
    alerting.start(webhook=everything.url, addons={"photos": {"alert_webhook": photos.url}})

    alerting.alert("mine")
    alerting.alert("other", addon_id="mail")
    alerting.alert("mine too")  # the messages to one receiver keep their order
    until(lambda: len(everything.received) == 3 and "about mine too" in texts(photos))

    assert ["about mine", "about other", "about mine too"] == texts(everything)
    assert ["about mine", "about mine too"] == texts(photos)


def test_an_alert_that_names_nothing_but_its_reason_is_told_in_words(alerting, receiver):
    alerting.start(webhook=receiver.url)

    committed(
        alerting.store,
        Apply(
            [Change(alerting.store.now(), (Note(EventKind.ALERT, "lost", {"held_by": "x"}, of_job=False),))]
        ),
    )
    [message] = until(lambda: receiver.received)

    assert ("lost", "lost", {"held_by": "x"}) == (message["kind"], message["text"], message["data"])


def test_who_waits_for_jobs_is_told_that_one_waits_for_its_worker(alerting, receivers, scheduler):
    photos, alerts = receivers(), receivers()
    alerting.store = scheduler.store
    alerting.start(webhook=alerts.url, addons={"photos": {"webhook": photos.url}})

    ids = {addon: scheduler.submit(addon_id=addon, job_type="index")[0] for addon in ("photos", "mail")}
    scheduler.step()
    [message] = until(lambda: photos.received)

    job = scheduler.store.job(ids["photos"])
    assert ("dispatchable", job.job_id, job.dispatch_id, "index") == tuple(
        message[name] for name in ("type", "job_id", "dispatch_id", "job_type")
    )
    assert "DISPATCHING" == scheduler.state(ids["mail"])
    alerting.stop()
    assert [] == alerts.seen


@pytest.fixture
def scheduler():
    from tests.scheduler.conftest import Capacity, Ordering, SchedulerKit

    from penstock.scheduler.rules import SchedulerRules
    from penstock.stores.memory.store import MemoryStore

    clock = lambda: time.time_ns() // 1_000  # noqa: E731  # one that the scheduler and the messenger share
    store = MemoryStore(clock)
    return type("Kit", (SchedulerKit,), {"now": property(lambda self: clock())})(
        store, clock, SchedulerRules(capacity=Capacity(fixed=90), ordering=Ordering())
    )


# Repeats are counted, not sent


def test_of_one_key_one_is_told_in_a_window_and_then_how_many_were_not():
    repeats = Repeats(HOUR)

    assert [0, None, None] == [repeats.record("k", T0 + i * MINUTE) for i in range(3)]
    assert 0 == repeats.record("other", T0)
    assert 2 == repeats.record("k", T0 + HOUR)
    assert None is repeats.record("k", T0 + HOUR + 1)
    assert 1 == repeats.record("k", T0 + 3 * HOUR)
    assert 0 == repeats.record("k", T0 + 5 * HOUR)


def test_a_clock_that_was_set_back_holds_nothing_back():
    repeats = Repeats(HOUR)
    repeats.record("k", T0)

    assert 0 == repeats.record("k", T0 - 24 * HOUR)


def test_what_needs_no_memory_is_forgotten():
    repeats = Repeats(HOUR)
    for i in range(Repeats.MOST + 5):
        repeats.record(f"k{i}", T0 + i)
    repeats.record("k7", T0 + SECOND)
    repeats.forget(T0 + SECOND)

    assert Repeats.MOST == len(repeats.sent)
    assert ("k4" in repeats.sent, "k5" in repeats.sent) == (False, True)
    repeats.forget(T0 + 2 * HOUR)
    assert ["k7"] == list(repeats.sent)  # one was held back, and is still to be told of


def test_what_was_held_back_survives_a_restart(alerting, receiver):
    alerting.start(webhook=receiver.url)
    for _ in range(3):
        alerting.alert()
    until(lambda: receiver.received)
    alerting.alert("last of the window")
    alerting.delivered(2, receiver)
    alerting.stop()

    alerting.start(webhook=receiver.url, window=0)
    alerting.alert()
    until(lambda: len(receiver.received) == 3)

    assert [0, 0, 2] == [message["repeated"] for message in receiver.received]


# Restarts


def test_nothing_from_before_the_first_start_is_told(alerting, receiver):
    alerting.alert("before")
    alerting.start(webhook=receiver.url)
    alerting.alert("after")
    until(lambda: receiver.received)

    assert ["about after"] == texts(receiver)


def test_what_happened_while_nobody_read_is_told_later(alerting, receiver):
    alerting.start(webhook=receiver.url).stop()
    alerting.alert("meanwhile")
    alerting.start(webhook=receiver.url)
    alerting.delivered(1, receiver)
    alerting.stop()
    alerting.start(webhook=receiver.url).stop()

    assert ["about meanwhile"] == texts(receiver)


def test_a_reader_that_was_killed_before_it_noted_how_far_it_was_tells_the_same_again(alerting, receivers):
    receiver = receivers()
    alerting.start(webhook=receiver.url)
    noted = (alerting.folder / "alerts" / "reader.json").read_bytes()
    alerting.alert()
    alerting.delivered(1, receiver)
    alerting.stop()
    (alerting.folder / "alerts" / "reader.json").write_bytes(noted)

    alerting.start(webhook=receiver.url)
    first, second = until(lambda: len(receiver.received) == 2 and receiver.received)

    assert first == second  # and the id is the same, so a receiver can tell


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"cursor": "x", "told": {}, "origin": ""}'])
def test_a_damaged_file_is_told_of_and_alerting_goes_on(alerting, receiver, caplog, content):
    alerting.alert("before")
    (alerting.folder / "alerts").mkdir(mode=0o700)
    (alerting.folder / "alerts" / "reader.json").write_bytes(content)
    alerting.start(webhook=receiver.url)
    alerting.alert("after")
    until(lambda: receiver.received)

    assert ["about after"] == texts(receiver)
    assert "is damaged" in caplog.text


def test_a_trail_that_is_shorter_than_it_was_is_read_from_its_end(alerting, receiver):
    alerting.start(webhook=receiver.url).stop()
    file = alerting.folder / "alerts" / "reader.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cursor": 1_000_000}))
    alerting.start(webhook=receiver.url)
    alerting.alert()

    assert until(lambda: receiver.received)


def test_a_receiver_that_was_away_gets_it_when_it_is_back_also_after_a_restart(alerting, receivers):
    first = receivers()
    first.script.extend([lambda handler: handler.connection.close(), 503])
    alerting.start(webhook=first.url)
    alerting.alert()
    until(lambda: len(first.seen) == 2)
    alerting.stop()
    assert 1 == len(alerting.messages())

    alerting.start(webhook=first.url)
    until(lambda: len(first.seen) == 3)
    until(lambda: not alerting.messages())

    assert 1 == len({body for _, _, body in first.seen})


def test_messages_go_to_an_address_that_was_mended(alerting, receiver):
    alerting.start(webhook="http://127.0.0.1:1/")
    alerting.alert()
    until(alerting.messages)
    alerting.stop()
    alerting.start(webhook=receiver.url)

    assert until(lambda: receiver.received)


def test_messages_to_a_receiver_that_is_no_more_are_removed(alerting, caplog):
    alerting.start(webhook="http://127.0.0.1:1/")
    alerting.alert()
    until(alerting.messages)
    alerting.stop()
    alerting.start()

    assert not (alerting.folder / "alerts" / "webhook").exists()
    assert "the settings no longer name its receiver" in caplog.text


# A slow receiver delays no other


def test_a_receiver_that_hangs_delays_neither_the_others_nor_the_scheduler_nor_the_stop(alerting, receivers):
    slow, quick, hold, held = receivers(), receivers(), threading.Event(), []
    slow.script.append(lambda handler: held.append(hold.wait(LONG)))
    alerting.start(webhook=slow.url, addons={"photos": {"alert_webhook": quick.url}})
    try:
        alerting.alert("first")
        until(lambda: slow.seen)
        for i in range(20):
            alerting.alert(f"n{i}")
        until(lambda: len(quick.received) == 21)
        alerting.stop()

        assert [] == held, "it hangs still"
        assert 1 == len(slow.seen)
        assert 21 == len(alerting.messages())
    finally:
        hold.set()


HANGS = "import os, subprocess, sys, time; p = subprocess.Popen(['sleep', '1000']); open(sys.argv[1], 'a').write(f'{os.getpid()} {p.pid}\\n'); time.sleep(float(sys.argv[2]))"


def pids(file):
    return (
        [int(pid) for line in file.read_text().splitlines() for pid in line.split()] if file.exists() else []
    )


def test_a_command_that_hangs_is_ended_with_its_children_by_a_stop(alerting, tmp_path):
    file = tmp_path / "pids"
    alerting.start(command=(sys.executable, "-c", HANGS, str(file), "1000"))
    alerting.alert()
    mine = until(lambda: pids(file))
    alerting.stop()

    until(lambda: not any(map(alive, mine)))
    assert 1 == len(alerting.messages("command"))


def test_a_stop_does_not_wait_for_the_time_limit_of_a_command(tmp_path):
    file = tmp_path / "pids"
    command = CommandReceiver((sys.executable, "-c", HANGS, str(file), "1000"), within=10 * LONG)
    message = Message(number=1, content={"id": "1"}, due=0, until=0)
    with ThreadPoolExecutor(1) as pool:
        delivery = pool.submit(command.deliver, message, T0)
        mine = until(lambda: pids(file))
        try:
            command.abort()
            until(lambda: not any(map(alive, mine)))
        finally:
            for pid in filter(alive, mine):
                os.kill(pid, SIGKILL)

    assert isinstance(delivery.exception(), Stopped)


@pytest.mark.parametrize(
    ("stays", "outcome"), [("100", "had not ended after 2 s and was killed"), ("0", None)]
)
def test_a_command_leaves_nothing_behind_in_time_or_not(tmp_path, stays, outcome):
    file = tmp_path / "pids"
    command = CommandReceiver(
        (sys.executable, "-c", HANGS, str(file), stays), within=2.0 if outcome else LONG
    )
    message = Message(number=1, content={"id": "1"}, due=0, until=0)
    if outcome:
        until(lambda: ends(command, message) == f"it {outcome}" and pids(file))
    else:
        assert ends(command, message) is None

    until(lambda: not any(map(alive, pids(file))))


def ends(command, message):
    try:
        command.deliver(message, T0)
    except (MessageRefused, ReceiverAway) as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("sh", "-c", "echo not today; exit 3"), "it ended with 3: 'not today'"),
        (("sh", "-c", "kill -9 $$"), "it ended with -9"),
        (("/no/such/program",), "it cannot be started: No such file or directory"),
        (("sh", "-c", "yes | head -c 1000000; test $(wc -c) -gt 200000"), None),
        (("sh", "-c", "exec 0<&- 1>&- 2>&-"), None),
        (("test", "$(exit 1)", "=", "$(exit 1)"), None),
    ],
)
def test_how_a_command_ended_is_told(argv, reason):
    content = {"id": "1", "text": "a\0b" + "x" * 200_000}

    assert reason == ends(CommandReceiver(argv), Message(number=1, content=content, due=0, until=0))


# Trying again, on a clock that is moved


class ScriptedReceiver:
    """A receiver whose answers the test sets."""

    name = "scripted"

    def __init__(self):
        self.tried, self.wrong = [], None

    def deliver(self, message, now):
        self.tried.append((message.number, now))
        if self.wrong is not None:
            raise self.wrong("it is wrong")

    def abort(self):
        pass


class MessengerKit:
    """A messenger and its spool on a clock that the test moves."""

    def __init__(self, folder):
        self.receiver, self.given_up, self.now = ScriptedReceiver(), [], T0
        self.spool = Spool(folder / "spool", most=5)
        self.again()

    def again(self):
        """A new messenger on the same spool, as after a restart."""
        self.messenger = Messenger(
            self.receiver, self.spool, lambda target, message, why: self.given_up.append(message.number)
        )

    def put(self, number, lives=24 * HOUR):
        return self.spool.put(
            Message(number=number, content={"id": str(number)}, due=self.now, until=self.now + lives)
        )

    def run(self, span):
        """Run every step that falls due within `span`."""
        ends = self.now + span
        while (wish := self.messenger.step(self.now)) <= ends:
            self.now = max(self.now, wish)
        self.now = ends


@pytest.fixture
def rounds(tmp_path):
    return MessengerKit(tmp_path)


def test_pauses_grow_from_a_second_to_five_minutes():
    pauses = [pause(tries) // SECOND for tries in range(1, 12)]

    assert [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300] == pauses
    assert 5 * MINUTE == pause(10_000)


def test_a_receiver_that_is_away_is_tried_less_and_less_and_then_gets_all_in_order(rounds):
    rounds.receiver.wrong = ReceiverAway
    for number in (1, 2, 3):
        rounds.put(number)
    rounds.run(10 * SECOND)
    tried = [(number, (now - T0) // SECOND) for number, now in rounds.receiver.tried]
    rounds.receiver.wrong = None
    rounds.receiver.tried.clear()
    rounds.run(10 * SECOND)

    assert [(1, 0), (1, 1), (1, 3), (1, 7)] == tried
    assert [1, 2, 3] == [number for number, _ in rounds.receiver.tried]
    assert 0 == len(rounds.spool)


def test_a_message_that_is_refused_does_not_hold_up_the_others(rounds):
    rounds.receiver.wrong = MessageRefused
    rounds.put(1)
    rounds.run(0)
    rounds.receiver.wrong = None
    rounds.put(2)
    rounds.run(0)

    assert [1, 2] == [number for number, _ in rounds.receiver.tried]
    assert 1 == len(rounds.spool)


def test_pauses_go_on_where_they_were_after_a_restart(rounds):
    rounds.receiver.wrong = MessageRefused
    rounds.put(1)
    rounds.run(20 * SECOND)
    rounds.again()
    rounds.run(12 * SECOND)

    assert [0, 1, 3, 7, 15, 31] == [(now - T0) // SECOND for _, now in rounds.receiver.tried]


@pytest.mark.parametrize("wrong", [ReceiverAway, MessageRefused])
def test_after_a_day_it_is_given_up_and_told_of_once(rounds, wrong):
    rounds.receiver.wrong = wrong
    for number in (1, 2, 3):
        rounds.put(number)
    rounds.run(25 * HOUR)

    assert [1, 2, 3] == sorted(rounds.given_up)
    assert 0 == len(rounds.spool)
    last = max(now for _, now in rounds.receiver.tried)
    assert 24 * HOUR - 5 * MINUTE <= last - T0 <= 24 * HOUR


def test_what_is_too_old_after_a_long_downtime_is_tried_once_and_delivered_if_it_can_be(rounds):
    for number in (1, 2, 3):
        rounds.put(number)
    rounds.now += 48 * HOUR
    rounds.run(0)

    assert [1, 2, 3] == [number for number, _ in rounds.receiver.tried]
    assert [] == rounds.given_up


def test_a_clock_that_was_set_back_puts_nothing_off(rounds):
    rounds.receiver.wrong = ReceiverAway
    rounds.put(1)
    rounds.run(0)
    rounds.receiver.wrong = None
    rounds.now -= 365 * 24 * HOUR
    rounds.run(0)

    assert 0 == len(rounds.spool)


def test_a_full_spool_takes_no_more_and_then_tells_how_many_found_no_room(rounds, caplog):
    assert [True] * 5 + [False] * 3 == [rounds.put(number) for number in range(1, 9)]
    rounds.run(0)
    rounds.put(9)

    [message] = rounds.spool.messages()
    assert {"id": "9", "not_told": 3} == message.content
    assert 1 == caplog.text.count("is full")


def test_a_damaged_message_is_put_aside_and_a_torn_one_removed(rounds, caplog):
    rounds.put(2)
    (rounds.spool.folder / "1.json").write_text("{")
    (rounds.spool.folder / ".3.json.abc").write_text("{")
    rounds.spool = Spool(rounds.spool.folder)
    rounds.again()
    rounds.run(0)

    assert [2] == [number for number, _ in rounds.receiver.tried]
    assert ["1.damaged"] == [path.name for path in rounds.spool.folder.iterdir()]


def test_what_could_not_be_delivered_is_in_the_trail_and_makes_no_further_messages(
    alerting, receiver, caplog
):
    receiver.script.extend([500] * 100)
    alerting.start(webhook=receiver.url, retry_for=SECOND)
    alerting.alert()
    [event] = until(lambda: alerting.alerts("undelivered"))
    until(lambda: not alerting.messages())
    until(lambda: "alert: an alert could not be delivered" in caplog.text)
    alerting.stop()

    assert f"http://127.0.0.1:{receiver.port}: answered 500" in event.data["text"]
    assert [] == alerting.messages()
    assert {"about k"} == set(texts(receiver))


@pytest.mark.parametrize(("lives", "sent"), [(0, False), (HOUR, True)])
def test_a_stale_notice_of_a_waiting_job_is_not_sent(alerting, receiver, scheduler, caplog, lives, sent):
    alerting.store = scheduler.store
    alerting.start(addons={"photos": {"webhook": receiver.url}}).stop()
    scheduler.submit(addon_id="photos")
    scheduler.step()
    alerting.alert()
    alerting.start(addons={"photos": {"webhook": receiver.url}}, leases=LeaseSettings(start_timeout=lives))
    until(lambda: "alert: about k" in caplog.text)
    alerting.stop()

    # A stop between sending and removing the file leaves both: a notice is sent at least once.
    assert sent == bool(receiver.seen or list(alerting.folder.glob("alerts/job-*/*.json")))
