"""A typed client of the HTTP API, and the SDK worker. `docs/workers.md` shows how to use them."""
