"""Host memory of a DiLoCo round, as multiples of the model in fp32.

Every replica is a process of its own, or `--processes` of them that share the model by FSDP2: the
model is what one process holds of it. The baseline is what the process has in memory with the
model, the gradients and the inner optimiser in place, before there is a DiLoCo; peaks are those of
the kernel's resident set, above the baseline: while it joins, in a round that saves a checkpoint,
and in one that does not. `beyond` is what the highest of them is above 3 times the model (4 times
with a lossy codec), in MiB. `--source` measures another checkout of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "memory.json"
HERE = Path(__file__).parent.parent / "src"
MIB = 1 << 20


def resident(field: str) -> int:
    """Bytes: VmRSS is what there is, VmHWM the most since the last reset."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def replica(uri: str, rank: int, size: int, options: dict[str, Any]) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    codec, overlap = options["codec"], options["overlap"]
    # A few large tensors and many small ones, as in a language model.
    width = 1024
    rows = options["mib"] * options["processes"] * MIB // 4 // width
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.randn(rows // 2, width))]
        + [torch.nn.Parameter(torch.randn(rows // 32, width)) for _ in range(16)]
    )
    if options["processes"] > 1:
        share_model(model, uri, rank, options)
    total = sum(4 * local(p).numel() for p in model.parameters())
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        local(p.grad).normal_()

    from atoll.diloco import DiLoCo

    inner.step()
    baseline, peaks = resident("VmRSS"), {}

    def note(what: str) -> None:
        peaks[what] = max(peaks.get(what, 0.0), (resident("VmHWM") - baseline) / total)
        reset_peak()

    reset_peak()
    every = 1 + overlap
    with DiLoCo(
        model,
        inner,
        sync_every=every,
        overlap_steps=overlap,
        codec=codec,
        uri=uri,
        rank=rank,
        world_size=size,
        min_replicas=size,
        run_id="run",
        checkpoint_every=3,
    ) as diloco:
        note("join")
        for number in range(1, 7):  # the first one and every third are saved
            for _ in range(every):
                inner.step()
            note("save" if number == 1 or number % 3 == 0 else "round")
        assert diloco.round == 6, diloco.round
        assert all(len(r.members) == size for r in diloco.reports), diloco.reports
    most = (3 if codec == "fp32" else 4) * total
    beyond = (max(peaks.values()) * total - most) / MIB
    return {**peaks, "beyond": beyond}


def local(value: Any) -> Any:
    """What this process has of a parameter."""
    value = value.detach()
    return value.to_local() if hasattr(value, "to_local") else value


def share_model(model: Any, uri: str, rank: int, options: dict[str, Any]) -> None:
    """All processes of the replica call it; each has its piece of every parameter then."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = options["processes"]
    meet = f"file://{uri}.meet.{rank}"
    dist.init_process_group("gloo", init_method=meet, rank=options["process"], world_size=size)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))


def measure(source: Path, size: int, options: dict[str, Any]) -> dict[str, float]:
    """The highest of all replicas; a checkpoint is saved by the first of them."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        command = [sys.executable, __file__, "--uri", f"{folder}/store", "--replicas", str(size)]
        environment = os.environ | {"PYTHONPATH": str(source)}
        if options["processes"] > 1:
            # Only the replica's own rank is told: the processes of a replica have one of their own.
            environment["ATOLL_WORLD_MAX"] = str(size)
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--replica", json.dumps(each)],
                env=environment | {"ATOLL_RANK": str(rank)},
                stdout=subprocess.PIPE,
            )
            for rank in range(size)
            for each in [{**options, "process": at} for at in range(options["processes"])]
        ]
        peaks = [json.loads(process.communicate()[0]) for process in processes]
    return {what: round(max(each[what] for each in peaks), 2) for what in peaks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="of each replica")
    parser.add_argument("--codec", action="append")
    parser.add_argument("--overlap", type=int, action="append")
    parser.add_argument("--source", type=Path, default=HERE, help="folder that holds atoll/")
    parser.add_argument("--label", default="after")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    parser.add_argument("--uri", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        peaks = replica(options.uri, options.rank, options.replicas, json.loads(options.replica))
        print(json.dumps(peaks))
        return
    is_there = options.results.exists()
    results = json.loads(options.results.read_text()) if is_there else {}
    for overlap in options.overlap or [0]:
        for codec in options.codec or ["fp32", "int4"]:
            shape = {
                "mib": options.mib, "codec": codec, "overlap": overlap,
                "processes": options.processes,
            }  # fmt: skip
            peaks = measure(options.source, options.replicas, shape)
            row = {"replicas": options.replicas, **shape, "times_fp32_size": peaks}
            print(options.label, row, flush=True)
            rows = results.setdefault(options.label, [])
            rows[:] = [
                r for r in rows if {**r, "times_fp32_size": 0} != {**row, "times_fp32_size": 0}
            ]
            rows.append(row)
    results["machine"] = {"cpus": os.cpu_count(), "python": platform.python_version()}
    options.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
