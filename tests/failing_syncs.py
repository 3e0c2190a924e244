"""A disk whose syncs fail, for every SQLite file that this process opens meanwhile."""

from __future__ import annotations

import apsw


class FailingSyncs(apsw.VFS):
    """The default VFS of this process while it is entered: every sync fails while `failing` is set."""

    def __init__(self):
        super().__init__("failing-syncs", "unix", makedefault=True)
        self.failing = False

    def xOpen(self, name, flags):
        return _SyncedFile(self, name, flags)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.unregister()


class _SyncedFile(apsw.VFSFile):
    def __init__(self, vfs, name, flags):
        super().__init__("unix", name, flags)
        self._vfs = vfs

    def xSync(self, flags):
        if self._vfs.failing:
            raise apsw.IOError("disk I/O error")
        super().xSync(flags)
