"""From an event to whoever must hear of it: who is told, what is held back, and what a restart or a receiver that is away changes."""

from __future__ import annotations

import json
import sys
import threading
import time

import pytest
from tests.waiting import LONG, alive, until

from penstock.alerts.command import CommandReceiver
from penstock.alerts.delivery import Message, MessageRefused, Messenger, ReceiverAway, Spool
from penstock.core.jobs.alerts import Repeats, pause
from penstock.core.jobs.changes import Change, Note
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.types import HOUR, MINUTE, SECOND
from penstock.stores.api import Apply, committed

T0 = 1_900_000_000 * SECOND


def texts(receiver):
    return [told["text"] for told in receiver.told]


# Being told


def test_an_alert_reaches_log_command_and_webhook(job_service, receiver, tmp_path, caplog):
    program = "import json, os, sys; json.dump([json.load(sys.stdin), dict(os.environ)], open(sys.argv[1] + '~', 'w')); os.rename(sys.argv[1] + '~', sys.argv[1])"
    file = tmp_path / "got.json"
    job_service.start(webhook=receiver.url, command=(sys.executable, "-c", program, str(file)))

    job_service.alert(job_id="job-1234567890", data={"spent": 3})
    until(lambda: receiver.told and file.exists())

    [told] = receiver.told
    read, environ = json.loads(file.read_text())
    assert told == read
    assert ("alert", "cost_warning", "photos", "k", "about k", 0, {"spent": 3}) == tuple(
        told[name] for name in ("type", "kind", "addon_id", "key", "text", "repeated", "data")
    )
    assert "about k" == environ["PENSTOCK_ALERT_TEXT"]
    assert "job-1234567890" == environ["PENSTOCK_ALERT_JOB_ID"]
    assert {"PENSTOCK_ALERT"} == {name[:14] for name in environ if name.startswith("PENSTOCK_")}
    assert ["alert: about k"] == [record.getMessage() for record in caplog.records]
    until(lambda: not job_service.messages() and not job_service.messages("command"))


def test_the_log_can_be_left_out(job_service, receiver, caplog):
    job_service.start(webhook=receiver.url, log=False)

    job_service.alert()
    until(lambda: receiver.told)

    assert [] == caplog.records


def test_an_addon_has_a_receiver_of_its_own_besides_that_of_all(job_service, receivers):
    everything, photos = receivers(), receivers()
    job_service.start(webhook=everything.url, of_addon={"photos": photos.url})

    job_service.alert("mine")
    job_service.alert("other", addon_id="mail")
    until(lambda: len(everything.told) == 2 and photos.told)

    assert ["about mine", "about other"] == texts(everything)
    assert ["about mine"] == texts(photos)


def test_an_alert_that_names_nothing_but_its_reason_is_told_in_words(job_service, receiver):
    job_service.start(webhook=receiver.url)

    committed(
        job_service.store,
        Apply(
            [
                Change(
                    job_service.store.now(), (Note(EventKind.ALERT, "lost", {"held_by": "x"}, of_job=False),)
                )
            ]
        ),
    )
    [told] = until(lambda: receiver.told)

    assert ("lost", "lost", {"held_by": "x"}) == (told["kind"], told["text"], told["data"])


def test_who_waits_for_jobs_is_told_that_one_waits_for_its_worker(job_service, receivers, works):
    photos, alerts = receivers(), receivers()
    job_service.store = works.store
    job_service.start(webhook=alerts.url, dispatchable={"photos": photos.url})

    ids = {addon: works.submit(addon_id=addon, job_type="index")[0] for addon in ("photos", "mail")}
    works.step()
    [told] = until(lambda: photos.told)

    job = works.store.job(ids["photos"])
    assert ("dispatchable", job.job_id, job.dispatch_id, "index") == tuple(
        told[name] for name in ("type", "job_id", "dispatch_id", "job_type")
    )
    assert "DISPATCHING" == works.state(ids["mail"])
    job_service.stop()
    assert [] == alerts.seen


@pytest.fixture
def works():
    from tests.scheduler.conftest import Capacity, Ordering, SchedulerKit

    from penstock.scheduler.rules import SchedulerRules
    from penstock.stores.memory.store import MemoryStore

    clock = lambda: time.time_ns() // 1_000  # noqa: E731  # one that the scheduler and the messenger share
    store = MemoryStore(clock)
    return type("Kit", (SchedulerKit,), {"now": property(lambda self: clock())})(
        store, clock, SchedulerRules(capacity=Capacity(fixed=90), ordering=Ordering())
    )


