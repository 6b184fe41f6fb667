"""`Experiment`: a question, its options, how to measure it and how to show the results.

Code that all experiments share is written here once.

    @dataclass(frozen=True)
    class Config(Options):
        batch: int = option(4, "sequences per rank", least=1)

    def measure(config: Config, context: RankContext, run: Run) -> None:
        run.progress("timing")
        run.add("ours", {"step_p50_ms": …})

    EXPERIMENT = Experiment(Config, measure, View(columns=…, headline=…, reading=…), ranks="many")

The module's name is the experiment's, the first line of its docstring the question. `distlab run
NAME` makes options of `Config`, starts ranks, opens or resumes the run's folder, calls `measure` on
every rank, writes tables, pictures and page, and prints the short table. `distlab show` draws the
same from saved rows.
"""

import argparse
import contextlib
import itertools
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch

from distlab.checkpoint.lock import RunLock, hold
from distlab.comm import RankContext, RankEnvironment
from distlab.comm.context import LONGEST_TIMEOUT_S
from distlab.comm.rank_process import Progress, on_main
from distlab.measure.interleaved import MIN_PAIRS
from distlab.options import (
    Options,
    add_options,
    config_from,
    declared_options,
    given,
    option,
    parser_of,
    shown,
)
from distlab.report import Column, commit, environment
from distlab.report.record import Metrics, Record, Records, json_line, plain, read_json
from distlab.report.terminal import say, say_table, stdout_is_file
from distlab.report.view import View, headline_from, write
from distlab.runs import ROWS, Header, Run, check_names, make_folder, open_run
from distlab.text import for_terminal

__all__ = [
    "Column",
    "Experiment",
    "Metrics",
    "Options",
    "RankContext",
    "Record",
    "Records",
    "Run",
    "TimingOptions",
    "View",
    "headline_from",
    "option",
]

C = TypeVar("C", bound=Options)
MOST_SHOWN = 12  # values of an option in the help of a preset


@dataclass(frozen=True)
class TimingOptions(Options):
    """Numbers of timed steps: `rounds` × `steps`, each round after `warmup` untimed ones."""

    warmup: int = option(2, "untimed steps per round", minimum=1)
    steps: int = option(6, "timed steps per round", minimum=1)
    rounds: int = option(2, "interleaved rounds", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A row needs at least that many samples for an interval of its own.
        if self.steps * self.rounds < MIN_PAIRS:
            raise ValueError(
                f"steps × rounds = {self.steps * self.rounds}: time at least {MIN_PAIRS} steps"
            )


@dataclass(frozen=True)
class FrameOptions(Options):
    """Options of every experiment, in addition to its own."""

    out: str = option("outputs", "folder for all results")
    name: str | None = option(
        None, "name of this run; one that exists is resumed, if its experiment can"
    )
    fresh: bool = option(False, "move an older run of this name away and start over")
    commit: str | None = option(None, "commit to record where the tree has no git")
    json: bool = option(False, "print only the line of JSON")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.out, self.name)


@dataclass(frozen=True)
class DeviceOptions(Options):
    """Options of an experiment that runs in one process."""

    device: str | None = option(
        None, "device to compute on [cuda if there is a GPU]", choices=("cuda", "cpu")
    )


@dataclass(frozen=True)
class RankOptions(Options):
    """Options of an experiment that runs on several ranks."""

    nproc: int | None = option(
        None, "number of ranks to start [all GPUs, or 2 on a CPU]", minimum=1
    )
    backend: str | None = option(
        None, "communication backend [nccl if there are GPUs]", choices=("nccl", "gloo")
    )
    timeout: float = option(
        60.0, "seconds a collective may take", above=0, maximum=LONGEST_TIMEOUT_S
    )
    max_restarts: int = option(
        0, "number of times to restart the ranks after one failed", minimum=0
    )


