"""The other side of the HTTP API: a typed client and the SDK worker. `docs/workers.md` shows how they are used."""
