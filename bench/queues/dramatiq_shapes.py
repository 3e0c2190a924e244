"""Dramatiq's pipelines, and groups with a completion callback."""

from __future__ import annotations

import dramatiq
from dramatiq.middleware import GroupCallbacks, Pipelines
from dramatiq.rate_limits.backends import RedisBackend

from bench.queues.dramatiq_ import broker, job, prepare, session, work
from bench.queues.tick import server

__all__ = ["array", "chain", "fan", "prepare", "session", "work"]

broker.add_middleware(Pipelines())
broker.add_middleware(GroupCallbacks(RedisBackend(url=server())))


def chain(count: int) -> None:
    messages = [job.message_with_options(pipe_ignore=True) for _ in range(count)]
    dramatiq.pipeline(messages).run()


def fan(count: int) -> None:
    group = dramatiq.group([job.message() for _ in range(count)])
    group.add_completion_callback(job.message())
    group.run()


def array(count: int) -> None:
    dramatiq.group([job.message() for _ in range(count)]).run()