@dataclass(frozen=True)
class Experiment(Generic[C]):
    """A question, its options, how to measure it and how to show the results.

    Args:
        config: frozen dataclass of `option`s.
        measure: function `measure(config, context, run)`, called on every rank. It adds rows with
            `run.add`.
        view: columns, pictures and sentences that show the rows.
        presets: name → values that replace defaults. `gpu` and `cpu` apply on that kind of device.
            `quick` is `--quick`, and any other name is `--preset NAME`. `NAME-cpu` and `NAME-gpu`
            add to preset NAME on that kind of device. `smoke` is the form for tests, small enough
            for every device.
        ranks: `none` (a calculation: nothing is timed), `one` process without a process group, or
            `many`.
        gpus: number of GPUs that the run needs, except in preset `smoke` and in presets that have a
            form `NAME-cpu`.
        nproc: default number of ranks. None: all GPUs, or two on a CPU.
        prepare: (config, context) → the configuration, with the values that depend on the machine.
            Called on every rank before the run's folder is opened, so that records have the result.
        wrong: rows, also of the parts → reasons to end with exit code 1. Those of the run's own
            rows are its first findings.
        may_change: names of options that may differ when a run is resumed.
        parts: views of the rows that `measure` adds to `run.part(view.name)`, or of the run's own
            rows in a mode.
        own_view: configuration → view of the run's own rows, `view` or one of `parts`, for an
            experiment whose modes have different rows. None: `view`.
    """

    config: type[C]
    measure: Callable[[C, RankContext, Run], None]
    view: View
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ranks: Literal["none", "one", "many"] = "one"
    gpus: int = 0
    nproc: int | None = None
    prepare: Callable[[C, RankContext], C] = lambda config, context: config
    wrong: Callable[[Records], Sequence[str]] = lambda records: ()
    may_change: Sequence[str] = ()
    parts: Sequence[View] = ()
    own_view: Callable[[C], View] | None = None

    def __post_init__(self) -> None:
        # A view may name itself, for example a part. Otherwise the module's name counts.
        name = self.view.name or self.measure.__module__.rpartition(".")[2]
        question = self.view.question or self._doc().strip().partition("\n")[0]
        more = {
            "name": name,
            "question": question,
            "findings": partial(self._findings, self.view.findings),
        }
        # A frozen dataclass has no other way to fill in a field.
        object.__setattr__(self, "view", replace(self.view, **more))

    def _findings(self, others: Callable, records: Records) -> list[str]:
        return [*(f"WRONG: {reason}" for reason in self.wrong(records)), *others(records)]

    @property
    def name(self) -> str:
        """Name of the experiment, which is that of its module."""
        return self.view.name

    def views(self) -> dict[str, View]:
        """Return the view of each name in records: the experiment's own and those of its parts."""
        return {view.name: view for view in (self.view, *self.parts)}

    def parser(self) -> argparse.ArgumentParser:
        """Return a parser of the options of `distlab run NAME`.

        `--help` shows `short_help`, and `--help all` all options.
        """
        parser = parser_of(f"distlab run {self.name}", self._doc(), add_help=False)
        # The help shows the defaults of this machine, which depend on whether it has a GPU.
        defaults = self.preset("", _on_gpu(None))
        own = self._own_options()
        # Options that a base class of the lab declares are shared by several experiments.
        shared = [each.name for each in declared_options(self.config) if each.name not in own]
        add_options(parser.add_argument_group("its own options"), self.config, defaults, own)
        if shared:
            group = parser.add_argument_group("options that experiments share")
            add_options(group, self.config, defaults, shared)

        frame = parser.add_argument_group("options of every experiment")
        frame.add_argument("-h", "--help", action=_Help, nargs="?", short_help=self.short_help)
        # Forms for a device are chosen by the device, so they cannot be asked for.
        presets = [name for name in self.presets if name.rpartition("-")[2] not in ("gpu", "cpu")]
        one_of = frame.add_mutually_exclusive_group()
        if "quick" in presets:
            one_of.add_argument(
                "--quick",
                dest="preset",
                action="store_const",
                const="quick",
                help="run a small form",
            )
        if presets:
            one_of.add_argument("--preset", choices=presets, help="options chosen for a purpose")
        if self.ranks != "none":
            add_options(frame, DeviceOptions if self.ranks == "one" else RankOptions)
        # The frame's options come last, because they matter least for what is measured.
        add_options(frame, FrameOptions)
        return parser

    def short_help(self) -> str:
        """Return the question, examples, the experiment's own options and its presets."""
        question, second, *_ = [*self._doc().split("\n\n"), ""]
        # The second paragraph of a docstring has the examples, if it is indented.
        examples = second if second.startswith(" ") else f"    distlab run {self.name}"
        help = parser_of(f"distlab run {self.name}", f"{question}\n\n{examples}", add_help=False)
        help.usage = argparse.SUPPRESS
        group = help.add_argument_group("its own options [default]")
        add_options(group, self.config, self.preset("", _on_gpu(None)), self._own_options())
        # A wider line would be hard to read, also on a wide terminal.
        width = min(100, shutil.get_terminal_size((100, 24)).columns)
        lines = [
            "presets (--preset NAME, --quick; gpu, cpu and NAME-cpu apply on such a device):",
        ]
        for name, values in self.presets.items():
            settings = ", ".join(f"{field}: {_shortened(value)}" for field, value in values.items())
            lines.append(
                textwrap.fill(f"  {name:<20}  {settings}", width, subsequent_indent=" " * 24)
            )
        lines += [
            "",
            "How it works, and options of model, timing, ranks and the folder of results:",
            f"    distlab run {self.name} --help all",
        ]
        help.epilog = "\n".join(lines)
        return help.format_help()

    def _own_options(self) -> list[str]:
        """Return the fields that the experiment itself declares, not a base class in distlab."""
        package = self.measure.__module__
        own = []
        for base in self.config.__mro__:
            # A package of several modules counts as one experiment.
            if base.__module__ == package or base.__module__.startswith(f"{package}."):
                own += base.__annotations__
        return [each.name for each in declared_options(self.config) if each.name in own]

    def _doc(self) -> str:
        return sys.modules[self.measure.__module__].__doc__ or ""

    def preset(self, name: str, on_gpu: bool) -> dict[str, Any]:
        """Return values that replace defaults: those of the device, then those of the preset."""
        device = "gpu" if on_gpu else "cpu"
        # The device's values first, so that a preset that was asked for wins.
        found = dict(self.presets.get(device, {}))
        # The form of a preset for this kind of device adds to the preset.
        if name:
            found |= {**self.presets[name], **self.presets.get(f"{name}-{device}", {})}
        return found

    def chosen(self, args: argparse.Namespace) -> tuple[C, argparse.Namespace]:
        """Return the configuration from the given options, and the options of every experiment.

        Raises:
            ValueError: a value that is not allowed, or a GPU that is not there.
        """
        frame = argparse.Namespace(preset=getattr(args, "preset", None) or "")
        for options, ranks in (
            (FrameOptions, self.ranks),
            (DeviceOptions, "one"),
            (RankOptions, "many"),
        ):
            # A calculation's own --device is a datasheet's name, not where to compute.
            vars(frame).update(
                asdict(config_from(options, args) if ranks == self.ranks else options())
            )
        if frame.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: this machine has no GPU; leave it out, or give cpu")
        on_gpu = _on_gpu(frame)
        self._require_gpus(frame.preset, on_gpu)
        # Only what was typed counts, and not what a preset sets.
        self.config.check_given(given(self.config, args))
        # The order is the precedence: a preset is over defaults, and the command line over both.
        return config_from(self.config, args, self.preset(frame.preset, on_gpu)), frame

    def _require_gpus(self, preset: str, on_gpu: bool) -> None:
        """Raise ValueError if a run sized for GPUs would compute for hours on a CPU."""
        usable = torch.cuda.device_count() if on_gpu else 0
        if usable >= self.gpus or self._is_small_on_cpu(preset):
            return
        asked = "" if not preset else " --quick" if preset == "quick" else f" --preset {preset}"
        # Presets that would work here are the best advice.
        names = [name for name in self.presets if self._is_small_on_cpu(name) and name != "smoke"]
        small = ["--quick" if name == "quick" else f"--preset {name}" for name in names]
        remedy = f"; {' or '.join(small)} runs a small form here" if small else ""
        raise ValueError(
            f"{self.name}{asked} needs {self.gpus} GPU{'s' if self.gpus > 1 else ''}, and there "
            f"are {usable} to compute on{remedy}"
        )

    def _is_small_on_cpu(self, preset: str) -> bool:
        """Return whether a preset has sizes for a CPU."""
        return preset == "smoke" or f"{preset}-cpu" in self.presets

    def run(self, config: C, context: RankContext, frame: argparse.Namespace) -> int:
        """Open the run, measure, write and print the results. Call it on every rank.

        Returns the exit code.

        Raises:
            OSError, ValueError: on every rank, if the folder cannot be written or holds another
                run.
        """
        progress = Progress(context)
        # Before the folder is opened: a resumed run must find the resolved values in its header.
        config = self.prepare(config, context)
        with (
            run_folder(context, frame.out, self.name, frame.name, fresh=frame.fresh) as folder,
            # The lock keeps two processes from writing into one run.
            hold(folder, context, progress.keep),
            contextlib.closing(progress),
        ):
            run = self.open(config, context, folder, frame.commit)
            if run.header.complete:
                since = for_terminal(run.header.complete)
                progress.keep(
                    f"this run is complete, since {since} ({folder}). --fresh measures it again, "
                    "another --name begins a new one"
                )
                # A complete run is not measured again. But its result decides the exit code, and is
                # printed for programs, as before.
                if context.is_main and (frame.json or stdout_is_file()):
                    view = self.views()[run.header.experiment]
                    rows = view.derived(run.records)
                    print(json_line(view.name, rows, folder, view.findings_of(rows)), flush=True)
                return self._exit_code(run, run.records)
            run.progress, run.notice = progress, progress.keep
            run.show = partial(self.show, run, progress, json_only=frame.json)
            # On every rank. Only rank 0 writes what follows.
            self.measure(config, context, run)
            progress.close()
            return self.finish(run, json_only=frame.json) if context.is_main else 0

    def open(
        self, config: C, context: RankContext, folder: Path, default: str | None = None
    ) -> Run:
        """Begin or resume the run in a folder on rank 0.

        Returns it, with the rows that are already there, on every rank.
        """
        # The environment of a calculation must not depend on a GPU that it does not use.
        where = environment("cpu" if self.ranks == "none" else context.device)
        view = self.view if self.own_view is None else self.own_view(config)
        header = Header(
            view.name, plain(asdict(config)), context.world_size, where, commit(default)
        )
        # Rank 0 reads the folder and sends the run, so that all ranks resume alike.
        run = on_main(context, lambda: open_run(header, folder, self.may_change))
        run.is_main = context.is_main
        return run

    def show(self, run: Run, progress: Progress, *, json_only: bool = False) -> None:
        """Write tables, pictures and page of the rows so far, and print the short table."""
        progress.close()
        for view, records, _ in self._written(run):
            if not json_only:
                say_table(view, records)
        run.shown = True

    def finish(self, run: Run, *, json_only: bool = False) -> int:
        """Write everything of a finished run and print what was not printed yet.

        Returns 1 if something is wrong, else 0.
        """
        own: Records = ()
        try:
            for view, records, page in self._written(run):
                is_own = view.name == run.header.experiment
                # A table that was shown before the explanation is not printed again.
                say(view, records, page, table=not run.shown, quiet=json_only, line=is_own)
                if is_own:
                    own = records
        except OSError:
            # A page that cannot be written must not hide what was measured.
            if not (json_only or run.shown):
                view = self.views()[run.header.experiment]
                say_table(view, view.derived(run.records))
            raise
        run.complete()
        return self._exit_code(run, own)

    def _exit_code(self, run: Run, own: Records) -> int:
        """Return 1 if a row of the run or of its parts is wrong, else 0.

        Args:
            own: rows of the run itself, with what the view derives.
        """
        records = list(own)
        # From the files, because a run that was complete before has not made its parts again.
        for file in sorted(run.path.glob(f"parts/*/{ROWS}")):
            records += read_json(file)
        return 1 if self.wrong(records) else 0

    def _written(self, run: Run) -> Iterator[tuple[View, Records, Path]]:
        """Write tables, pictures and page of the parts, then of the run itself.

        Yields (view, records with what the view derives, page) for each.
        """
        # Parts come first, so that the run's own findings are the last lines.
        parts = {name: part for name, part in run.parts.items() if part.records}
        for name, rows in {**parts, run.header.experiment: run}.items():
            view = self.views()[name]
            records = view.derived(rows.records)
            yield view, records, write(view, records, rows.path)


