"""A training that measures the link between two of its hosts when it starts.

python examples/22_link_bench.py

The measurement runs while the ranks run. With `bench_require_gbps`, it runs before them, and a
slower link ends the training before it costs anything. On one machine, it measures the loopback.
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
