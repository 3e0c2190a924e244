#!/bin/sh
# Make a virtual environment from a hash-locked list: setup-venv.sh DIRECTORY LOCKFILE
# Uses uv where there is one, because it is quick; pip otherwise, because it is always there.
# --no-deps: the list is complete, and pip would look for psycopg[pool] beyond it, because the list names psycopg without its extras.
set -eu
dir=$1 lock=$2 python=${PYTHON:-python3}

"$python" - <<'PY' || { echo "Penstock needs Python 3.11 or newer; name one with make PYTHON=..." >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

if command -v uv >/dev/null 2>&1 \
    && uv venv --quiet --clear --python "$python" "$dir" \
    && uv pip install --quiet --python "$dir/bin/python" --no-deps --require-hashes -r "$lock" \
    && uv pip install --quiet --python "$dir/bin/python" --no-deps --no-build-isolation -e .; then
    exit 0
fi
"$python" -m venv --clear "$dir"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$lock"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
