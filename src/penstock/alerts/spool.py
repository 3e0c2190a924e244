"""
What still has to be delivered to one receiver: a file a message, so that a kill at any moment loses none and a delivery costs one unlink.

The name of a message is the number of its event. A reader that was killed before it noted how far it had come writes the same messages
again, over the old ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.core.words import Moment
from penstock.engine.private import private_directory, replace_file

__all__ = ["Message", "Spool"]

log = logging.getLogger("penstock.alerts")

_ENDING: Final = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`told` is what the receiver gets. `tries` have failed; the next is due then, and at `until` it is given up."""

    number: int
    told: dict[str, Any]
    due: Moment
    until: Moment
    tries: int = 0

    @property
    def body(self) -> bytes:
        return json.dumps(self.told, ensure_ascii=False, separators=(",", ":")).encode()


class Spool:
    """Bounded. `put` is for the reader's thread, all else for the messenger's; a file appears and goes as a whole, so no lock is needed."""

    def __init__(self, folder: Path, most: int = 1_000) -> None:
        self.folder, self._most = private_directory(folder), most
        self._missed = 0
        for torn in folder.glob(f".*{_ENDING}.*"):  # a kill came before the name
            torn.unlink(missing_ok=True)

    def __len__(self) -> int:
        return sum(1 for _ in self._numbers())

    def put(self, message: Message) -> bool:
        """False: it is full. How many found no room is told with the next that does."""
        path = self._path(message.number)
        if not path.exists() and len(self) >= self._most:
            self._missed += 1
            if self._missed == 1:
                log.error(
                    "%s is full with %d messages: what comes now is not told there", self.folder, self._most
                )
            return False
        if self._missed:
            message = replace(message, told=message.told | {"not_told": self._missed})
            self._missed = 0
        self.keep(message)
        return True

    def keep(self, message: Message) -> None:
        replace_file(self._path(message.number), json.dumps(asdict(message)).encode())

    def messages(self, after: int = 0) -> list[Message]:
        """Those with a higher number, by number. What cannot be read is put aside: it must not stand in the way of the others."""
        return [read for number in sorted(self._numbers()) if number > after and (read := self._read(number))]

    def drop(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _read(self, number: int) -> Message | None:
        path = self._path(number)
        try:
            return Message(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.error("%s is damaged (%s) and is put aside", path, error)  # noqa: TRY400  # a line for a person
            path.rename(path.with_suffix(".damaged"))
            return None

    def _numbers(self) -> Iterator[int]:
        for path in self.folder.iterdir():
            if path.suffix == _ENDING and path.stem.isdigit():
                yield int(path.stem)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}{_ENDING}"
