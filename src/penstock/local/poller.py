"""Waiting for many descriptors at once, and being woken: epoll and eventfd on Linux, what the platform has elsewhere."""

from __future__ import annotations

import os
import select
import selectors
import socket
from typing import Protocol


class Poller(Protocol):
    """Used by one thread, except `wake`, which any thread may call."""

    def watch(self, fd: int, *, write: bool = False) -> None: ...
    def forget(self, fd: int) -> None: ...
    def wait(self) -> list[int]: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class EpollPoller:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._known: set[int] = set()

    def watch(self, fd: int, *, write: bool = False) -> None:
        mask = select.EPOLLIN | (select.EPOLLOUT if write else 0)
        if fd in self._known:
            self._epoll.modify(fd, mask)
        else:
            self._known.add(fd)
            self._epoll.register(fd, mask)

    def forget(self, fd: int) -> None:
        self._known.discard(fd)
        self._epoll.unregister(fd)

    def wait(self) -> list[int]:
        ready = [fd for fd, _ in self._epoll.poll()]
        if self._bell in ready:
            ready.remove(self._bell)
            os.eventfd_read(self._bell)
        return ready

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._bell)


class SelectorPoller:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell, self._clapper = socket.socketpair()
        self._bell.setblocking(False)
        self._clapper.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def watch(self, fd: int, *, write: bool = False) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        try:
            self._selector.modify(fd, mask)
        except KeyError:
            self._selector.register(fd, mask)

    def forget(self, fd: int) -> None:
        self._selector.unregister(fd)

    def wait(self) -> list[int]:
        ready = [key.fd for key, _ in self._selector.select()]
        if self._bell.fileno() in ready:
            ready.remove(self._bell.fileno())
            self._bell.recv(4096)
        return ready

    def wake(self) -> None:
        try:
            self._clapper.send(b"!")
        except BlockingIOError:
            return  # enough rings are waiting to be heard

    def close(self) -> None:
        self._selector.close()
        self._bell.close()
        self._clapper.close()


def make_poller() -> Poller:
    return EpollPoller() if hasattr(select, "epoll") and hasattr(os, "eventfd") else SelectorPoller()
