"""Bugs in what is shown of graphs and budgets, in the simulation, in the proofs of chaos, and in what is told to OpenTelemetry."""

from __future__ import annotations

SPOTLIGHT = "penstock/local/graphs/spotlight.py"
PLAY = "penstock/simulation/play.py"
LOAD = "penstock/simulation/load.py"
FIGURES = "penstock/simulation/figures.py"
PROOF = "penstock/chaos/proof.py"
TELEMETRY = "penstock/daemon/telemetry.py"
LANES = ("tests/graph/test_spotlight.py",)
SIMULATION = ("tests/simulation",)
CHAOS = ("tests/chaos",)
OTLP = ("tests/http/test_otlp.py", "-k", "not daemon")

MUTANTS = [
    ("spotlight: a run is recorded though nobody looks", SPOTLIGHT, "self.vacant = False\n        self._prefix", "self.vacant = True\n        self._prefix", LANES),
    ("spotlight: after one run every run is recorded", SPOTLIGHT, "            self.vacant = False\n            self._run = run", "            self._run = run", LANES),
    ("spotlight: the values of a run stay", SPOTLIGHT, "            self._run = None\n", "            self._kept = run\n            self._run = None\n", LANES),
    ("spotlight: a huge graph is recorded", SPOTLIGHT, "return self.vacant and len(plan) <= _MOST_NODES", "return self.vacant", LANES),
    ("spotlight: what goes on looks ended", SPOTLIGHT, "None if math.isinf(event.ended) else event.ended", "event.ended", LANES),
    ("spend: a window is judged by the other's limit", "penstock/core/spend.py", "(None, None) if budget is None else (budget.day, budget.month)", "(None, None) if budget is None else (budget.month, budget.day)", ("tests/core/test_spend.py",)),
    ("settings: an addon that only a flag names is forgotten", "penstock/settings/reading.py", "self._addons[path[1]] = None", "pass", ("tests/settings",)),
    ("simulation: a wait counts from the arrival", PLAY, "max(self.arrival.at, self.arrival.intent.earliest_start_at or 0)", "self.arrival.at", SIMULATION),
    ("simulation: a deadline passes unnoticed", PLAY, "        self.keeper.step(self.now)\n", "", SIMULATION),
    ("simulation: units of a run that ended stay in use", PLAY, "self.free[host] += units", "self.free[host] += 0", SIMULATION),
    ("simulation: weights are not heeded", PLAY, "self.store.set_addon(AddonId(addon_id), weight=weight)", "pass", SIMULATION),
    ("simulation: a key makes two jobs one", LOAD, "        idempotency_key=None,\n", "", SIMULATION),
    ("simulation: a job that never started is in time", FIGURES, "(outcome.started is None or outcome.started > deadline)", "(outcome.started is not None and outcome.started > deadline)", SIMULATION),
    ("chaos: a job that is gone is not missed", PROOF, '            yield f"{job_id} is gone"', "            continue", CHAOS),
    ("chaos: a fence may stay as it is", PROOF, "if int(fence) <= last.get(job_id, 0):", "if int(fence) < last.get(job_id, 0):", CHAOS),
    ("chaos: units are counted once too few", PROOF, "if len(held) * COST > UNITS:", "if len(held) * COST > 2 * UNITS:", CHAOS),
    ("telemetry: a histogram counts as Prometheus does", TELEMETRY, "counts = [here - below for", "counts = [here for", OTLP),
    ("telemetry: every refusal is told", TELEMETRY, "elif not sent and not self._refused:", "elif not sent:", OTLP),
    ("telemetry: nothing is sent when it stops", TELEMETRY, "            self._send(_TIMEOUT_MS)\n        self._send(_LAST_WORD_MS)", "            self._send(_TIMEOUT_MS)", OTLP),
]  # fmt: skip
