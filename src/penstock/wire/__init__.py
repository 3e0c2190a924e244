"""
What travels: every request and every answer of the HTTP API, as types.

The server decodes, checks and documents by these; the client builds and reads by them; so neither can drift
from the other. Moments are RFC 3339 with a zone, spans are seconds, money is a number in the job's own unit.
`payload`, `result` and `checkpoint` are the user's JSON: they pass through unread. Requests refuse fields
they do not know, by name. Answers may gain fields: readers skip what they do not know. Every type of the seven
modules is used as `wire.Name`.
"""

from __future__ import annotations

from penstock.wire.arrays import *
from penstock.wire.batches import *
from penstock.wire.common import *
from penstock.wire.jobs import *
from penstock.wire.schedules import *
from penstock.wire.status import *
from penstock.wire.work import *
