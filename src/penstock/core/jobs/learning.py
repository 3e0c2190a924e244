"""
What the scheduler learns about job types from the trail: how long their jobs run, what they need and spend,
how often they are submitted, and how good the predictions about them were.

A `Sketch` counts observations in buckets that grow by a fixed factor, eight to an octave, so a quantile is
exact to a few percent in any unit. Each observation makes all earlier ones count a little less: after
`HALF_LIFE` more, half. So a job type that has changed is learned again within some hundred jobs, one very
long job does not move the median, and a sketch has at most a few hundred buckets. Sketches can be added.

The duration that a submitter expects is a prior and not the truth. If submitters give one, the sketch
`ratios` learns how real durations relate to it: exact expectations make narrow ranges, and expectations that
are always half of the truth are doubled. Before the first real observation a few invented ones stand for the
expectation.

A size key (the tag `size:NAME` of a job) divides a type: each size is learned by itself, and also with the
type.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import exp, floor, log
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import Struct, field

from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.types import (
    MINUTE,
    SECOND,
    AddonId,
    Constraint,
    EndReason,
    Moment,
    Money,
    RunWhen,
    Span,
)

#: How many types and sizes are kept; those that were not seen for the longest time are dropped.
MOST_TYPES: Final = 500
#: After this many further observations an observation counts half.
HALF_LIFE: Final = 200
#: An expected duration counts as this many observations.
PRIOR_WEIGHT: Final = 3.0
#: The sketch of a size is used from this many observations on; before that, the sketch of the type.
ENOUGH: Final = 5
#: Arrivals count half after this time.
ARRIVALS_HALF_LIFE: Final[Span] = 10 * MINUTE
#: How many scored starts as played are assumed before the real ones, which stretch the ranges of their type.
STRETCH_PRIOR: Final = 50.0
#: The largest factor by which a range grows or shrinks.
MOST_STRETCH: Final = 8.0
SIZE_TAG: Final = "size:"

_STEP: Final = log(2) / 8
_KEPT: Final = 0.5 ** (1 / HALF_LIFE)
_LEAST_WEIGHT: Final = 1e-3
#: The ratio 1 in a sketch of ratios: a sketch counts whole numbers.
ONE: Final = 1_000_000
_MOST_SHAPES: Final = 8
#: Jobs that arrive within this time of each other are one burst.
_TOGETHER: Final[Span] = SECOND // 20
#: The prior: how an expectation may differ from the truth, as factors.
_PRIOR_FACTORS: Final = (0.5, 0.7, 0.85, 1.0, 1.0, 1.2, 1.4, 2.0)
#: Durations that a job of a new type may have, besides those of other types.
_ANY_DURATIONS: Final = (SECOND // 10, SECOND, 10 * SECOND, 100 * SECOND, 1_000 * SECOND)


class Sketch(Struct):
    """
    Observations of whole numbers above zero, by bucket. `count`: how many observations there were in all.
    """

    count: int = 0
    weights: dict[int, float] = field(default_factory=dict)

    @property
    def weight(self) -> float:
        return sum(self.weights.values())

    def observe(self, value: int) -> None:
        weights = {bucket: weight * _KEPT for bucket, weight in self.weights.items()}
        bucket = _bucket(value)
        weights[bucket] = weights.get(bucket, 0.0) + 1.0
        self.weights = {bucket: weight for bucket, weight in weights.items() if weight >= _LEAST_WEIGHT}
        self.count += 1

    def add(self, other: Sketch, share: float = 1.0) -> None:
        """Add what another sketch has observed, at this share of its weight."""
        for bucket, weight in other.weights.items():
            self.weights[bucket] = self.weights.get(bucket, 0.0) + share * weight
        self.count += other.count

    def quantile(self, part: float) -> int | None:
        """The value below which this part of the observations lies. None: there are none."""
        return Distribution.of(self.weights, tail=False).at(part) if self.weights else None

    @property
    def spread(self) -> float:
        """The logarithm of the ratio between the upper and the lower quartile."""
        low, high = self.quantile(0.25), self.quantile(0.75)
        return 0.0 if not low or not high else log(high / low)


def _bucket(value: int) -> int:
    return floor(log(max(1, value)) / _STEP)


class Dice(Protocol):
    """The source of chance, which the caller passes: a `random.Random` with a seed."""

    def random(self) -> float: ...

    def gammavariate(self, alpha: float, beta: float) -> float: ...


class Distribution(Struct, frozen=True):
    """
    A sketch from which values can be drawn.

    With a tail, the next observation falls between any two neighbors of the earlier ones, or beyond the
    largest, with the same probability. So the weight of one observation is spread over each gap below a
    bucket, and one lies beyond the last bucket: the more the large observations differ, the further. If all
    weight stayed in the buckets and the tail came on top, the mean of few, wide observations would be too
    large: by 40 % for 300 observations of a log-normal distribution of width 1.4.
    """

    edges: tuple[float, ...]  # logarithms
    cumulative: tuple[float, ...]  # from 0 to 1, at each edge
    weight: float  # of all observations

    @classmethod
    def of(cls, weights: dict[int, float], *, tail: bool = True, scale: float = 1.0) -> Distribution:
        """The distribution of a sketch's weights. `scale`: a factor for all values."""
        shift = log(scale)
        edges: list[float] = []
        sums: list[float] = []
        total = 0.0
        for bucket in sorted(weights):
            weight, low = weights[bucket], bucket * _STEP + shift
            if not edges or edges[-1] < low - 1e-9:  # the beginning, or a gap
                spread = min(1.0, weight) if tail and edges else 0.0
                total, weight = total + spread, weight - spread
                edges.append(low)
                sums.append(total)
            total += weight
            edges.append(low + _STEP)
            sums.append(total)
        if tail:
            edges.append(edges[-1] + max(_STEP, _mean_excess(edges, sums)))
            sums.append(total + total / (total + 1.0))
        return cls(tuple(edges), tuple(one / sums[-1] for one in sums), sums[-1])

    def redrawn(self, dice: Dice) -> Distribution:
        """
        A random distribution from which the same observations could have come. The fewer they are, the more
        it differs. So results of many such draws include how little is known.
        """
        sums, total = [0.0], 0.0
        for before, after in pairwise(self.cumulative):
            mass = (after - before) * self.weight
            total += dice.gammavariate(mass, 1.0) if mass > 0 else 0.0
            sums.append(total)
        if not total:
            return self
        return Distribution(self.edges, tuple(one / total for one in sums), self.weight)

    def at(self, part: float) -> int:
        """The value below which this part of the observations lies."""
        sums = self.cumulative
        after = min(max(1, bisect_left(sums, part)), len(sums) - 1)
        low, high = sums[after - 1], sums[after]
        inside = (part - low) / (high - low) if high > low else 1.0
        return round(exp(self.edges[after - 1] + inside * (self.edges[after] - self.edges[after - 1])))

    def beyond(self, least: int, part: float) -> int:
        """
        As `at`, but only of the observations above `least`. If there are none, only the time so far is known:
        then half of such runs last twice as long, and one of ten lasts ten times as long.
        """
        below = self._below(least)
        if below >= 1.0 - 1e-9:
            return round(max(1, least) / max(1.0 - part, 0.01))
        return max(least, self.at(below + part * (1.0 - below)))

    def _below(self, value: int) -> float:
        if value < 1:
            return 0.0
        place = log(value)
        after = bisect_right(self.edges, place)
        if after == 0:
            return 0.0
        if after == len(self.edges):
            return 1.0
        low, high = self.edges[after - 1], self.edges[after]
        inside = (place - low) / (high - low)
        return self.cumulative[after - 1] + inside * (self.cumulative[after] - self.cumulative[after - 1])