# Not being told again and again


def test_of_one_key_one_is_told_in_a_window_and_then_how_many_were_not():
    repeats = Repeats(HOUR)

    assert [0, None, None] == [repeats.hear("k", T0 + i * MINUTE) for i in range(3)]
    assert 0 == repeats.hear("other", T0)
    assert 2 == repeats.hear("k", T0 + HOUR)
    assert None is repeats.hear("k", T0 + HOUR + 1)
    assert 1 == repeats.hear("k", T0 + 3 * HOUR)
    assert 0 == repeats.hear("k", T0 + 5 * HOUR)


def test_a_clock_that_was_set_back_holds_nothing_back():
    repeats = Repeats(HOUR)
    repeats.hear("k", T0)

    assert 0 == repeats.hear("k", T0 - 24 * HOUR)


def test_what_needs_no_memory_is_forgotten():
    repeats = Repeats(HOUR)
    for i in range(Repeats.MOST + 5):
        repeats.hear(f"k{i}", T0 + i)
    repeats.hear("k7", T0 + SECOND)
    repeats.forget(T0 + SECOND)

    assert Repeats.MOST == len(repeats.told)
    assert ("k4" in repeats.told, "k5" in repeats.told) == (False, True)
    repeats.forget(T0 + 2 * HOUR)
    assert ["k7"] == list(repeats.told)  # one was held back, and is still to be told of


def test_what_was_held_back_survives_a_restart(job_service, receiver):
    job_service.start(webhook=receiver.url)
    for _ in range(3):
        job_service.alert()
    until(lambda: receiver.told)
    job_service.alert("last of the window")
    job_service.delivered(2, receiver)
    job_service.stop()

    job_service.start(webhook=receiver.url, window=0)
    job_service.alert()
    until(lambda: len(receiver.told) == 3)

    assert [0, 0, 2] == [told["repeated"] for told in receiver.told]


# Restarts


def test_nothing_from_before_the_first_start_is_told(job_service, receiver):
    job_service.alert("before")
    job_service.start(webhook=receiver.url)
    job_service.alert("after")
    until(lambda: receiver.told)

    assert ["about after"] == texts(receiver)


def test_what_happened_while_nobody_read_is_told_later(job_service, receiver):
    job_service.start(webhook=receiver.url).stop()
    job_service.alert("meanwhile")
    job_service.start(webhook=receiver.url)
    job_service.delivered(1, receiver)
    job_service.stop()
    job_service.start(webhook=receiver.url).stop()

    assert ["about meanwhile"] == texts(receiver)


def test_a_reader_that_was_killed_before_it_noted_how_far_it_was_tells_the_same_again(job_service, receivers):
    receiver = receivers()
    job_service.start(webhook=receiver.url)
    noted = (job_service.folder / "alerts" / "reader.json").read_bytes()
    job_service.alert()
    job_service.delivered(1, receiver)
    job_service.stop()
    (job_service.folder / "alerts" / "reader.json").write_bytes(noted)

    job_service.start(webhook=receiver.url)
    first, second = until(lambda: len(receiver.told) == 2 and receiver.told)

    assert first == second  # and the id is the same, so a receiver can tell


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"cursor": "x", "told": {}, "origin": ""}'])
def test_a_damaged_file_is_told_of_and_alerting_goes_on(job_service, receiver, caplog, content):
    job_service.alert("before")
    (job_service.folder / "alerts").mkdir(mode=0o700)
    (job_service.folder / "alerts" / "reader.json").write_bytes(content)
    job_service.start(webhook=receiver.url)
    job_service.alert("after")
    until(lambda: receiver.told)

    assert ["about after"] == texts(receiver)
    assert "is damaged" in caplog.text


def test_a_trail_that_is_shorter_than_it_was_is_read_from_its_end(job_service, receiver):
    job_service.start(webhook=receiver.url).stop()
    file = job_service.folder / "alerts" / "reader.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cursor": 1_000_000}))
    job_service.start(webhook=receiver.url)
    job_service.alert()

    assert until(lambda: receiver.told)


