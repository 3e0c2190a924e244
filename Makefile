# The two commands: `make run` and `make test`. Both set up what they need in .venv from Python 3.11 alone.
PYTHON ?= python3
BIN := .venv/bin
SOAK ?= 10
FUZZ ?= 100

# Workers are started by the hundred here; let them find compiled code.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: container service sbom docs docs-serve test-migrate first-minute bench-jobs help run demo test test-cluster lint types check soak fuzz mutants bench bench-pools bench-graphs bench-against bench-page walks size texts screenshots chromium pgbouncer lock format

help:  ## this list
	@grep -hE '^[a-z.-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

run: .venv  ## the scheduler with its HTTP API and two add-ons at work on sample jobs; Ctrl-C ends it
	$(BIN)/python -m examples.demo.scheduler

demo: .venv  ## worker pools: a bounded pipeline under load, live in the terminal
	$(BIN)/python -m examples.demo

test: .venv chromium pgbouncer  ## the tests
	$(BIN)/python -m pytest -n auto --dist worksteal

test-cluster: .venv-cluster  ## the tests of workers on a cluster: a real Ray cluster on this machine
	.venv-cluster/bin/python -m pytest tests/cluster

test-migrate: .venv-migrate  ## the migration guides: Celery, RQ (with redis-server), Huey and APScheduler beside Penstock
	.venv-migrate/bin/python -m pytest tests/migrate

docs: .venv-docs  ## the documentation as a site, in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet
	@! grep -rlE '<(script|link|img)[^>]+(src|href)="?https?:' build/site --include=*.html || { echo "a page loads from another host"; exit 1; }
	@echo "build/site/index.html"

docs-serve: .venv-docs  ## the same, served on loopback and built again when a page changes
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs serve

lint: .venv  ## ruff, and the layer rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv  ## mypy, strict; and basedpyright over the examples
	$(BIN)/mypy
	$(BIN)/basedpyright

soak: .venv chromium pgbouncer  ## the same tests with numbers SOAK times as big (10): kills, random schedules, simulation seeds
	PENSTOCK_SOAK=$(SOAK) $(BIN)/python -m pytest -n auto --dist worksteal --timeout 3600

fuzz: .venv  ## drive the HTTP API by its own description, FUZZ examples per operation (100)
	$(BIN)/python tests/server/fuzz.py $(FUZZ)

mutants: .venv .venv-cluster chromium pgbouncer  ## plant known bugs, one at a time, and see that the tests find each
	$(BIN)/python tests/mutants/run.py
	.venv-cluster/bin/python tests/mutants/run.py -j 1 cluster:

bench: bench-pools bench-graphs bench-jobs  ## measure ourselves and the peers, in turns

bench-pools: .venv-bench  ## worker pools against the peers
	.venv-bench/bin/python -m bench.pools

bench-graphs: .venv-bench  ## graphs against the peers
	.venv-bench/bin/python -m bench.graphs

bench-jobs: .venv-bench  ## durable jobs against the peers (needs redis-server, postgresql and task-spooler: Debian's are fetched when root)
	@command -v redis-server >/dev/null && command -v tsp >/dev/null && ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 \
	    || RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends redis-server postgresql task-spooler
	.venv-bench/bin/python -m bench.jobs

BASE ?= main
ROUNDS ?= 5
bench-against: .venv-bench  ## our own figures of commit BASE and of this tree, in turns (ROUNDS, 5; needs postgresql)
	.venv-bench/bin/python -m bench.against $(BASE) --rounds $(ROUNDS)

walks: .venv  ## how many functions and files one operation goes through, with the files of each walk
	$(BIN)/python -m bench.walks --files

texts: .venv  ## every sentence that a user can meet, on one page for reading (build/texts.md)
	$(BIN)/python -m tests.texts

size: .venv  ## code lines by package
	$(BIN)/python bench/size.py

bench-page: .venv chromium  ## what ten open pages cost the scheduler
	$(BIN)/python -m bench.page

first-minute: .venv chromium  ## build wheel and sdist, install each on its own, see a job run on the page, under two minutes
	$(BIN)/python -m tests.web.first_minute

