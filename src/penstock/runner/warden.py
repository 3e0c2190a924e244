"""
The warden: the process between the runner and a job, one for each command and each warm worker.

It has no thread and runs no foreign code. It is the child subreaper of all processes below it, so it has no
child left only when the whole tree is gone, whatever the job did to hide. It writes the output to disk,
passes signals on, and kills the tree when the runner's end of its socket closes or the lease is not renewed
in time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

from penstock.runner.channels import CallMarker, Channel, Frame
from penstock.runner.output import OutputLimits, OutputRecorder, fresh_folder, open_folder
from penstock.runner.process_tree import (
    become_subreaper,
    descendants,
    die_with_the_parent,
    drain_pipe,
    drop_ambient_capabilities,
    has_children,
    no_new_privileges,
    send_signal,
)  # fmt: skip

#: Bytes of the end of stderr in the report, for the error message.
_MAX_STDERR: Final = 4_096
#: Seconds between two kills while a process lives: a process that was forking has finished by then.
_KILL_INTERVAL_SEC: Final = 0.02
_KILOBYTE: Final = 1_024

LIMITS: Final = {
    "memory_mb": (resource.RLIMIT_AS, 1_048_576),
    "cpu_sec": (resource.RLIMIT_CPU, 1),
    "file_mb": (resource.RLIMIT_FSIZE, 1_048_576),
    "open_files": (resource.RLIMIT_NOFILE, 1),
    "processes": (resource.RLIMIT_NPROC, 1),
}

#: Errors of a machine without room for one more process. All other errors are the job's fault.
_NO_RESOURCES: Final = {
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
}


def boot_time() -> float:
    """Seconds since boot. They count while the machine is suspended, as leases do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Warden:
    def __init__(self, control: socket.socket, worker: list[int], children_wakeup: int) -> None:
        """
        `worker`: the descriptors of a warm worker, which are its socket, its tickets and its page.
        `children_wakeup`: readable when a child has ended.
        """
        self._control, self._worker, self._wakeup = Channel(control), worker, children_wakeup
        self._page = CallMarker(worker[2]) if worker else CallMarker()
        self._poll = select.poll()
        self._output_limits, self._root_folder, self._straggler_sec = OutputLimits(), "", 1.0
        self._orphaned = False
        self._reset()

    def _reset(self) -> None:
        """
        Begin with a new tree. One warden runs many commands, because a fork costs more than a small command.
        """
        self._pipes: dict[int, int] = {}  # descriptor -> stream
        self._listening = False
        #: By the number of the call (0: a command): the folder of its output, and its recorder once it
        #: printed.
        self._folders: dict[int, list[str]] = {}
        self._recorders: dict[int, OutputRecorder | None] = {}
        self._stderr_call = 0  # the call whose end of stderr is kept
        self._stderr_end = b""
        self._root = 0
        self._exit_code: int | None = None  # of the root, once it has ended
        self._peak_memory = 0  # bytes: the most that one of its processes had in memory
        self._lease_until: float | None = None
        self._kill_reason: str | None = None
        self._kill_at: float | None = None

    def run(self) -> NoReturn:
        become_subreaper()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)
        while not self._orphaned:
            self._watch_over_one()
            if self._worker:
                break
            self._reset()
        os._exit(0)

    def _watch_over_one(self) -> None:
        while not self._is_over():
            for fd, _ in self._poll.poll(self._wait_ms()):
                if fd == self._control.fileno():
                    self._read_orders()
                elif fd == self._wakeup:
                    drain_pipe(self._wakeup)
                elif self._listening:
                    self._read(fd)
            self._reap()
            self._check_times()
        self._report()

    # orders

    def _read_orders(self) -> None:
        frames = self._control.receive()
        if frames is None:
            self._orphaned = True
            self._poll.unregister(self._control)
            self._kill("the scheduler is gone")
            return
        for frame in frames:
            self._carry_out(frame)

    def _carry_out(self, frame: Frame) -> None:
        match frame["op"]:
            case "run":
                self._start(frame)
            case _ if self._root == 0:
                return  # for a command that ended meanwhile
            case "begin":
                self._lease_until = frame["until"]
                self._forget_before(frame["first"])
                self._folders |= {call: folder for call, *folder in frame["calls"]}
                self._listen()
            case "over":
                self._forget(frame["call"])
                self._send({"op": "written", "call": frame["call"]})
            case "until":
                self._lease_until = frame["until"]
            case "term":
                self._terminate()
            case "kill":
                self._kill(frame["why"])
            case "note":
                self._write(frame["call"], 2, frame["text"].encode(errors="replace"))

    # starting

    def _start(self, order: Frame) -> None:
        self._root_folder, self._lease_until = order["runs_folder"], order["until"]
        self._output_limits = OutputLimits(*order["output_limits"])
        self._straggler_sec = order["stragglers"]
        try:
            if order["folder"]:
                self._folders[0] = order["folder"]
                self._recorders[0] = self._recorder(0)
            process = self._spawn(order)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            # Popen reports an error between fork and exec as a SubprocessError without an errno.
            is_runners_fault = getattr(error, "errno", None) in _NO_RESOURCES
            self._send({"op": "refused", "error": _start_error(error, order), "ours": is_runners_fault})
            self._exit_code = -1
            return
        self._root = process.pid
        process.returncode = 0  # `_reap` does it; Popen must not try
        for pipe, stream in ((process.stdout, 0), (process.stderr, 1)):
            if pipe is not None:
                fd = os.dup(pipe.fileno())
                pipe.close()
                os.set_blocking(fd, False)
                self._pipes[fd] = stream
        if self._folders:
            self._listen()
        for fd in self._worker:
            os.close(fd)
        self._send({"op": "started", "pid": process.pid, "warden": os.getpid()})

    def _spawn(self, order: Frame) -> subprocess.Popen[bytes]:
        cwd = order["cwd"] or self._own_folder(order["folder"][0])
        uid, gid, groups = order["user"] or (None, None, None)
        stdin = self._stdin(order["stdin"])
        env = dict(order["env"])
        if self._worker:
            env["PENSTOCK_TALK"] = " ".join(map(str, self._worker))
        try:
            return subprocess.Popen(  # noqa: S603  # the job's command, as a list of arguments
                order["argv"],
                cwd=cwd,
                env=env,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                close_fds=True,
                pass_fds=self._worker,
                start_new_session=True,
                umask=0o077,
                user=uid,
                group=gid,
                extra_groups=groups,
                preexec_fn=_prepare(os.getpid(), order["limits"], order["nice"]),  # noqa: PLW1509  # a warden has no thread
            )
        finally:
            if stdin != subprocess.DEVNULL:
                os.close(stdin)

    def _own_folder(self, job: str) -> str:
        """The working folder of a job that names none; all its attempts have the same one."""
        os.close(open_folder(self._root_folder, job, "work"))
        return f"{self._root_folder}/{job}/work"

    @staticmethod
    def _stdin(text: str | None) -> int:
        if text is None:
            return subprocess.DEVNULL
        # A file, not a pipe: the job need not read it, and the warden need not write while the job reads.
        fd = os.memfd_create("penstock-stdin", os.MFD_CLOEXEC)
        with open(fd, "wb", closefd=False) as file:  # a descriptor
            file.write(text.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    # output

    def _listen(self) -> None:
        self._listening = True
        for fd in self._pipes:
            self._poll.register(fd, select.POLLIN)

    def _stop_listening(self) -> None:
        """
        Read no output until the warden knows the call, which its worker may get first. The pipe keeps the
        output.
        """
        self._listening = False
        for fd in self._pipes:
            self._poll.unregister(fd)

    def _drain(self) -> None:
        for fd in list(self._pipes):
            while self._read(fd):
                pass

    def _read(self, fd: int) -> bool:
        with self._page.reading():
            call = self._page.running
            if call not in self._folders:
                if not self._folders:
                    self._stop_listening()
                    return False
                call = min(self._folders)  # printed between two calls, or before the first
            try:
                data = os.read(fd, 65_536)
            except BlockingIOError:
                return False
            if data:
                self._record(call, self._pipes[fd], data)
                return True
        with contextlib.suppress(KeyError):
            self._poll.unregister(fd)
        del self._pipes[fd]
        os.close(fd)
        return False

    def _record(self, call: int, stream: int, data: bytes) -> None:
        if self._stderr_call != call:
            self._stderr_call, self._stderr_end = call, b""
        if stream == 1:
            self._stderr_end = (self._stderr_end + data)[-_MAX_STDERR:]
        self._write(call, stream, data)

    def _write(self, call: int, stream: int, data: bytes) -> None:
        if call not in self._recorders and call in self._folders:
            # Made on the first output: most functions print nothing, and a folder and a file cost more than a
            # small job.
            try:
                self._recorders[call] = self._recorder(call)
            except OSError:
                self._recorders[call] = None
        if recorder := self._recorders.get(call):
            recorder.write(stream, data)

    def _recorder(self, call: int) -> OutputRecorder:
        return OutputRecorder(fresh_folder(self._root_folder, *self._folders[call]), self._output_limits)

    def _forget_before(self, first: int) -> None:
        for call in [call for call in self._folders if call < first]:
            self._forget(call)

    def _forget(self, call: int) -> None:
        self._folders.pop(call, None)
        if recorder := self._recorders.pop(call, None):
            recorder.close()

    # ending

    def _terminate(self) -> None:
        """
        Send SIGTERM to the group in one call, so that no process escapes by forking; to the others one by
        one.
        """
        if self._root and self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._root, signal.SIGTERM)
        for process in descendants(os.getpid()):
            if process.group != self._root:
                send_signal(process, signal.SIGTERM)
            send_signal(process, signal.SIGCONT)  # a stopped process would not handle SIGTERM

    def _kill(self, why: str) -> None:
        self._kill_reason = self._kill_reason or why
        self._kill_at = boot_time()

    def _kill_all(self) -> None:
        if self._root and self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._root, signal.SIGKILL)
        for process in descendants(os.getpid()):
            send_signal(process, signal.SIGKILL)
        self._kill_at = boot_time() + _KILL_INTERVAL_SEC

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._peak_memory = max(self._peak_memory, used.ru_maxrss * _KILOBYTE)
            if pid == self._root:
                self._exit_code = os.waitstatus_to_exitcode(status)
                if self._kill_at is None and descendants(os.getpid()):
                    # Processes that the job left running get SIGTERM, then SIGKILL.
                    self._terminate()
                    self._kill_at = boot_time() + self._straggler_sec

    def _check_times(self) -> None:
        now = boot_time()
        if self._lease_until is not None and now >= self._lease_until and self._kill_reason is None:
            self._kill("the lease was not renewed in time")
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_all()

    def _wait_ms(self) -> int | None:
        moments = [
            moment
            for moment in (self._kill_at, None if self._kill_reason else self._lease_until)
            if moment is not None
        ]
        return None if not moments else max(0, int((min(moments) - boot_time()) * 1_000) + 1)

    def _is_over(self) -> bool:
        if self._exit_code is None and not (self._kill_reason is not None and self._root == 0):
            return False
        return not has_children()

    def _report(self) -> None:
        if self._folders:
            self._drain()
        last = self._stderr_end if self._stderr_call == self._page.running else b""
        report = {
            "op": "gone",
            "code": self._exit_code,
            "killed": self._kill_reason,
            "peak": self._peak_memory,
            "stderr": last.decode(errors="replace"),
        }
        for call in list(self._folders):
            self._forget(call)  # before the report: after it, all of the output can be read
        for fd in self._pipes:  # a process outside of the tree may hold the other end
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
            os.close(fd)
        self._send(report)
        if not self._orphaned:
            os.set_blocking(self._control.fileno(), True)
            self._control.push()
            os.set_blocking(self._control.fileno(), False)

    def _send(self, frame: Frame) -> None:
        if not self._orphaned:
            self._control.send(frame)


def _prepare(warden: int, limits: dict[str, int], nice: int) -> Callable[[], None]:
    """
    The function that the child calls between fork and exec. All lookups are made here: an error in the child
    can report little.
    """
    wanted = [(resource.RLIMIT_CORE, 0)]
    for name, value in limits.items():
        which, unit = LIMITS[name]
        most = resource.getrlimit(which)[1]  # it cannot be raised above the warden's own
        wanted.append((which, value * unit if most == resource.RLIM_INFINITY else min(value * unit, most)))

    def prepare() -> None:
        # Popen has switched the user by now, which makes the kernel forget the death signal.
        die_with_the_parent(warden)
        drop_ambient_capabilities()
        no_new_privileges()
        if nice:
            os.nice(nice)
        for which, value in wanted:
            resource.setrlimit(which, (value, value))

    return prepare


def _start_error(error: Exception, order: dict[str, Any]) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        what = error.filename if error.filename is not None else order["argv"][0]
        return f"cannot start {what!r}: {os.strerror(error.errno)}"
    return f"cannot start {order['argv'][0]!r}: {error}"
