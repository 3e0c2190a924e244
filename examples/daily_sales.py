"""
Yesterday's sales, from raw files to a report: extract, check, join, score, load, publish.

    python examples/daily_sales.py [--picture graph.svg] [--trace trace.json]

The steps are ordinary functions that do not call each other: the names of a step's parameters say which steps it
needs. Reading runs on the I/O lane, joining computes beside it, scoring runs in other processes, and one optional input
(the weather) may fail without failing the report.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import sqlite3
import tempfile
from collections import defaultdict
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import penstock

Row = dict[str, Any]

sales = penstock.Graph("daily sales", env={"day": date, "lake": Path})


# Extract


@sales.node(lane="io")
def partitions(lake: Path, day: date) -> list[Path]:
    return sorted((lake / f"orders/day={day}").glob("*.jsonl"))


@sales.map(over="partitions", lane="io", limit=8)
def orders(partition: Path) -> list[Row]:
    return [json.loads(line) for line in partition.read_text().splitlines()]


@sales.node(lane="io")
def customers(lake: Path) -> dict[str, Row]:
    with (lake / "customers.csv").open(newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


@sales.node(retries=2, retry_delay=0.1, timeout=2)
async def rates(day: date) -> dict[str, float]:
    return json.loads(await fetch(f"https://rates.example/{day}"))  # type: ignore[no-any-return]  # as their page says


@sales.node(on_error="skip_dependents")
async def weather(day: date) -> str:
    return await fetch(f"https://weather.example/{day}")


async def fetch(url: str) -> str:
    """Stands for an HTTP client and two services, one of which is down."""
    await asyncio.sleep(0.03)
    if "weather" in url:
        raise ConnectionError(f"no answer from {url}")
    return '{"EUR": 1.0, "USD": 0.9, "GBP": 1.2}'


# Transform


@sales.node
def valid_orders(orders: list[list[Row]]) -> list[Row]:
    """Each order with a customer and a price, once."""
    seen: dict[str, Row] = {}
    for partition in orders:
        for order in partition:
            if order.get("customer") and order.get("amount", 0) > 0:
                seen.setdefault(order["id"], order)
    return list(seen.values())


@sales.node
def enriched(valid_orders: list[Row], customers: dict[str, Row], rates: dict[str, float]) -> list[Row]:
    return [
        {
            **order,
            "country": customers[order["customer"]]["country"],
            "eur": order["amount"] * rates[order["currency"]],
        }
        for order in valid_orders
        if order["customer"] in customers
    ]


@sales.node
def batches(enriched: list[Row], size: int = 250) -> list[list[Row]]:
    return [enriched[start : start + size] for start in range(0, len(enriched), size)]


@sales.map(over="batches", lane="process")
def suspicious(batch: list[Row]) -> list[str]:
    """Stands for a model: enough arithmetic to be worth a process."""
    suspects = []
    for order in batch:
        score = 0.0
        for step in range(1, 200):
            score += (order["eur"] % (step + 1)) / step
        if order["eur"] > 450 or score > 400:
            suspects.append(order["id"])
    return suspects


@sales.node
def revenue(enriched: list[Row], suspicious: list[list[str]]) -> dict[str, float]:
    """Revenue by country, without suspicious orders."""
    held_back = {order for batch in suspicious for order in batch}
    total: dict[str, float] = defaultdict(float)
    for order in enriched:
        if order["id"] not in held_back:
            total[order["country"]] += order["eur"]
    return dict(total)


# Load and publish


@sales.node(lane="io", retries=1)
def warehouse(lake: Path, day: date, revenue: dict[str, float]) -> int:
    """Replace the rows of the day, so that a second run has the same effect as one."""
    with closing(sqlite3.connect(lake / "warehouse.db")) as db, db:
        db.execute(
            "CREATE TABLE IF NOT EXISTS revenue (day TEXT, country TEXT, eur REAL, PRIMARY KEY (day, country))"
        )
        db.execute("DELETE FROM revenue WHERE day = ?", (str(day),))
        db.executemany(
            "INSERT INTO revenue VALUES (?, ?, ?)", [(str(day), *pair) for pair in revenue.items()]
        )
        return len(revenue)


@sales.node(lane="io")
def report(lake: Path, day: date, revenue: dict[str, float], suspicious: list[list[str]]) -> Path:
    lines = [f"# Sales of {day}", ""]
    lines += [f"- {country}: {eur:,.2f} EUR" for country, eur in sorted(revenue.items())]
    lines += ["", f"{sum(map(len, suspicious))} orders held back for a look."]
    path = lake / f"report-{day}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


@sales.node
def footnote(weather: str) -> str:
    return f"The weather was {weather}."


# Running it


def make_lake(lake: Path, day: date, *, files: int = 12, orders_a_file: int = 250) -> None:
    """Make sample order files, with duplicates and broken rows."""
    dice = random.Random(7)
    people = [f"c{number}" for number in range(400)]
    lake.mkdir(parents=True, exist_ok=True)
    with (lake / "customers.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "country"])
        rows.writerows((person, dice.choice(["DE", "FR", "GB", "US"])) for person in people)
    folder = lake / f"orders/day={day}"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        lines = []
        for order in range(orders_a_file):
            row: Row = {
                "id": f"o{number}-{order}",
                "customer": dice.choice([*people, None]),
                "currency": "USD",
            }
            row |= {
                "amount": round(dice.uniform(-10, 500), 2),
                "currency": dice.choice(["EUR", "USD", "GBP"]),
            }
            lines += [json.dumps(row)] * dice.choice([1, 1, 1, 2])
        (folder / f"part-{number:03}.jsonl").write_text("\n".join(lines) + "\n")


def run(plan: penstock.Plan, lake: Path, day: date) -> penstock.RunResult:
    with penstock.GraphExecutor(compute=2, io=8, processes=2) as executor:
        return executor.run(plan, {"lake": lake, "day": day}, timeout=60, trace=True)


def main() -> None:
    options = argparse.ArgumentParser(description="Yesterday's sales, from raw files to a report.")
    options.add_argument("--picture", type=Path, help="draw the run (needs penstock[pictures])")
    options.add_argument("--trace", type=Path, help="write a trace for ui.perfetto.dev")
    chosen = options.parse_args()
    day = date(2030, 1, 1)
    with tempfile.TemporaryDirectory() as folder:
        lake = Path(folder)
        make_lake(lake, day)
        result = run(sales.compile(), lake, day)
        print(result["report"].read_text())
    print(result)
    for name, why in result.skipped.items():
        print(f"skipped {name}: {why}")
    if result.trace is not None:
        print("critical path:", " -> ".join(result.trace.critical_path()))
        if chosen.trace:
            penstock.write_chrome(chosen.trace, result.trace)
        if chosen.picture:
            chosen.picture.write_text(result.trace.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
