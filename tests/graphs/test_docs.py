"""The page and the example do what they say."""

import importlib
import sqlite3
from contextlib import closing
from datetime import date
from pathlib import Path

import pytest

from penstock.core.calls.graph_plan import NodeStatus
from tests.pages import run_examples

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "graphs.md"


def test_the_examples_of_the_page_run_as_they_stand():
    assert run_examples(PAGE) >= 5


def test_the_page_shows_a_picture_of_the_example():
    sales = importlib.import_module("examples.daily_sales").sales

    picture = (PAGE.parent / "daily_sales.svg").read_text("utf-8")

    assert "(daily_sales.svg)" in PAGE.read_text("utf-8")
    assert all(f">{name}" in picture for name in sales.compile().names)
    assert "critical path" in picture


def test_the_example_makes_its_report(tmp_path):
    example = importlib.import_module("examples.daily_sales")
    day = date(2030, 1, 1)
    example.make_lake(tmp_path, day, files=3, orders_a_file=40)
    result = example.run(example.sales.compile(), tmp_path, day)

    assert (result.status, list(result.errors), list(result.skipped)) == ("ok", ["weather"], ["footnote"])
    assert result.node("report") is NodeStatus.OK
    with closing(sqlite3.connect(tmp_path / "warehouse.db")) as db:
        stored = dict(db.execute("SELECT country, eur FROM revenue"))
    assert stored == pytest.approx(result["revenue"])
    assert all(country in result["report"].read_text() for country in stored)