class _Help(argparse.Action):
    """Action of `--help`, which prints the short help, and of `--help all`, which prints it all."""

    def __init__(self, *, short_help: Callable[[], str], **options: Any) -> None:
        help = "show the most important options; --help all shows these too"
        super().__init__(default=argparse.SUPPRESS, metavar="all", help=help, **options)
        self.short_help = short_help

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print the help and end the command."""
        print((self.short_help() if values is None else parser.format_help()).rstrip())
        parser.exit()


def _shortened(value: Any) -> str:
    """Return a preset's value as it is written on the command line, long lists by their ends."""
    if isinstance(value, tuple) and len(value) > MOST_SHOWN:
        return f"{shown(value[0])} … {shown(value[-1])} ({len(value)} values)"
    return shown(value)


@contextlib.contextmanager
def run_folder(
    context: RankContext, root: str, experiment: str, name: str | None, *, fresh: bool = False
) -> Iterator[Path]:
    """Make a run's folder on rank 0 and yield it on every rank.

    If the run is refused and wrote nothing, its folder is removed at the end. Every rank must
    enter. If the folder cannot be written, all ranks raise the same error.

    Args:
        fresh: move an older run of this name away. A run that is still running is refused, and a
            restarted rank keeps its own run.
    """
    path = Path(root) / experiment / (name or "")

    def made(lock: RunLock | None = None) -> Path:
        if lock is not None:
            number = next(
                n for n in itertools.count(1) if not path.with_name(f"{name}-old-{n}").exists()
            )
            lock.folder = path.rename(path.with_name(f"{name}-old-{number}"))
        return make_folder(root, experiment, name)

    fresh = fresh and name is not None and RankEnvironment.read().restarts == 0
    if on_main(context, lambda: fresh and path.is_dir()):
        with hold(path, context, Progress(context).keep) as lock:
            folder = on_main(context, lambda: made(lock))
    else:
        folder = on_main(context, made)
    try:
        yield folder
    finally:
        if context.is_main:
            with contextlib.suppress(OSError):
                folder.rmdir()


def lone_context(device: str | None = None) -> RankContext:
    """Return the context of a one-process experiment: rank 0 of 1, without a process group."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return RankContext(0, 0, 1, torch.device(kind), "none", None)


def _on_gpu(frame: argparse.Namespace | None) -> bool:
    if frame is not None and (frame.device == "cpu" or frame.backend == "gloo"):
        return False
    return torch.cuda.is_available()
