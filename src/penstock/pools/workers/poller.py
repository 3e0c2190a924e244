"""
Waiting for many workers at once.

There are two epolls. The inner one has the workers' pipes; the outer one has the inner one, the pidfds and an
eventfd for wake-ups. The reader thread waits on the outer one. Another waiting thread may take the pipes over
and wait on the inner one: `mute` removes the inner epoll from the outer one, with one system call for any
number of workers.

On systems without epoll there is one selector, and only the reader thread waits on it.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import threading
from typing import Final

#: The most pipes that are reported at once; the default would allocate memory for a thousand with each reply.
_READY: Final = 32


class EpollPoller:
    """The poller on Linux. `fd` is readable when a pipe is, for an event loop that takes the pipes over."""

    can_mute = True

    def __init__(self) -> None:
        self._outer, self._inner = select.epoll(), select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reader_wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._outer.register(self._wakeup, select.EPOLLIN)
        self._inner.register(self._reader_wakeup, select.EPOLLIN)
        self.fd = self._inner.fileno()
        self._outer.register(self.fd, select.EPOLLIN)
        self._pipes: set[int] = set()
        self._signaling = threading.Lock()

    def watch(self, fd: int, *, write: bool = False) -> None:
        """Watch a worker's pipe for data; with `write`, for room."""
        self._pipes.add(fd)
        self._inner.register(fd, select.EPOLLOUT if write else select.EPOLLIN)

    def watch_death(self, fd: int) -> None:
        self._outer.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        if fd in self._pipes:
            self._pipes.discard(fd)
            self._inner.unregister(fd)
        else:
            self._outer.unregister(fd)

    def wait(self, timeout: float | None = None) -> list[int]:
        """
        Wait for a death or a wake-up, and unless muted for a ready pipe (`ready_pipes` then lists it).
        """
        ready = [fd for fd, _ in self._outer.poll(timeout)]
        if self._wakeup in ready:
            ready.remove(self._wakeup)
            os.eventfd_read(self._wakeup)
        return ready

    def ready_pipes(self, timeout: float | None = 0) -> list[tuple[int, int]]:
        """
        The ready pipes as epoll reports them, (descriptor, events); called for every reply of a worker.
        """
        return self._inner.poll(timeout, _READY)

    def clear_wakeup(self, fd: int) -> None:
        """Consume the wake-up of a descriptor that is no worker's pipe."""
        if fd == self._reader_wakeup:
            os.eventfd_read(fd)

    def mute(self) -> None:
        self._outer.modify(self.fd, 0)

    def unmute(self) -> None:
        self._outer.modify(self.fd, select.EPOLLIN)

    def wake(self) -> None:
        """Wake the thread in `wait`."""
        self._signal(self._wakeup)

    def wake_reader(self) -> None:
        """Wake the thread in `ready_pipes`."""
        self._signal(self._reader_wakeup)

    def _signal(self, fd: int) -> None:
        with self._signaling:  # after `close` the number may belong to another file
            if not self._outer.closed:
                os.eventfd_write(fd, 1)

    def close(self) -> None:
        """Close everything but `fd`, which an event loop may still watch."""
        with self._signaling:
            self._outer.close()
            os.close(self._wakeup)
            os.close(self._reader_wakeup)

    def close_pipes(self) -> None:
        self._inner.close()


class SelectorPoller:
    """The poller on systems without epoll."""

    can_mute = False
    fd = -1

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_writer.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._ready: list[int] = []

    def watch(self, fd: int, *, write: bool = False) -> None:
        self._selector.register(fd, selectors.EVENT_WRITE if write else selectors.EVENT_READ)

    def watch_death(self, fd: int) -> None:
        self.watch(fd)

    def forget(self, fd: int) -> None:
        self._selector.unregister(fd)

    def wait(self, timeout: float | None = None) -> list[int]:
        self._ready = [key.fd for key, _ in self._selector.select(timeout)]
        if self._wakeup.fileno() in self._ready:
            self._ready.remove(self._wakeup.fileno())
            self._wakeup.recv(4096)
        return self._ready

    def ready_pipes(self, timeout: float | None = 0) -> list[tuple[int, int]]:  # noqa: ARG002  # `wait` has waited
        ready, self._ready = self._ready, []
        return [(fd, 0) for fd in ready]

    def clear_wakeup(self, fd: int) -> None:
        """There are no wake-ups of readers."""

    def mute(self) -> None:
        raise NotImplementedError

    unmute = wake_reader = mute

    def wake(self) -> None:
        try:
            self._wakeup_writer.send(b"!")
        except BlockingIOError:
            return  # enough wake-ups are waiting

    def close(self) -> None:
        self._selector.close()
        self._wakeup.close()
        self._wakeup_writer.close()

    def close_pipes(self) -> None:
        """`close` has closed them."""


Poller = EpollPoller | SelectorPoller


def make_poller() -> Poller:
    return EpollPoller() if hasattr(select, "epoll") and hasattr(os, "eventfd") else SelectorPoller()