def _mean_excess(edges: Sequence[float], sums: Sequence[float]) -> float:
    """
    By how much, as a logarithm, the largest observations exceed their lower bound, on average. They are a
    tenth of all, or five.
    """
    total = sums[-1]
    cut = total * min(0.9, max(0.5, 1.0 - 5.0 / total))
    excess = 0.0
    for after in range(bisect_left(sums, cut), len(sums)):
        low, high, mass = edges[after - 1], edges[after], sums[after] - sums[after - 1]
        if not excess:  # the mark lies in this step
            inside = (cut - sums[after - 1]) / mass
            mark = low + inside * (high - low)
            low, mass = mark, (1.0 - inside) * mass
        excess += ((low + high) / 2 - mark) * mass
    return excess / (total - cut)


class Shape(Struct, frozen=True, array_like=True):
    """The properties of submitted jobs of a type that matter for admission."""

    priority: int
    cost_units: int
    constraints: int = 0
    run_when: str = RunWhen.NORMAL
    quiet_for_sec: int = 0
    high: bool = False
    labels: tuple[str, ...] = ()

    def admission_class(self, addon_id: str, job_type: str) -> AdmissionClass:
        return AdmissionClass(
            addon_id=AddonId(addon_id),
            job_type=job_type,
            cost_units=self.cost_units,
            constraints=Constraint(self.constraints),
            run_when=RunWhen(self.run_when),
            quiet_for_sec=self.quiet_for_sec,
            high=self.high,
            labels=self.labels,
        )


