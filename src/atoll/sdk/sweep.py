"""Functions as trainings: one with its options, or one with many settings as a sweep.

The name of each training is made of the function's code and its arguments. So the same call, made
again after an interrupt, finds the trainings that have ended or still run, and does the others.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack, overload

from atoll.core.checks import check_int
from atoll.core.describe import describe_end
from atoll.core.errors import AtollError, Conflict, NotFound, ValidationError
from atoll.core.phase import Phase
from atoll.core.settings import GROUP, Settings, name_label
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training, TrainingList
from atoll.sdk import flows
from atoll.sdk.client import Client
from atoll.sdk.effects import Flow, NextChange, Pack, Pause, Send, decode_answer, send
from atoll.sdk.options import DeployOptions, check_options
from atoll.sdk.search import MAX_TRAININGS, StopRule, setting_names, to_start
from atoll.sdk.training import DELETE_S, ColumnTable, DistributedTraining

MAX_AT_ONCE = 10_000  # as many ranks as one training may have
RELIST_S = 0.5  # pause after a broken watch
POLL_S = 2.0  # between two reads of the metrics that a stop rule tests: ranks report every second
MAX_CELL_CHARS = 120  # of a value or an error in a printed table: an exception is named in them
_DIGEST = 6  # characters of it in a name, after the settings
MAX_IN_NAME = 63 - 1 - _DIGEST  # of a DNS label, without the dash and the digest
_PLAIN = {"int": int, "float": float, "str": str, "bool": bool}


class Job(NamedTuple):
    """One training to come: its name, and the settings that it has."""

    at: int
    name: str
    arguments: dict[str, Any]

    @property
    def settings(self) -> Settings:
        """Arguments that are no setting as their text."""
        return {
            name: value if isinstance(value, bool | int | float | str) else repr(value)[:200]
            for name, value in self.arguments.items()
        }


class SweepRow(NamedTuple):
    """One of the settings and what came of it. `error` is empty where it succeeded."""

    arguments: dict[str, Any]
    result: Any
    error: str
    training: DistributedTraining

    @property
    def phase(self) -> str:
        return self.training.last.status.phase.value


class Sweep(Sequence[SweepRow]):
    """The rows of `client.map`, in the order of its settings. `print` shows them as a table."""

    def __init__(self, rows: Sequence[SweepRow]) -> None:
        self._rows = list(rows)

    def __getitem__(self, at: Any) -> Any:
        return self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def results(self) -> list[Any]:
        """What each call returned; None where one failed."""
        return [row.result for row in self._rows]

    @property
    def failed(self) -> list[SweepRow]:
        return [row for row in self._rows if row.error]

    def table(self) -> ColumnTable:
        """Columns: the arguments, then `result`, `phase`, `error`, `name` and `seconds`.

        A result that is a mapping has a column for each of its keys as well. A column that has the
        name of one before it is called `result.lr` or `training.name`.
        """
        columns = ColumnTable()
        for name in _names(row.arguments for row in self._rows):
            columns[name] = [row.arguments.get(name) for row in self._rows]
        parts = [row.result if isinstance(row.result, Mapping) else {} for row in self._rows]
        for name in _names(parts):
            columns[_unused(str(name), "result", columns)] = [part.get(name) for part in parts]
        trainings = [row.training.last for row in self._rows]
        own: dict[str, list[Any]] = {
            "result": self.results,
            "phase": [row.phase for row in self._rows],
            "error": [row.error for row in self._rows],
            "name": [row.training.name for row in self._rows],
            "seconds": [each.status.ran_for(each.created_at) for each in trainings],
        }
        for name, column in own.items():
            columns[_unused(name, "training", columns)] = column
        return columns

    def __str__(self) -> str:
        columns = self.table()
        texts = {
            name: [name, *(_cell(value) for value in columns[name])]
            for name in self._printed(columns)
        }
        widths = [max(map(len, cells)) for cells in texts.values()]
        lines = zip(*texts.values(), strict=True)
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def _printed(self, columns: ColumnTable) -> list[str]:
        """Columns that say something more, errors last because they are long."""
        *_, result, _, error, _, _ = columns
        names = [name for name in columns if name not in (result, error)]
        if any(row.result is not None and not isinstance(row.result, Mapping) for row in self):
            names.append(result)
        return [*names, error] if self.failed else names

    def __repr__(self) -> str:
        return f"<Sweep of {len(self)}: {len(self) - len(self.failed)} succeeded>"


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _unused(name: str, of: str, taken: Container[str]) -> str:
    while name in taken:
        name = f"{of}.{name}"
    return name


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
    return " ".join(text.split())[:MAX_CELL_CHARS]


def jobs_of(
    function: Callable[..., Any], settings: Iterable[Mapping[str, Any]], name: str | None
) -> list[Job]:
    """Raises ValidationError naming the setting, the argument and what would be right."""
    if not callable(function):
        raise ValidationError("function", function, "expected a function")
    if not isinstance(settings, Iterable):
        raise ValidationError("settings", settings, "expected a list of dicts")
    listed = [settings] if isinstance(settings, Mapping) else list(settings)
    check_int("the number of settings", len(listed), 0, MAX_TRAININGS)
    if name is not None:
        name_label("name", name)
        if len(name) > MAX_IN_NAME:
            raise ValidationError("name", name, f"expected at most {MAX_IN_NAME} characters")
    stem, code = name or label_of(function), _code(function)
    jobs = []
    digests: set[str] = set()
    for at, setting in enumerate(listed):
        if not isinstance(setting, Mapping) or not all(isinstance(key, str) for key in setting):
            raise ValidationError(f"settings[{at}]", setting, "expected a dict of arguments")
        check_arguments(function, setting, f"settings[{at}]")
        again = 0  # a setting that is listed twice runs twice
        while (digest := _digest(code, setting, again)) in digests:
            again += 1
        digests.add(digest)
        jobs.append(Job(at, digest, dict(setting)))
    names = setting_names(stem, [job.settings for job in jobs])
    return [job._replace(name=f"{text}-{job.name}") for job, text in zip(jobs, names, strict=True)]


def label_of(function: Callable[..., Any]) -> str:
    """A DNS label made of the function's name, short enough for a digest behind it."""
    while isinstance(function, functools.partial):
        function = function.func
    text = getattr(function, "__name__", "") or type(function).__name__
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_IN_NAME].rstrip("-") or "map"