def test_a_receiver_that_was_away_gets_it_when_it_is_back_also_after_a_restart(job_service, receivers):
    first = receivers()
    first.script.extend([lambda handler: handler.connection.close(), 503])
    job_service.start(webhook=first.url)
    job_service.alert()
    until(lambda: len(first.seen) == 2)
    job_service.stop()
    assert 1 == len(job_service.messages())

    job_service.start(webhook=first.url)
    until(lambda: len(first.seen) == 3)
    until(lambda: not job_service.messages())

    assert 1 == len({body for _, _, body in first.seen})


def test_messages_go_to_an_address_that_was_mended(job_service, receiver):
    job_service.start(webhook="http://127.0.0.1:1/")
    job_service.alert()
    until(job_service.messages)
    job_service.stop()
    job_service.start(webhook=receiver.url)

    assert until(lambda: receiver.told)


def test_messages_to_a_receiver_that_is_no_more_are_removed(job_service, caplog):
    job_service.start(webhook="http://127.0.0.1:1/")
    job_service.alert()
    until(job_service.messages)
    job_service.stop()
    job_service.start()

    assert not (job_service.folder / "alerts" / "webhook").exists()
    assert "the settings no longer name its receiver" in caplog.text


# Nobody waits for anybody


def test_a_receiver_that_hangs_delays_neither_the_others_nor_the_scheduler_nor_the_stop(
    job_service, receivers
):
    slow, quick, hold, held = receivers(), receivers(), threading.Event(), []
    slow.script.append(lambda handler: held.append(hold.wait(LONG)))
    job_service.start(webhook=slow.url, of_addon={"photos": quick.url})
    try:
        job_service.alert("first")
        until(lambda: slow.seen)
        for i in range(20):
            job_service.alert(f"n{i}")
        until(lambda: len(quick.told) == 21)
        job_service.stop()

        assert [] == held, "it hangs still"
        assert 1 == len(slow.seen)
        assert 21 == len(job_service.messages())
    finally:
        hold.set()


HANGS = "import os, subprocess, sys, time; p = subprocess.Popen(['sleep', '1000']); open(sys.argv[1], 'a').write(f'{os.getpid()} {p.pid}\\n'); time.sleep(float(sys.argv[2]))"


def pids(file):
    return (
        [int(pid) for line in file.read_text().splitlines() for pid in line.split()] if file.exists() else []
    )


def test_a_command_that_hangs_is_ended_with_its_children_by_a_stop(job_service, tmp_path):
    file = tmp_path / "pids"
    job_service.start(command=(sys.executable, "-c", HANGS, str(file), "1000"))
    job_service.alert()
    mine = until(lambda: pids(file))
    job_service.stop()

    until(lambda: not any(map(alive, mine)))
    assert 1 == len(job_service.messages("command"))


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
    ("argv", "said"),
    [
        (("sh", "-c", "echo not today; exit 3"), "it ended with 3: 'not today'"),
        (("sh", "-c", "kill -9 $$"), "it ended with -9"),
        (("/no/such/program",), "it cannot be started: No such file or directory"),
        (("sh", "-c", "yes | head -c 1000000; test $(wc -c) -gt 200000"), None),
        (("sh", "-c", "exec 0<&- 1>&- 2>&-"), None),
        (("test", "$(exit 1)", "=", "$(exit 1)"), None),
    ],
)
def test_how_a_command_ended_is_told(argv, said):
    told = {"id": "1", "text": "a\0b" + "x" * 200_000}

    assert said == ends(CommandReceiver(argv), Message(number=1, content=told, due=0, until=0))


# Trying again, on a clock that is moved


class Door:
    """A receiver that the test opens and closes."""

    name = "door"

    def __init__(self):
        self.tried, self.wrong = [], None

    def deliver(self, message, now):
        self.tried.append((message.number, now))
        if self.wrong is not None:
            raise self.wrong("it is wrong")

    def cut(self):
        pass


class Rounds:
    def __init__(self, folder):
        self.door, self.given_up, self.now = Door(), [], T0
        self.spool = Spool(folder / "spool", most=5)
        self.again()

    def again(self):
        """As after a restart."""
        self.messenger = Messenger(
            self.door, self.spool, lambda way, message, why: self.given_up.append(message.number)
        )

    def put(self, number, lives=24 * HOUR):
        return self.spool.put(
            Message(number=number, content={"id": str(number)}, due=self.now, until=self.now + lives)
        )

    def run(self, span):
        """All that falls due within it."""
        ends = self.now + span
        while (wish := self.messenger.step(self.now)) <= ends:
            self.now = max(self.now, wish)
        self.now = ends