class Arrivals(Struct):
    """
    How often jobs of a type are submitted: counts that decay with time. `bursts` counts jobs that are
    submitted together as one.
    """

    jobs: float = 0.0
    bursts: float = 0.0
    since: Moment = 0
    at: Moment = 0
    shapes: list[Shape] = field(default_factory=list)

    def observe(self, at: Moment, shape: Shape, weight: float = 1.0) -> None:
        """Count an arrival. `weight`: above 1 if it stands for others that were not read."""
        at = max(at, self.at)
        self.since = self.since or at
        kept = 0.5 ** ((at - self.at) / ARRIVALS_HALF_LIFE)
        together = self.at and at - self.at < _TOGETHER
        self.jobs = self.jobs * kept + weight
        self.bursts = self.bursts * kept + (0.0 if together else weight)
        self.at = at
        if shape in self.shapes:
            self.shapes.remove(shape)
        self.shapes = [*self.shapes, shape][-_MOST_SHAPES:]

    def per_second(self, now: Moment) -> float:
        """
        The recent rate. For a new type only the time since its first job counts. The first burst counts half,
        because that time begins with it.
        """
        if not self.jobs:
            return 0.0
        half_life = ARRIVALS_HALF_LIFE / SECOND
        seen = max(1.0, (now - self.since) / SECOND)
        kept: float = 0.5 ** (max(0, now - self.at) / ARRIVALS_HALF_LIFE)
        window = half_life / log(2) * (1.0 - 0.5 ** (seen / half_life))
        first = 0.5 * self.burst * 0.5 ** (seen / half_life)
        return float(max(0.0, self.jobs * kept - first) / max(window, 60.0))

    @property
    def burst(self) -> float:
        """How many jobs come together, on average."""
        return max(1.0, self.jobs / self.bursts) if self.bursts else 1.0


class Score(Struct):
    """
    How good the predictions of starts were. Each started job counts one, and later ones make it count less.
    """

    count: int = 0
    weight: float = 0.0
    covered: float = 0.0
    #: The time between the predicted middle and the start, in microseconds.
    errors: Sketch = field(default_factory=Sketch)
    #: That time as a part of the wait since the prediction; `ONE` is the whole wait.
    relative: Sketch = field(default_factory=Sketch)
    #: How far before and after the middle a job started, as a part of the played range on that side.
    early: Sketch = field(default_factory=Sketch)
    late: Sketch = field(default_factory=Sketch)

    def observe(self, prediction: Prediction, started_at: Moment) -> None:
        error = started_at - prediction.middle_at
        self.count += 1
        self.weight = self.weight * _KEPT + 1.0
        self.covered = self.covered * _KEPT + (prediction.low_at <= started_at <= prediction.high_at)
        self.errors.observe(abs(error))
        self.relative.observe(round(ONE * abs(error) / max(started_at - prediction.made_at, 1)))
        if prediction.played_high_at:
            before = prediction.middle_at - prediction.played_low_at
            after = prediction.played_high_at - prediction.middle_at
            self.early.observe(round(ONE * max(0, -error) / max(before, 1)))
            self.late.observe(round(ONE * max(0, error) / max(after, 1)))

    @property
    def coverage(self) -> float | None:
        return self.covered / self.weight if self.weight else None

    @property
    def stretch(self) -> Stretch:
        """The factors by which nine of ten scored starts would be within the range, on each side."""
        return Stretch(_stretch(self.early), _stretch(self.late))


