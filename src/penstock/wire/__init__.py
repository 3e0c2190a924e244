"""
The types of every request and every answer of the HTTP API.

Server and client share them, so they cannot differ. Moments are RFC 3339 with a zone, spans are seconds,
money is a number in the job's own unit. `payload`, `result` and `checkpoint` are the user's JSON and pass
through unread. A request with an unknown field is refused. Answers may gain fields: readers skip unknown
ones. Every type of these modules is used as `wire.Name`.
"""

from __future__ import annotations

from penstock.wire.arrays import *
from penstock.wire.batches import *
from penstock.wire.common import *
from penstock.wire.jobs import *
from penstock.wire.schedules import *
from penstock.wire.status import *
from penstock.wire.work import *