container: .venv  ## build the image on a base from debootstrap and run it (needs root, buildah and debootstrap)
	$(BIN)/python -m build --wheel --outdir dist .
	ops/try-container

service: .venv  ## boot systemd in a container and drive `penstock service` with it (needs root and systemd-container)
	$(BIN)/python -m build --wheel --outdir dist .
	ops/try-service

sbom: .venv  ## dist/penstock-VERSION.cdx.json: what a release contains, as CycloneDX
	$(BIN)/python ops/sbom.py

screenshots: .venv chromium  ## the pictures of the documentation: every page, and the command in a terminal
	$(BIN)/python -m tests.web.pictures

# The page is tested in a real browser. Without one those tests are skipped, and say so.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get install -y -q --no-install-recommends chromium >/dev/null 2>&1 || \
		{ apt-get update -q >/dev/null 2>&1 && apt-get install -y -q --no-install-recommends chromium >/dev/null; } || \
		echo "Chromium could not be installed: the tests of the page are skipped"; \
	else echo "The tests of the page need Chromium (Debian: sudo apt-get install chromium); they are skipped"; fi

# The store is tested behind a real pooler. Without one those tests are skipped, and say so.
pgbouncer:
	@command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get install -y -q --no-install-recommends pgbouncer >/dev/null 2>&1 || \
		{ apt-get update -q >/dev/null 2>&1 && apt-get install -y -q --no-install-recommends pgbouncer >/dev/null; } || \
		echo "PgBouncer could not be installed: the tests behind a pooler are skipped"; \
	else echo "The tests behind a pooler need PgBouncer (Debian: sudo apt-get install pgbouncer); they are skipped"; fi

check: lint types docs test-cluster test-migrate first-minute test  ## all that CI runs

format: .venv  ## rewrite in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv: .venv/.ready  ## the environment for everything but the benchmarks

.venv/.ready: requirements.lock pyproject.toml
	PYTHON=$(PYTHON) sh ./setup-venv.sh .venv requirements.lock
	$(BIN)/python -m penstock.web.vendor
	@touch $@

.venv-bench: .venv-bench/.ready  ## the environment of the benchmarks: the peers and nothing of ours but the package

.venv-bench/.ready: requirements-bench.lock pyproject.toml
	PYTHON=$(PYTHON) sh ./setup-venv.sh .venv-bench requirements-bench.lock
	@touch $@

.venv-cluster: .venv-cluster/.ready  ## the environment of `make test-cluster`

.venv-cluster/.ready: requirements-cluster.lock pyproject.toml
	PYTHON=$(PYTHON) sh ./setup-venv.sh .venv-cluster requirements-cluster.lock
	@touch $@

.venv-docs: .venv-docs/.ready  ## the environment of `make docs`

.venv-docs/.ready: requirements-docs.lock pyproject.toml
	PYTHON=$(PYTHON) sh ./setup-venv.sh .venv-docs requirements-docs.lock
	@touch $@

.venv-migrate: .venv-migrate/.ready  ## the environment of `make test-migrate`

.venv-migrate/.ready: requirements-migrate.lock pyproject.toml
	PYTHON=$(PYTHON) sh ./setup-venv.sh .venv-migrate requirements-migrate.lock
	@touch $@

lock:  ## make the lock files anew (needs uv)
	uv pip compile -q --universal --generate-hashes --no-header --python-version 3.11 pyproject.toml --extra pools --extra otel --extra otlp --extra pictures --extra jobs --extra postgres --extra plots --extra demo --group dev -o requirements.lock
	uv pip compile -q --universal --generate-hashes --no-header --python-version 3.11 pyproject.toml --extra pools --extra jobs --extra postgres --extra demo --group bench -o requirements-bench.lock
	uv pip compile -q --universal --generate-hashes --no-header --python-version 3.11 pyproject.toml --extra jobs --extra postgres --group docs -o requirements-docs.lock
	uv pip compile -q --universal --generate-hashes --no-header --python-version 3.11 pyproject.toml --extra jobs --group migrate -o requirements-migrate.lock
	uv pip compile -q --universal --generate-hashes --no-header --python-version 3.11 pyproject.toml --extra cluster --group cluster-tests -o requirements-cluster.lock