class Stretch(NamedTuple):
    """The factors by which the played ranges of a type must be wider, before and after the middle."""

    early: float = 1.0
    late: float = 1.0


def _stretch(sketch: Sketch) -> float:
    if not sketch.count:
        return 1.0
    weights = dict(sketch.weights)
    for bucket, weight in _AS_PLAYED.items():
        weights[bucket] = weights.get(bucket, 0.0) + weight
    factor = _nine_of_ten(weights) / _nine_of_ten(_AS_PLAYED)
    return min(max(factor, 1 / MOST_STRETCH), MOST_STRETCH)


def _nine_of_ten(weights: dict[int, float]) -> int:
    return Distribution.of(weights, tail=False).at(0.9)


#: Assumed scored starts, as of a play that is right: half of them before the middle, and one of ten beyond
#: the played range. They keep a few starts of one busy time, which depend on each other, from deciding.
_AS_PLAYED: Final = {
    _bucket(round(ONE * part)): STRETCH_PRIOR * share
    for part, share in (
        (0.0, 0.5), (0.2, 0.1), (0.4, 0.1), (0.6, 0.08), (0.75, 0.06), (0.95, 0.06), (1.2, 0.05), (1.6, 0.03), (2.2, 0.02)
    )
}  # fmt: skip


class Prediction(Struct, frozen=True, array_like=True):
    """
    A predicted start, to be scored when the attempt after `fence` starts. `name`: of the type's record. The
    range is the shown one; `played_low_at` and `played_high_at` are its ends before it was stretched.
    """

    job_id: str
    fence: int
    name: str
    made_at: Moment
    low_at: Moment
    middle_at: Moment
    high_at: Moment
    played_low_at: Moment = 0
    played_high_at: Moment = 0


class TypeRecord(Struct):
    """What was learned about one job type, or about one size of it."""

    durations: Sketch = field(default_factory=Sketch)
    #: Real durations over expected ones.
    ratios: Sketch = field(default_factory=Sketch)
    #: The peak in bytes, of runs whose worker reports it.
    memory: Sketch = field(default_factory=Sketch)
    #: The amount in millionths, of runs that spent something.
    spend: Sketch = field(default_factory=Sketch)
    arrivals: Arrivals = field(default_factory=Arrivals)
    score: Score = field(default_factory=Score)
    seen_at: Moment = 0


class ObservedJob(Struct, frozen=True):
    """
    The part of a job that learning reads, without payload and result. `started_at`, `ended_at` and `end` are
    of its last attempt.
    """

    job_id: str
    admission_class: AdmissionClass
    priority: int
    tags: tuple[str, ...]
    expected_sec: float | None
    created_at: Moment
    fence: int
    started_at: Moment | None = None
    ended_at: Moment | None = None
    end: str | None = None
    spent: Money = 0
    settled: bool = False

    @property
    def size(self) -> str:
        return size_of(self.tags)

    @property
    def names(self) -> list[str]:
        """The names of the records that learn from the job."""
        name = record_name(self.admission_class)
        return [name, f"{name} {self.size}"] if self.size else [name]


def size_of(tags: Sequence[str]) -> str:
    return next((tag.removeprefix(SIZE_TAG) for tag in tags if tag.startswith(SIZE_TAG)), "")


