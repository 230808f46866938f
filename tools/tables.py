"""Tables of pages that are made whole from `bench/results`; `tools/figures.py` puts them in."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

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
    """docs/executors.md: what a look costs."""
    kubernetes = read("kubernetes")["rows"]
    times = {
        ("local", "none: the supervisor's journal is read"): [
            row["look_ms"] for row in read("local_look")["rows"]
        ],
        ("Kubernetes, watching", "none: one watch for everything"): [
            row["watchMedianMs"] for row in kubernetes
        ],
        ("Kubernetes, listing", "1 list of pods"): [row["listMedianMs"] for row in kubernetes],
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
        "0.7/0.9": "0.7 / 0.9",
        "0.7/0.6": "0.7 / 0.6",
        "0.7/0.5": "0.7 / 0.5",
        "0.8/0.4": "0.8 / 0.4",
        "0.9/0.3": "0.9 / 0.3",
        "1.0/0.0": "1.0 / 0",
        "0.7/warm": "0.7 / 0.5 growing to 0.9",
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


PLAIN = ("synchronous", "one process", "default")


def quality() -> str:
    """docs/evidence.md: differences are to synchronous training with the same seed."""
    losses: dict[str, dict[int, float]] = {}
    terms: dict[str, tuple[str, str]] = {}
    for run in read("quality")["runs"]:
        losses.setdefault(run["row"], {})[run["seed"]] = run["loss"]
        if "outer" in run:
            terms[run["row"]] = (str(run["rounds"]), run["outer"])
    base, rows = losses["synchronous"], []
    for name in sorted(losses, key=_place):
        kind, _, every = name.partition("@")
        seeds = sorted(losses[name])
        gaps = [losses[name][seed] - base[seed] for seed in seeds]
        gap = f"{mean(gaps):+.3f}"
        if len(gaps) > 1 and kind != "synchronous":
            gap += f" ({', '.join(f'{each:+.3f}' for each in gaps)})"
        each_loss = ", ".join(f"{losses[name][seed]:.3f}" for seed in seeds)
        shown = kind if kind in PLAIN else f"`{kind}`"
        rows.append((shown, every, *terms.get(name, ("", "")), each_loss, gap))
    head = (
        "training | H | rounds | outer lr, momentum | validation loss, each seed | "
        "more than synchronous: mean (each seed)"
    )
    return markdown(head, rows)


def _place(name: str) -> tuple[int, int, str]:
    kind, _, every = name.partition("@")
    return (PLAIN.index(kind) if kind in PLAIN else len(PLAIN), int(every or 0), kind)


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


TABLES = {table.__name__: table for table in (looks, outer, codecs, quality, mesh, links)}
