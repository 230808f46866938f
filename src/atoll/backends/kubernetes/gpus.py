"""Node labels by GPU model. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

# A node has all of these labels; a list names values that are as good.
Labels = dict[str, str | list[str]]
# A list of them: nodes that fit one are as good as nodes that fit another.
GpuNodes = Labels | list[Labels]

PRODUCT = "nvidia.com/gpu.product"
INSTANCE = "node.kubernetes.io/instance-type"
KARPENTER = "karpenter.k8s.aws/instance-gpu-name"
KARPENTER_MEMORY = "karpenter.k8s.aws/instance-gpu-memory"  # MiB of one GPU


def _products(*names: str) -> Labels:
    return {PRODUCT: names[0] if len(names) == 1 else list(names)}


# As NVIDIA's feature discovery labels nodes.
GPU_NODES: dict[str, GpuNodes] = {
    "A10": _products("NVIDIA-A10"),
    "A10G": _products("NVIDIA-A10G"),
    "A100": _products(
        *("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB"),
        *("NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-80GB-PCIe"),
    ),
    "A100-40GB": _products("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "A100-80GB": _products("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "H100": _products("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
    "H200": _products("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "B200": _products("NVIDIA-B200"),
    "B300": _products("NVIDIA-B300", "NVIDIA-B300-SXM6-AC"),
    "L4": _products("NVIDIA-L4"),
    "L40S": _products("NVIDIA-L40S"),
    "T4": _products("Tesla-T4", "NVIDIA-T4"),
    "V100": _products(
        *("Tesla-V100-SXM2-16GB", "Tesla-V100-SXM2-32GB", "Tesla-V100-SXM3-32GB"),
        *("Tesla-V100-PCIE-16GB", "Tesla-V100-PCIE-32GB"),
    ),
}


def _sizes(family: str, sizes: str) -> list[str]:
    return [f"{family}.{size}" for size in sizes.split()]


_G_SIZES = "xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge 24xlarge 48xlarge"
# The instance types of EC2 with whole GPUs of that name.
EKS_TYPES: dict[str, list[str]] = {
    "A10G": _sizes("g5", _G_SIZES),
    "A100": ["p4d.24xlarge", "p4de.24xlarge"],
    "H100": ["p5.4xlarge", "p5.48xlarge"],
    "H200": ["p5e.48xlarge", "p5en.48xlarge"],
    "B200": ["p6-b200.48xlarge"],
    "B300": ["p6-b300.48xlarge"],
    "GB200": ["p6e-gb200.36xlarge"],
    "L4": [*_sizes("g6", _G_SIZES), *_sizes("gr6", "4xlarge 8xlarge")],
    "L40S": _sizes("g6e", _G_SIZES),
    "T4": _sizes("g4dn", "xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge metal"),
    "T4G": _sizes("g5g", "xlarge 2xlarge 4xlarge 8xlarge 16xlarge metal"),
    "V100": [*_sizes("p3", "2xlarge 8xlarge 16xlarge"), "p3dn.24xlarge"],
}


def _on_eks(types: list[str], karpenter: Labels) -> list[Labels]:
    """Every node has its type as a label; Karpenter also knows GPUs of types that come later."""
    return [{INSTANCE: types}, karpenter]


# On EKS: nodes of managed groups by their types, those of Karpenter by its own label too.
EKS_GPU_NODES: dict[str, GpuNodes] = {
    **{name: _on_eks(types, {KARPENTER: name.lower()}) for name, types in EKS_TYPES.items()},
    "A100-40GB": _on_eks(["p4d.24xlarge"], {KARPENTER: "a100", KARPENTER_MEMORY: "40960"}),
    "A100-80GB": _on_eks(["p4de.24xlarge"], {KARPENTER: "a100", KARPENTER_MEMORY: "81920"}),
}


def alternatives(
    models: Iterable[str], table: dict[str, GpuNodes], own: Container[str]
) -> list[dict[str, list[str]]]:
    """The labels of nodes with one of these GPUs: those of any row will do. Empty: all nodes will.

    `own` are the labels that the caller chose values of; the table does not override these.
    """
    rows: list[dict[str, list[str]]] = []
    for model in models:
        nodes = table.get(model.upper(), {})
        for labels in [nodes] if isinstance(nodes, dict) else nodes:
            row = {
                key: [values] if isinstance(values, str) else list(values)
                for key, values in labels.items()
                if key not in own
            }
            if not row:
                return []
            _add(rows, row)
    return rows


def _add(rows: list[dict[str, list[str]]], row: dict[str, list[str]]) -> None:
    """Rows of one and the same label are one row."""
    (key, *others) = row
    for before in rows:
        if not others and list(before) == [key]:
            before[key] += [value for value in row[key] if value not in before[key]]
            return
    rows.append(row)
