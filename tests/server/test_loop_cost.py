"""
What one request may cost the event loop, which serves all others too: work that grows with its size, and no faster.

Judged by the processor time of the loop's thread, not by the clock on the wall, and by its growth: four times the bytes may cost up to twelve times the
time (a quadratic parser takes sixteen). Whatever stays below a millisecond is too little to judge, and harms no other request.
"""

from __future__ import annotations

import socket
import time

import pytest

from penstock.server.request import MAX_BODY, MAX_DEPTH
from penstock.wire import PREFIX

FLOOR = 0.001
GROWTH = 12
BODIES = (4_096, 16_384, 65_536, 262_144, 1_000_000)
HEADS = (900, 3_600, 14_400)
SUBMIT = "/queue/jobs/submit"


def filled(unit, size, before=b"", after=b""):
    return before + unit * ((size - len(before) - len(after)) // len(unit)) + after


DEEP_ENOUGH_TO_LOOK = b"[]" * (MAX_DEPTH + 1)
#: What msgspec puts at the end of a message to say where the mistake is.
PLACE = b" - at `$"

HOSTILE_BODIES = {
    "escaped quotes without end": lambda n: filled(b'\\"', n, DEEP_ENOUGH_TO_LOOK + b'"'),
    "backslashes without end": lambda n: filled(b"\\", n, DEEP_ENOUGH_TO_LOOK + b'"'),
    "quotes": lambda n: filled(b'"', n, DEEP_ENOUGH_TO_LOOK),
    "strings that begin again and again": lambda n: filled(b'"\\', n, DEEP_ENOUGH_TO_LOOK),
    "opening brackets": lambda n: filled(b"[", n),
    "closing brackets": lambda n: filled(b"]", n),
    "pairs": lambda n: filled(b"[]", n),
    "hills as deep as allowed": lambda n: filled(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b",", n, b"[", b"0]"),
    "brackets of two kinds": lambda n: filled(b"[{", n),
    "empty objects": lambda n: filled(b"{},", n, b'{"jobs": [', b"{}]}"),
    "a number without end": lambda n: filled(b"1", n, b'{"cost_units": ', b"}"),
    "a fraction without end": lambda n: filled(b"1", n, b'{"quiet_for_sec": 1.', b"}"),
    "a word that looks like a place": lambda n: filled(PLACE, n, b'{"run_when": "', b'"}'),
    "a name that looks like a place": lambda n: filled(PLACE, n, b'{"constraints": {"', b'": 1}}'),
    "a key that looks like a place": lambda n: filled(PLACE, n, b'{"', b'": 1}'),
    "a name with a tail of dots": lambda n: filled(b"a.", n, b'{"addon_id": "', b'"}'),
    "a label that almost fits": lambda n: filled(b"a=", n, b'{"labels": ["', b'"]}'),
    "unknown fields": lambda n: b"{%b}" % b",".join(b'"%x": 1' % i for i in range(n // 11)) if n else b"",
    "blanks": lambda n: filled(b" ", n, b"{", b"}"),
    "a payload of escapes": lambda n: filled(b"\\u0041", n, b'{"addon_id": "a", "payload": "', b'"}'),
}

HOSTILE_HEADERS = {
    "a Host of colons": lambda n: ("Host", ":" * n),
    "a Host of digits": lambda n: ("Host", "localhost:" + "1" * n),
    "an Origin of colons": lambda n: ("Origin", "http:" + "://" * (n // 3)),
    "a site of blanks": lambda n: ("Sec-Fetch-Site", "a " * (n // 2)),
    "a cookie of semicolons": lambda n: ("Cookie", ";" * n),
    "a cookie of equal signs": lambda n: ("Cookie", "penstock" + "=" * n),
    "a content type of semicolons": lambda n: ("Content-Type", "application/json" + ";" * n),
    "a token of underscores": lambda n: ("Authorization", "Bearer pst_" + "_" * n),
    "a token of blanks": lambda n: ("Authorization", "Bearer " + "a " * (n // 2)),
    "an id of digits": lambda n: ("Last-Event-ID", "9" * n),
    "a length of digits": lambda n: ("Content-Length", "9" * n),
    "a tag of quotes": lambda n: ("If-None-Match", '"' * n),
    "a range of commas": lambda n: ("Range", "bytes=" + "0-," * (n // 3)),
    "an upgrade of commas": lambda n: ("Connection", "upgrade" + "," * n),
    "forwarded by many": lambda n: ("X-Forwarded-For", "::1," * (n // 4)),
    "a session of nonsense": lambda n: ("X-Penstock-Session", "0" * n),
}

HOSTILE_PATHS = {
    "slashes": lambda n: "/" * n,
    "percents": lambda n: "/%" * (n // 2),
    "encoded letters": lambda n: "/%41" * (n // 4),
    "a job id without end": lambda n: f"{PREFIX}/queue/jobs/" + "a" * n,
    "shapes of many routes": lambda n: f"{PREFIX}/queue/jobs/" + "cancel/" * (n // 7),
    "ampersands": lambda n: f"{PREFIX}/queue/jobs?" + "&" * (n // 2),
    "equal signs": lambda n: f"{PREFIX}/queue/jobs?state" + "=" * (n // 2),
    "percents in a query": lambda n: f"{PREFIX}/queue/jobs?state=" + "%" * (n // 2),
    "a number in a query": lambda n: f"{PREFIX}/events?after=" + "9" * (n // 2),
    "states": lambda n: f"{PREFIX}/queue/jobs?state=DONE" + ",DONE" * (n // 10),
    "a word in a query that looks like a place": lambda n: (
        f"{PREFIX}/queue/jobs?newest_first=" + "%20-%20at%20%60$" * (n // 32)
    ),
}


class LoopCost:
    """Measures the CPU time that a request costs the event loop of a server."""

    def __init__(self, kit):
        self.kit = kit
        self.clock = time.pthread_getcpuclockid(kit.server.thread.ident)

    def cost(self, request):
        """The least of three: what else the machine does can only add to it."""
        return min(self.once(request) for _ in range(3))

    def once(self, request):
        began = time.clock_gettime(self.clock)
        with socket.create_connection(("127.0.0.1", self.kit.server.port), timeout=300) as line:
            try:
                line.sendall(request)
                line.shutdown(socket.SHUT_WR)
                while line.recv(65_536):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before all of it was sent
        return time.clock_gettime(self.clock) - began

    def request(self, path, body=b"", *headers, verb="POST"):
        lines = {
            "Host": "localhost",
            "Authorization": f"Bearer {self.kit.client.token}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        } | dict(headers)
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{verb} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@pytest.fixture
def loop(kit):
    return LoopCost(kit)


def assert_linear(loop, sizes, request):
    before = loop.cost(request(sizes[0]))
    for size in sizes[1:]:
        cost = loop.cost(request(size))
        assert cost <= GROWTH * max(before, FLOOR), (
            f"{size} bytes: {cost:.4f} s, a quarter of it: {before:.4f} s"
        )
        before = cost


@pytest.mark.parametrize("shape", HOSTILE_BODIES)
def test_no_body_costs_more_than_its_size(loop, shape):
    assert_linear(loop, BODIES, lambda n: loop.request(PREFIX + SUBMIT, HOSTILE_BODIES[shape](n)))


@pytest.mark.parametrize("shape", ["empty objects", "a word that looks like a place"])
def test_no_body_of_many_jobs_costs_more_than_its_size(loop, shape):
    def request(size):
        body = HOSTILE_BODIES[shape](size)
        return loop.request(f"{PREFIX}{SUBMIT}/bulk", body if b"jobs" in body else b'{"jobs": [%b]}' % body)

    assert_linear(loop, BODIES, request)


def test_no_body_in_small_chunks_costs_more_than_its_size(loop):
    def request(size):
        chunks = b"1\r\n \r\n" * (size // 6) + b"0\r\n\r\n"
        head = loop.request(PREFIX + SUBMIT, b"", ("Transfer-Encoding", "chunked"))
        return head.replace(b"Content-Length: 0\r\n", b"") + chunks

    assert_linear(loop, BODIES, request)


@pytest.mark.parametrize("shape", HOSTILE_HEADERS)
def test_no_header_costs_more_than_its_size(loop, shape):
    def request(size):
        return loop.request(f"{PREFIX}/events", b"", HOSTILE_HEADERS[shape](size), verb="GET")

    assert_linear(loop, HEADS, request)


def test_no_number_of_headers_costs_more_than_their_size(loop):
    def request(count):
        return loop.request(f"{PREFIX}/stats", b"", *((f"X-{i}", "") for i in range(count)), verb="GET")

    assert_linear(loop, (100, 400, 1_600), request)


@pytest.mark.parametrize("shape", HOSTILE_PATHS)
def test_no_path_costs_more_than_its_size(loop, shape):
    assert_linear(loop, HEADS, lambda n: loop.request(HOSTILE_PATHS[shape](n), verb="GET"))


def test_a_refusal_is_no_larger_than_the_request(kit):
    """Else a small line in is a large one out, and the loop's time goes into writing it."""
    names = b",".join(b'"%x": 1' % i for i in range(90_000))
    for body in (b"{%b}" % names, b'{"run_when": "%b"}' % (b"x" * 900_000), b'{"%b": 1}' % (b"x" * 900_000)):
        assert len(body) < MAX_BODY
        answer = kit.client.post(SUBMIT, body)
        assert answer.status == 422
        assert len(answer.content) < 32_768


def test_a_refusal_is_no_larger_than_a_list_of_jobs_that_are_all_wrong(kit):
    body = b'{"jobs": [%b]}' % b",".join([b'{"addon_id": "a", "job_type": "t", "cost_units": 100}'] * 100)
    answer = kit.client.post(f"{SUBMIT}/bulk", body)

    assert answer.status == 422
    assert len(answer.json["problems"]) > 1
    assert len(answer.content) < len(body)


def test_a_path_counts_as_a_part_of_the_head(kit):
    answer = kit.client.get("/queue/jobs/" + "a" * 100_000)

    assert answer.status == 431