def record_name(admission_class: AdmissionClass) -> str:
    """The name of a type's record: addon and type with a blank in between, which neither can have."""
    return f"{admission_class.addon_id} {admission_class.job_type}"


def parts_of(name: str) -> tuple[str, str, str]:
    """Addon, type and size of the record with this name."""
    addon_id, job_type, *size = name.split(" ", 2)
    return addon_id, job_type, "".join(size)


#: Ends by which learning knows how long such a job runs. Other ends cut a run short.
OWN_ENDS: Final = frozenset(
    {
        EndReason.COMPLETED,
        EndReason.JOB_ERROR,
        EndReason.UNAVAILABLE,
        EndReason.WORKER_CRASHED,
        EndReason.MAX_RUNTIME_EXCEEDED,
        EndReason.HARD_CAP_EXCEEDED,
        EndReason.COST_LIMIT_REACHED,
    }
)


class Knowledge:
    """All records by name. `changed`: the names whose records differ from those that were stored."""

    def __init__(self, records: dict[str, TypeRecord] | None = None) -> None:
        self.records = records or {}
        self.changed: set[str] = set()
        self._everything: tuple[int, Sketch] | None = None
        self._version = 0

    def record(self, name: str, now: Moment) -> TypeRecord:
        record = self.records.get(name)
        if record is None:
            record = self.records[name] = TypeRecord()
        record.seen_at = max(record.seen_at, now)
        self.changed.add(name)
        self._version += 1
        return record

    def saw_arrival(self, facts: ObservedJob, weight: float = 1.0) -> None:
        shape = facts.admission_class
        arrived = Shape(
            facts.priority, shape.cost_units, int(shape.constraints), str(shape.run_when), shape.quiet_for_sec,
            shape.high, shape.labels,
        )  # fmt: skip
        self.record(facts.names[0], facts.created_at).arrivals.observe(facts.created_at, arrived, weight)

    def saw_end(self, facts: ObservedJob) -> None:
        """Learn from an attempt that has ended, but not if it was cut short."""
        if facts.started_at is None or facts.ended_at is None or facts.end not in OWN_ENDS:
            return
        duration = max(1, facts.ended_at - facts.started_at)
        for name in facts.names:
            record = self.record(name, facts.ended_at)
            record.durations.observe(duration)
            if facts.expected_sec is not None:
                record.ratios.observe(round(duration * ONE / (facts.expected_sec * SECOND)))
            if facts.spent:
                record.spend.observe(facts.spent)

    def saw_memory(self, names: Iterable[str], peak: int, now: Moment) -> None:
        for name in names:
            self.record(name, now).memory.observe(peak)

    def saw_start(self, prediction: Prediction, started_at: Moment) -> None:
        """Score a prediction."""
        self.record(prediction.name, started_at).score.observe(prediction, started_at)

    def stretch(self, name: str) -> Stretch:
        """By which factors recent ranges of this type were too narrow or too wide."""
        record = self.records.get(name)
        return Stretch() if record is None else record.score.stretch

    def drop_oldest(self) -> list[str]:
        """Drop records beyond `MOST_TYPES`, and return their names."""
        spare = len(self.records) - MOST_TYPES
        if spare <= 0:
            return []
        dropped = sorted(self.records, key=lambda name: self.records[name].seen_at)[:spare]
        for name in dropped:
            del self.records[name]
            self.changed.discard(name)
        return dropped

    def durations(self, name: str, size: str = "", expected_sec: float | None = None) -> Distribution | None:
        """How long such a job will likely run. None: no job has ended yet."""
        record = self.records.get(f"{name} {size}") if size else None
        if record is None or record.durations.count < ENOUGH:
            record = self.records.get(name)
        if expected_sec is not None:
            return self._expected(record, expected_sec)
        if record is not None and record.durations.weights:
            return Distribution.of(record.durations.weights)
        everything = self._all_durations()
        return Distribution.of(everything.weights) if everything.count else None

    def _expected(self, record: TypeRecord | None, expected_sec: float) -> Distribution:
        """The durations by the ratios of the type, or by its durations if those vary less than the ratios."""
        if record is not None and record.durations.count >= 4 * ENOUGH:
            ratios, durations = record.ratios, record.durations
            if not ratios.count or (ratios.count >= 4 * ENOUGH and durations.spread < ratios.spread):
                return Distribution.of(durations.weights)
        weights = {} if record is None else dict(record.ratios.weights)
        for factor in _PRIOR_FACTORS:
            bucket = _bucket(round(factor * ONE))
            weights[bucket] = weights.get(bucket, 0.0) + PRIOR_WEIGHT / len(_PRIOR_FACTORS)
        return Distribution.of(weights, scale=expected_sec * SECOND / ONE)

    def _all_durations(self) -> Sketch:
        """
        The durations of all types, each with the same weight, for a job of a new type. A few invented
        observations are added, so that jobs of a new type are not expected to be short because one other type
        is.
        """
        if self._everything is None or self._everything[0] != self._version:
            everything = Sketch()
            everything.weights = {_bucket(each): 0.5 for each in _ANY_DURATIONS}
            for name, record in list(self.records.items()):
                if not parts_of(name)[2] and (weight := record.durations.weight):
                    everything.add(record.durations, ENOUGH / weight)
            self._everything = (self._version, everything)
        return self._everything[1]

    def sized(self, name: str) -> bool:
        """Whether jobs of this type have sizes."""
        return any(other.startswith(f"{name} ") for other in list(self.records))


