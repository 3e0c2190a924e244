from pathlib import Path

import penstock

ROOT = Path(__file__).parents[1]
#: Those that are tested, which need not be the checkout's: `make mutants` plants its bugs in a copy.
SOURCES = Path(penstock.__file__).parents[1]