def _digest(code: str, arguments: Mapping[str, Any], again: int) -> str:
    text = json.dumps([code, dict(arguments), again], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]


def _code(function: Callable[..., Any]) -> str:
    """The function's text, else what stands for it: with other code it is another training."""
    bound = ""
    while isinstance(function, functools.partial):
        bound += repr((function.args, sorted(function.keywords.items())))
        function = function.func
    try:
        return bound + inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return bound + (repr((code.co_code, code.co_names)) if code else repr(function))


def check_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], field: str, args: Any = ()
) -> None:
    """Raises ValidationError for what the function does not take, or lacks, or takes as another
    plain type."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        bound = signature.bind(*args, **arguments)
    except TypeError as error:
        expected = f"{error}: expected {label_of(function)}{signature}"
        raise ValidationError(field, dict(arguments), expected) from error
    for name, value in bound.arguments.items():
        annotation = signature.parameters[name].annotation
        kind = _PLAIN.get(getattr(annotation, "__name__", annotation))
        if kind is None or signature.parameters[name].kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            continue
        check_reply: Any = (int, float) if kind is float else kind
        is_fitting = isinstance(value, check_reply) and (
            kind is bool or not isinstance(value, bool)
        )
        if not is_fitting and value is not signature.parameters[name].default:
            raise ValidationError(f"{field}.{name}", value, f"expected {kind.__name__}")


class SweepRun:
    """One sweep, as a flow: a training for each job, at most so many at once.

    A job whose training succeeded or runs is not run again; one that failed or was cancelled is,
    unless a stop rule holds for it.
    """

    def __init__(
        self,
        client: Client,
        jobs: Sequence[Job],
        resolve: Callable[[Job], tuple[TrainingSpec, Pack | None]],
        concurrency: int | None,
        *,
        stop: Sequence[StopRule] = (),
        on_change: Callable[[], object] = lambda: None,
        poll_s: float | None = None,
    ) -> None:
        at_once = min(len(jobs) or 1, os.cpu_count() or 1) if concurrency is None else concurrency
        check_int("concurrency", at_once, 1, MAX_AT_ONCE)
        self.jobs = jobs
        self.trainings: dict[int, Training] = {}  # by job: as it was last read
        self.stopped: dict[int, str] = {}  # by job: why it was stopped early
        self.running: set[int] = set()
        self._client = client
        self._resolve = resolve
        self._at_once = at_once
        self._stop = stop
        self._on_change = on_change
        self._watch_s = POLL_S if stop and poll_s is None else poll_s or flows.WATCH_S

    def run(self) -> Flow[None]:
        """To the end of all jobs."""
        version = yield from _version()
        while True:
            started = self.trainings
            for job in to_start(self.jobs, started, len(self.running), self._at_once):
                self._take(job.at, (yield from self._begin(job)))
            if not self.running:
                if len(self.trainings) == len(self.jobs):
                    return
                continue
            change = yield NextChange(flows.ALL, version, self._watch_s)
            if change is None:
                if self._watch_s == flows.WATCH_S:
                    yield Pause(RELIST_S)
                version = yield from _version()
                yield from self._relist()
                yield from self._stop_early()
                self._on_change()
                continue
            for at in self.running:
                if self.trainings[at].uid == change.training.uid:
                    self._take(at, change.training, is_removed=change.is_removed)
                    break

    def print_interrupted(self) -> None:
        """What an interrupted call leaves, in one line on stderr."""
        ended = len(self.trainings) - len(self.running)
        sys.stderr.write(
            f"atoll: interrupted with {ended} of {len(self.jobs)} done; "
            f"{len(self.running)} keep running, and the same call continues from there\n"
        )

    def _begin(self, job: Job) -> Flow[Training]:
        spec, pack = self._resolve(job)
        shared = self._client._local_fields(spec)
        while True:
            try:
                return (yield from flows.deploy(spec, shared, os.urandom(16).hex(), pack))
            except Conflict:
                try:
                    known = yield from flows.get(spec.name)
                except NotFound:
                    continue
            if known.spec.command != spec.command:
                raise Conflict(
                    f"{known.display_name!r} exists with another command: choose another name, or "
                    "remove it"
                )
            if known.status.phase not in (Phase.FAILED, Phase.CANCELLED):
                return known
            if known.status.phase is Phase.CANCELLED and (yield from self._check_rules(job, known)):
                return known
            yield from flows.delete(flows.TrainingRef(known.name, known.uid), DELETE_S)

    def _take(self, at: int, training: Training, *, is_removed: bool = False) -> None:
        self.trainings[at] = training
        if training.status.phase.is_terminal or is_removed:
            self.running.discard(at)
            if training.status.phase is not Phase.CANCELLED:
                self.stopped.pop(at, None)  # it was over before the cancel came
        else:
            self.running.add(at)
        self._on_change()

    def _relist(self) -> Flow[None]:
        """Reads what runs: changes may have been missed."""
        for at in list(self.running):
            known = self.trainings[at]
            try:
                newest = yield from flows.read(flows.TrainingRef(known.name, known.uid))
            except NotFound:
                self._take(at, known, is_removed=True)
            else:
                self._take(at, newest)

    def _stop_early(self) -> Flow[None]:
        for at in list(self.running):
            training = self.trainings[at]
            if at not in self.stopped and (yield from self._check_rules(self.jobs[at], training)):
                yield from flows.cancel(flows.TrainingRef(training.name, training.uid))

    def _check_rules(self, job: Job, training: Training) -> Flow[bool]:
        """Whether a stop rule holds; the reason is kept, with the value that decided it."""
        if not self._stop:
            return False
        names = list(dict.fromkeys(rule.metric for rule in self._stop))
        metrics = (yield from flows.newest_metrics(names, [training.name])).items
        newest = {metric.name: metric for metric in metrics if metric.uid == training.uid}
        for rule in self._stop:
            metric = newest.get(rule.metric)
            if metric is not None and rule.holds(float(metric.value), metric.step):
                at_step = "" if metric.step is None else f" at step {metric.step}"
                self.stopped[job.at] = f"{rule}: it was {float(metric.value):g}{at_step}"
                return True
        return False


class MapRun(SweepRun):
    """One call of `client.map`."""

    def __init__(
        self,
        client: Client,
        function: Callable[..., Any],
        jobs: Sequence[Job],
        group: str,
        concurrency: int | None,
        options: Mapping[str, Any],
        *,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(client, jobs, self._spec_of, concurrency)
        self._function = function
        self._group = group
        self._options = options
        self._allow_pickle = allow_pickle

    def _spec_of(self, job: Job) -> tuple[TrainingSpec, Pack | None]:
        from atoll.sdk.config import resolve_training

        options = {
            **self._options,
            "source": functools.partial(self._function, **job.arguments),
            "labels": {GROUP: self._group, **(self._options.get("labels") or {})},
            "settings": {**(self._options.get("settings") or {}), **job.settings},
        }
        return resolve_training(job.name, options)

    def check(self) -> None:
        """Refuses bad options and functions before anything is sent."""
        for job in self.jobs[:1]:
            self._spec_of(job)

    def rows(self) -> Flow[Sweep]:
        yield from self.run()
        rows = []
        for job in self.jobs:
            rows.append((yield from self._row(job)))
        return Sweep(rows)

    def _row(self, job: Job) -> Flow[SweepRow]:
        from atoll.sdk.training import DistributedTraining

        training = self.trainings[job.at]
        handle = DistributedTraining(self._client, training)
        if training.status.phase is not Phase.SUCCEEDED:
            ending = "removed"
            if training.status.phase.is_terminal:
                ending = describe_end(training).removeprefix(f"{training.display_name} ")
            return SweepRow(job.arguments, None, ending, handle)
        who = flows.TrainingRef(training.name, training.uid)
        try:
            result = yield from flows.result(who, 0, allow_pickle=self._allow_pickle)
        except AtollError as error:
            return SweepRow(job.arguments, None, str(error), handle)
        return SweepRow(job.arguments, result, "", handle)


def _version() -> Flow[int]:
    page = decode_answer((yield from send(Send("GET", flows.ALL, {"limit": 1}))), TrainingList)
    return page.resource_version


_SUFFIX_BYTES = 3  # 16 million names: few enough characters to type


class DistributedFunction:
    """A function and the options of its trainings. Calling it calls the function here."""

    def __init__(self, function: Callable[..., Any], options: DeployOptions) -> None:
        for name in ("command", "source", "args"):
            if name in options:
                expected = "expected none: the function is what runs"
                raise ValidationError(name, dict(options)[name], expected)
        check_options(options)
        self.function = function
        self.options = options
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        return self.function(*args, **arguments)

    def local(self, *args: Any, **arguments: Any) -> Any:
        """Calls the function here, in this process, and returns what it returns."""
        return self.function(*args, **arguments)

    def deploy(self, *args: Any, **arguments: Any) -> DistributedTraining:
        """Deploys a call of the function with these arguments, and returns the handle at once.

        `result()` of the handle is what rank 0 returned. Raises ValidationError for arguments that
        the function does not take, before anything is sent.
        """
        name, options = self._call(args, arguments)
        return Client().deploy_distributed(name, **options)

    async def deploy_async(self, *args: Any, **arguments: Any) -> DistributedTraining:
        name, options = self._call(args, arguments)
        return await Client().deploy_distributed_async(name, **options)

    def map(
        self, settings: Iterable[Mapping[str, Any]], *, concurrency: int | None = None
    ) -> Sweep:
        """A training for each of the settings; see `Client.map`."""
        return Client().map(self.function, settings, concurrency=concurrency, **self.options)

    def with_options(self, **options: Unpack[DeployOptions]) -> DistributedFunction:
        """The same function with these options over its own."""
        return DistributedFunction(self.function, {**self.options, **options})

    def _call(self, args: Any, arguments: Mapping[str, Any]) -> tuple[str, DeployOptions]:
        check_arguments(self.function, arguments, "arguments", args)
        name = f"{label_of(self.function)}-{os.urandom(_SUFFIX_BYTES).hex()}"
        return name, {
            **self.options,
            "source": functools.partial(self.function, *args, **arguments),
        }


@overload
def distributed(function: Callable[..., Any], /) -> DistributedFunction: ...
@overload
def distributed(
    **options: Unpack[DeployOptions],
) -> Callable[[Callable[..., Any]], DistributedFunction]: ...
def distributed(function: Any = None, /, **options: Any) -> Any:
    """Makes a function deployable: `train.deploy(lr=0.1)`, and `train.local(lr=0.1)` here.

        @atoll.distributed(world_size=4, gpu_count=1)
        def train(lr: float): ...

    The options are those of `deploy_distributed`.
    """
    if function is not None:
        return DistributedFunction(function, {})
    return lambda body: DistributedFunction(body, options)  # type: ignore[arg-type]
