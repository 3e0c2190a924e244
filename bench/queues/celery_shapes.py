"""Celery's canvas: a chain, a chord, a group. A chord needs the results of its tasks."""

from __future__ import annotations

import celery

from bench.queues.celery_ import app, job, prepare, session, work
from bench.queues.tick import server

__all__ = ["array", "chain", "fan", "prepare", "session", "work"]

app.conf.update(result_backend=server(), task_ignore_result=False, result_expires=600)


def chain(count: int) -> None:
    celery.chain(*[job.si()] * count).apply_async()


def fan(count: int) -> None:
    celery.chord([job.si()] * count)(job.si())


def array(count: int) -> None:
    celery.group([job.si().set(ignore_result=True)] * count).apply_async()
