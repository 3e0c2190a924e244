"""The examples at the end of help pages, by verb. A test reads each with the options of its verb."""

from __future__ import annotations

from typing import Final

import click

EXAMPLES: Final = {
    "up": ("penstock up", "penstock up --port 0 --data-dir ./try", "penstock up --set capacity.units=60"),
    "login": ("penstock login --read-only",),
    "service": ("penstock service install", "penstock service status"),
    "service install": ("penstock service install --dry-run", "penstock service install --system"),
    "settings": ("penstock settings --changed",),
    "run": (
        "penstock run -- make test",
        "penstock run --when any --cost 30 python3 train.py --epochs 10",
        "penstock run --shell 'sort words.txt | uniq -c > counts.txt'",
    ),
    "submit": (
        "penstock submit -- ./backup.sh",
        "penstock submit --when quiet --cost 30 -- python3 train.py",
        "penstock submit --not-before 22:30 --retry 1m --retry 10m -- ./backup.sh",
        "penstock submit --after last -- ./report.sh",
        "penstock submit --array 1-100%8 -- ./step.sh",
        'penstock submit --type resize --addon photos --payload \'{"path": "a.jpg"}\'',
    ),
    "ls": (
        "penstock ls --state failed --since 2h",
        "penstock ls --addon mail --search invoice",
        "penstock ls --watch",
    ),
    "show": ("penstock show last", "penstock show 8f51ca44"),
    "explain": ("penstock explain last",),
    "logs": ("penstock logs -f last", "penstock logs 8f51ca44 --attempt 1"),
    "wait": ("penstock wait last", "penstock wait 8f51ca44 22ac013d --timeout 10m"),
    "cancel": (
        "penstock cancel last",
        "penstock cancel 8f51ca44 22ac013d --now",
        "penstock cancel --state queued --addon ml --older 1h",
    ),
    "retry": ("penstock retry last", "penstock retry --state failed --since 24h --yes"),
    "rerun": ("penstock rerun last", "penstock rerun last --priority high"),
    "edit": (
        "penstock edit last --priority high",
        "penstock edit last --not-before 22:30",
        "penstock edit last --when any",
    ),
    "job": (
        "penstock job progress 0.5 half of the files",
        "penstock job should-yield && penstock job yield",
    ),
    "array": ("penstock array show last", "penstock array retry last"),
    "batch": ("penstock batch submit nightly lines.txt", "penstock batch wait nightly"),
    "batch submit": (
        "penstock batch submit nightly lines.txt",
        "penstock batch submit nightly lines.txt --on-end ./report.sh --on-failure ./call-me.sh",
    ),
    "batch open": (
        "penstock batch open nightly --on-end ./report.sh",
        "penstock submit --batch nightly -- ./step.sh",
        "penstock batch close nightly",
    ),
    "schedule": (
        "penstock schedule add report --cron '0 6 * * mon-fri' -- ./report.sh",
        "penstock schedule show report",
    ),
    "schedule add": (
        "penstock schedule add report --cron '0 6 * * mon-fri' --zone Europe/Berlin -- ./report.sh",
        "penstock schedule add poll --every 15m --overlap skip -- ./poll.sh",
        "penstock schedule add backup --in-quietest-hour-before 06:00 -- ./backup.sh",
    ),
    "schedule edit": (
        "penstock schedule edit report --cron '30 6 * * mon-fri'",
        "penstock schedule edit report -- ./report.sh --short",
        "penstock schedule edit report --priority high --max-runtime 2h",
    ),
    "events": ("penstock events -f", "penstock events --job last"),
    "addons": ("penstock addons", "penstock addons mail --weight 200"),
    "pause": ("penstock pause mail", "penstock pause"),
    "drain": ("penstock drain host-2",),
    "token": ("penstock token ls", "penstock token make photos --worker --addon photos"),
    "token make": (
        "penstock token make photos --worker --addon photos",
        "penstock token make board --scope metrics:read --expires 2027-01-01",
    ),
    "db": ("penstock db check", "penstock db backup jobs-backup.db"),
    "db backup": ("penstock db backup jobs-backup.db",),
    "db restore": ("penstock stop", "penstock db restore jobs-backup.db"),
    "simulate": (
        "penstock simulate --set capacity.units=60",
        "penstock simulate --sweep capacity.units=40,60,80 --made-up --jobs 5000",
    ),
    "chaos": ("penstock chaos --kills 5",),
}


def add_examples(command: click.Command, path: str) -> None:
    """Add the examples of a verb, and of the verbs in it, to their help."""
    if path in EXAMPLES:
        # \b keeps click from wrapping the paragraph.
        command.epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[path])])
    if isinstance(command, click.Group):
        for name, verb in command.commands.items():
            add_examples(verb, f"{path} {name}")