class TypeStats(Struct, frozen=True):
    """
    What was learned about a job type, or a size of it, in seconds and bytes; None: nothing. `low` and `high`
    are the 10 % and 90 % quantiles; the figure without such a word is the median.
    """

    addon_id: str
    job_type: str
    size: str
    attempts: int
    duration_low_sec: float | None
    duration_sec: float | None
    duration_high_sec: float | None
    memory_bytes: int | None
    memory_high_bytes: int | None
    spend: float | None
    spend_high: float | None
    arrivals_per_hour: float
    #: How many predicted starts were scored, the part of them that was within the range, and the median
    #: error.
    predictions: int
    coverage: float | None
    error_sec: float | None
    error_share: float | None  # of the wait


def type_stats(name: str, record: TypeRecord, now: Moment) -> TypeStats:
    durations, score = record.durations, record.score
    return TypeStats(
        *parts_of(name),
        attempts=durations.count,
        duration_low_sec=_scaled(durations, 0.1, SECOND),
        duration_sec=_scaled(durations, 0.5, SECOND),
        duration_high_sec=_scaled(durations, 0.9, SECOND),
        memory_bytes=record.memory.quantile(0.5),
        memory_high_bytes=record.memory.quantile(0.9),
        spend=_scaled(record.spend, 0.5, 1_000_000),
        spend_high=_scaled(record.spend, 0.9, 1_000_000),
        arrivals_per_hour=record.arrivals.per_second(now) * 3_600,
        predictions=score.count,
        coverage=score.coverage,
        error_sec=_scaled(score.errors, 0.5, SECOND),
        error_share=_scaled(score.relative, 0.5, ONE),
    )


def _scaled(sketch: Sketch, part: float, by: int) -> float | None:
    value = sketch.quantile(part)
    return None if value is None else value / by


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(TypeRecord)
_PREDICTIONS: Final = msgspec.json.Decoder(Prediction)
#: Before the job id in the name of a stored prediction. No addon begins with it.
PREDICTED: Final = "?"


def encode(record: TypeRecord) -> str:
    """As it is stored. Weights need no more than four digits."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    return _ENCODER.encode(_rounded(plain)).decode()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {str(name): _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def decode(text: str) -> TypeRecord | None:
    """The record in this text. None: it cannot be read, and learning begins again."""
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError:
        return None


def encode_prediction(prediction: Prediction) -> str:
    return _ENCODER.encode(prediction).decode()


def decode_prediction(text: str) -> Prediction | None:
    """The prediction in this text. None: it cannot be read."""
    try:
        return _PREDICTIONS.decode(text)
    except msgspec.DecodeError:
        return None
