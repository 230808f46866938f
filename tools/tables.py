"""Tables of pages that are made whole from `bench/results`; `tools/figures.py` puts them in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from atoll.core.chart import Curve, Frame, draw_svg
from atoll.diloco.codecs import CODECS, get_codec

RESULTS = Path(__file__).parents[1] / "bench/results"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(head: str, rows: list[tuple[str, ...]]) -> str:
    rule = "|" + "---|" * len(head.split(" | "))
    return "\n".join([f"| {head} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def seconds(ms: float) -> str:
    """Two digits and a unit: `0.16 ms`, `65 ms`, `1.9 s`."""
    value, unit = (ms / 1000, "s") if ms >= 995 else (ms, "ms")
    digits = 2 if value < 0.995 else 1 if value < 9.95 else 0
    return f"{round(value, -1):.0f} {unit}" if value >= 99.5 else f"{value:.{digits}f} {unit}"


def looks() -> str:
    """docs/evidence.md: what an observation costs."""
    kubernetes = read("kubernetes")["rows"]
    times = {
        ("local", "none: the supervisor's journal is read"): [
            row["look_ms"] for row in read("local_look")["rows"]
        ],
        ("Kubernetes, watching", "none: one watch for everything"): [
            row["watchMedianMs"] for row in kubernetes
        ],
        ("Kubernetes, listing", "1 list of pods, of 1, 1 and 2 pages"): [
            row["listMedianMs"] for row in kubernetes
        ],
        (
            "Slurm, real daemons",
            "1 `squeue` in 5, of the whole queue",
        ): _looks("slurm"),
        (
            "Modal, stand-in and S3 API of the tests",
            "1 listing by tag in 5, of 1, 1 and 10 pages",
        ): _looks("modal"),
        (
            "SageMaker, stand-in and S3 API of the tests",
            "1 `ListTrainingJobs` in 5, of 1, 1 and 10 pages",
        ): _looks("sagemaker"),
    }
    rows = [(*names, *map(seconds, each)) for names, each in times.items()]
    return markdown("backend | the question | 1 rank | 100 ranks | 1,000 ranks", rows)


def _looks(backend: str) -> list[float]:
    rows = [row for row in read("look")["rows"] if row["backend"] == backend]
    assert [row["ranks"] for row in rows] == [1, 100, 1000], backend
    return [row["wall_ms"] for row in rows]


def outer() -> str:
    """docs/evidence.md: loss of outer settings above synchronous training; the least is bold."""
    kinds = {
        "default": "0.7 / 0.5 growing to 0.9",
        "default, ramp": "the same after a ramp",
        "0.7/0.9": "0.7 / 0.9",
        "average": "1.0 / 0",
    }
    rows = []
    for each in read("outer").values():
        lost = [each["mean_lost"][kind] for kind in kinds]
        setting = f"{each['replicas']} replicas, {each['rounds']} rounds of {each['sync_every']}"
        cells = [f"**{x:.3f}**" if x == min(lost) else f"{x:.3f}" for x in lost]
        rows.append((setting, *cells))
    return markdown(f"setting | {' | '.join(kinds.values())}", rows)


def codecs() -> str:
    """docs/diloco-reference.md: codecs on normally distributed values."""
    rows, results = [], read("codecs")["codecs"]["normal"]
    assert list(results) == list(CODECS), "run bench/codecs.py: it has not measured these codecs"
    for name, row in CODECS.items():
        each = results[name]
        figures = (f"{each['bits']:.2f}", f"{each['relative_error']:.1%}", str(each["both_mb_s"]))
        means = f"; its means travel as `{row.mean_codec}`" if row.mean_codec else ""
        rows.append((f"`{name}`", *figures, row.purpose + means))
    head = "codec | bits a value | relative error | encode + decode, MB/s a core | for"
    others = [f"`{name}`" for name in CODECS if not get_codec(name).needs_finite]
    finite = f"All codecs but {' and '.join(others)} refuse NaN and infinity."
    return f"{markdown(head, rows)}\n\n{finite}"


# Loss = A * N ** alpha of data parallel (0) and of DiLoCo with so many replicas: arXiv 2503.09799,
# 35M to 2.4B parameters, H = 30, 20 tokens a parameter, everything tuned.
LAW = {
    0: (18.129, -0.0953),
    1: (18.363, -0.0961),
    2: (18.768, -0.0969),
    4: (19.762, -0.0992),
    8: (21.051, -0.1018),
}


def law(replicas: int, parameters: int) -> float:
    """How far the published law, continued to this size, is above data parallel."""
    (a, alpha), (base, base_alpha) = LAW[replicas], LAW[0]
    return float(a / base * parameters ** (alpha - base_alpha) - 1)


class Gap(NamedTuple):
    """How far a row is above synchronous training with the same seeds."""

    each: list[float]
    lr: float
    rounds: int

    def __str__(self) -> str:
        error = f" ± {stdev(self.each):.1%}" if len(self.each) > 1 else ""
        return f"{mean(self.each):+.1%}{error}".replace("%", " %")


def gaps() -> dict[tuple[str, str, int, int, int], Gap]:
    """By size, kind, replicas, period and ramp: at the rate that was best with seed 0."""
    losses: dict[tuple[Any, ...], dict[float, dict[int, float]]] = {}
    rounds = {}
    for run in read("quality")["runs"]:
        row = tuple(run[name] for name in ("size", "kind", "replicas", "sync_every", "ramp"))
        losses.setdefault(row, {}).setdefault(run["lr"], {})[run["seed"]] = run["loss"]
        rounds[row] = run["rounds"]
    best = {row: min(tried, key=lambda lr: tried[lr][0]) for row, tried in losses.items()}
    found = {}
    for row, tried in losses.items():
        plain = (row[0], "synchronous", 1, 0, 0)
        base, own = losses[plain][best[plain]], tried[best[row]]
        each = [own[seed] / base[seed] - 1 for seed in sorted(own) if seed in base]
        found[row] = Gap(each, best[row], rounds[row])
    return found  # type: ignore[return-value]


def quality() -> str:
    """docs/evidence.md: DiLoCo above synchronous training, beside the law."""
    found, sizes, rows = gaps(), read("quality")["settings"]["sizes"], []
    cells = {(list(sizes).index(row[0]), row[3], row[2]) for row in found if row[1] == "default"}
    for at, every, replicas in sorted(cells):
        size = list(sizes)[at]
        plain, ramp = (found.get((size, "default", replicas, every, each), "") for each in (0, 2))
        alone = found.get((size, "alone", replicas, 0, 0), "")
        parameters, steps = sizes[size]["parameters"], sizes[size]["steps"]
        expected = f"{law(replicas, parameters):+.1%}".replace("%", " %") if every == 30 else ""
        label = f"{parameters:,}, {steps:,} steps"
        rounds = "" if not ramp else str(ramp.rounds)
        rows.append(
            (label, str(every), str(replicas), str(plain), str(ramp), rounds, expected, str(alone))
        )
    head = (
        'parameters | H | replicas | `warmup="none"` | `warmup="ramp"` | its rounds | the law | '
        "one replica alone"
    )
    return markdown(head, rows)


def variants() -> str:
    """docs/evidence.md: other ramps and outer rules in one cell."""
    names = {
        ("default", 0): "no ramp",
        ("default", 1): "a ramp of one period of each length",
        ("default", 2): "**of two, the default**",
        ("default", 4): "of four",
        ("ramp by the outer rule", 2): "of two, with outer steps in place of plain averages",
        ("0.9/0.3", 2): "of two, then 0.9 / 0.3",
        ("average", 2): "of two, then plain averages",
        ("0.7/0.9", 0): 'no ramp, 0.7 / 0.9 (`preset="diloco"`)',
        ("torchft", 0): "torchft 0.2.0's DiLoCo, 0.7 / 0.9",
    }
    runs = {
        (run["kind"], run["ramp"]): run
        for run in read("quality")["runs"]
        if (run["size"], run["replicas"], run["sync_every"]) == ("50k", 4, 30)
        and (run["seed"], run["lr"]) == (0, 0.01)
    }
    rows = [
        (label, str(runs[row]["rounds"]), f"{runs[row]['loss']:.3f}")
        for row, label in names.items()
        if row in runs
    ]
    return markdown("50 k parameters, 4 replicas, H = 30, seed 0 | rounds | loss", rows)


def muon() -> str:
    """docs/evidence.md: Muon inside, synchronous and by the settings of `muloco`."""
    best: dict[str, Any] = {}
    for run in read("quality")["runs"]:
        if run["kind"] in ("synchronous, Muon", "muloco"):
            other = best.setdefault(run["kind"], run)
            best[run["kind"]] = min(other, run, key=lambda each: each["loss"])
    base = best["synchronous, Muon"]["loss"]
    rows = [
        (kind, f"{run['lr']:g}", f"{run['loss']:.3f}", f"{run['loss'] / base - 1:+.1%}")
        for kind, run in best.items()
    ]
    head = "50 k parameters, seed 0 | best learning rate | loss | above synchronous"
    return markdown(head, [(*row[:3], row[3].replace("%", " %")) for row in rows])


def quality_svg() -> str:
    """docs/images/quality.svg: the same for H = 30, over replicas."""
    found, sizes = gaps(), read("quality")["settings"]["sizes"]
    curves = []
    for size in sizes:
        for ramp, label in ((0, "none"), (2, "ramp")):
            points = {
                row[2]: 100 * mean(gap.each)
                for row, gap in sorted(found.items())
                if (row[0], row[1], row[3], row[4]) == (size, "default", 30, ramp)
            }
            xs = [math.log2(replicas) for replicas in points]
            notes = [f"{value:+.1f} %" for value in points.values()]
            if len(xs) > 1:
                curves.append(Curve(f"{size}, warmup {label}", xs, list(points.values()), notes))
    smallest = min(each["parameters"] for each in sizes.values())
    heights = [100 * law(replicas, smallest) for replicas in (1, 2, 4, 8)]
    curves.append(Curve("the published law at 50k", [0, 1, 2, 3], heights, [""] * 4))
    return draw_svg(
        curves,
        "Validation loss above synchronous training, H = 30",
        "replicas",
        y_label="%",
        frame=Frame(0, 3.2, -5, 30),
        x_ticks=[(math.log2(count), str(count)) for count in (1, 2, 4, 8)],
        y_ticks=[(value, f"{value:+d} %") for value in range(-5, 31, 5)],
    )


def speeds() -> str:
    """docs/evidence.md: periods by steps and by the clock."""
    rows = [
        (
            f"`{each['sync_every']}`",
            str(each["seed"]),
            ", ".join(f"{busy:.1%}".replace("%", " %") for busy in each["busy"]),
            f"{each['tokens_s']:,}",
            f"{each['of_all_alone']:.1%}".replace("%", " %"),
            f"{each['loss']:.3f}",
        )
        for each in read("speeds")["rows"]
    ]
    head = "`sync_every` | seed | busy: fast, middle, slow | tokens/s | of all alone | loss"
    return markdown(head, rows)


def mesh() -> str:
    """docs/evidence.md: the gate and its wait."""
    times = read("mesh")["times"]
    one, bare = times["urllib, the same key"]["median"], times["bare python"]["median"]
    named = {
        "last host listens": "last of 16 hosts listens, to all 16 `mesh-ready` keys written",
        "link healed": "link of 16 hosts healed, to the same",
        "mesh_wait, key there": "`mesh_wait()` with the key there (one urllib request for it: "
        f"{seconds(one)})",
        "+ mesh_wait": f"`python -c 'from atoll import mesh_wait'` (bare python: {seconds(bare)})",
    }
    cells = ("median", "p90", "p99")
    rows = [(words, *(seconds(times[n][cell]) for cell in cells)) for n, words in named.items()]
    return markdown("what | median | p90 | p99", rows)


def links() -> str:
    """docs/evidence.md: what the link bench sees."""
    named = {
        "100 Mbit/s": "tbf 100 Mbit/s",
        "1 Gbit/s": "tbf 1 Gbit/s",
        "unshaped veth": "veth, unshaped, the processor being the limit",
    }
    rows = [
        (
            named[each["link"]],
            *(f"{each[side]:.3g}" for side in ("ours", "iperf3", "socket")),
            *(f"{each[f'ours_over_{peer}']:.3f}" for peer in ("iperf3", "socket")),
        )
        for each in read("netbench")["links"]
    ]
    return markdown(
        "link | ours, p50 | iperf3 | one bare socket | ours / iperf3 | ours / socket", rows
    )


TABLES = {
    table.__name__: table
    for table in (looks, outer, codecs, quality, variants, muon, speeds, mesh, links)
}