@pytest.fixture
def rounds(tmp_path):
    return Rounds(tmp_path)


def test_pauses_grow_from_a_second_to_five_minutes():
    pauses = [pause(tries) // SECOND for tries in range(1, 12)]

    assert [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300] == pauses
    assert 5 * MINUTE == pause(10_000)


def test_a_receiver_that_is_away_is_tried_less_and_less_and_then_gets_all_in_order(rounds):
    rounds.door.wrong = ReceiverAway
    for number in (1, 2, 3):
        rounds.put(number)
    rounds.run(10 * SECOND)
    tried = [(number, (now - T0) // SECOND) for number, now in rounds.door.tried]
    rounds.door.wrong = None
    rounds.door.tried.clear()
    rounds.run(10 * SECOND)

    assert [(1, 0), (1, 1), (1, 3), (1, 7)] == tried
    assert [1, 2, 3] == [number for number, _ in rounds.door.tried]
    assert 0 == len(rounds.spool)


def test_a_message_that_is_refused_does_not_hold_up_the_others(rounds):
    rounds.door.wrong = MessageRefused
    rounds.put(1)
    rounds.run(0)
    rounds.door.wrong = None
    rounds.put(2)
    rounds.run(0)

    assert [1, 2] == [number for number, _ in rounds.door.tried]
    assert 1 == len(rounds.spool)


def test_pauses_go_on_where_they_were_after_a_restart(rounds):
    rounds.door.wrong = MessageRefused
    rounds.put(1)
    rounds.run(20 * SECOND)
    rounds.again()
    rounds.run(12 * SECOND)

    assert [0, 1, 3, 7, 15, 31] == [(now - T0) // SECOND for _, now in rounds.door.tried]


@pytest.mark.parametrize("wrong", [ReceiverAway, MessageRefused])
def test_after_a_day_it_is_given_up_and_told_of_once(rounds, wrong):
    rounds.door.wrong = wrong
    for number in (1, 2, 3):
        rounds.put(number)
    rounds.run(25 * HOUR)

    assert [1, 2, 3] == sorted(rounds.given_up)
    assert 0 == len(rounds.spool)
    last = max(now for _, now in rounds.door.tried)
    assert 24 * HOUR - 5 * MINUTE <= last - T0 <= 24 * HOUR


def test_what_is_too_old_after_a_long_downtime_is_tried_once_and_delivered_if_it_can_be(rounds):
    for number in (1, 2, 3):
        rounds.put(number)
    rounds.now += 48 * HOUR
    rounds.run(0)

    assert [1, 2, 3] == [number for number, _ in rounds.door.tried]
    assert [] == rounds.given_up


def test_a_clock_that_was_set_back_puts_nothing_off(rounds):
    rounds.door.wrong = ReceiverAway
    rounds.put(1)
    rounds.run(0)
    rounds.door.wrong = None
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

    assert [2] == [number for number, _ in rounds.door.tried]
    assert ["1.damaged"] == [path.name for path in rounds.spool.folder.iterdir()]


def test_what_could_not_be_delivered_is_in_the_trail_and_makes_no_further_messages(
    job_service, receiver, caplog
):
    receiver.script.extend([500] * 100)
    job_service.start(webhook=receiver.url, retry_for=SECOND)
    job_service.alert()
    [event] = until(lambda: job_service.alerts("undelivered"))
    until(lambda: not job_service.messages())
    until(lambda: "alert: an alert could not be delivered" in caplog.text)
    job_service.stop()

    assert f"http://127.0.0.1:{receiver.port}: answered 500" in event.data["text"]
    assert [] == job_service.messages()
    assert {"about k"} == set(texts(receiver))


@pytest.mark.parametrize(("lives", "sent"), [(0, False), (HOUR, True)])
def test_a_stale_notice_of_a_waiting_job_is_not_sent(job_service, receiver, works, caplog, lives, sent):
    job_service.store = works.store
    job_service.start(dispatchable={"photos": receiver.url}).stop()
    works.submit(addon_id="photos")
    works.step()
    job_service.alert()
    job_service.start(dispatchable={"photos": receiver.url}, dispatchable_for=lives)
    until(lambda: "alert: about k" in caplog.text)
    job_service.stop()

    # A stop between sending and removing the file leaves both: a notice is sent at least once.
    assert sent == bool(receiver.seen or list(job_service.folder.glob("alerts/job-*/*.json")))
