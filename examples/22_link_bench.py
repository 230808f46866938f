"""A training whose link between two hosts is measured as it starts.

python examples/22_link_bench.py

The measurement runs beside the ranks, or before them with `bench_require_gbps`: a link that is
slower then stops the training before it costs anything. On one machine it is the loopback.
"""

import time

import atoll


def train() -> None:
    """What each rank runs."""
    for step in range(20):
        time.sleep(0.1)
        print(f"step {step}", flush=True)


with (
    atoll.Client() as client,
    client.deploy_distributed(
        "link-bench",
        source=train,
        world_size=atoll.WorldSize(min=2, target=2, max=2),
        bench="on-start",
        bench_require_gbps=0.001,
    ) as training,
):
    print(training.wait_until_complete(timeout=120))
    link = training.bench
    if link is None:
        raise SystemExit(f"no measurement: {training.bench_diagnostics}")
    print(f"{link.probe_node_a} -> {link.probe_node_b}: {link.busbw_gbps_p50:.2f} Gbit/s (median)")
    print(f"latency with 1 MiB: {link.latency_us_at_1mib:.0f} us")
