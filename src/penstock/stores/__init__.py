"""
The stores that keep jobs: memory, SQLite and PostgreSQL. A store decides nothing. The core decides on a
change; the store writes it with its events in one transaction, and only if the rows are still those that the
core saw.
"""
