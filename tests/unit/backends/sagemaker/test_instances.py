"""Which instance a rank gets."""

from __future__ import annotations

import botocore.session
import pytest

from atoll.backends.sagemaker.instances import CPUS, GPUS, instance_for
from atoll.core.errors import ValidationError
from atoll.core.spec import Resources


@pytest.mark.parametrize(
    ("needs", "usual", "instance"),
    [
        (Resources(), None, "ml.m5.large"),
        (Resources(), "ml.c5.xlarge", "ml.c5.xlarge"),
        (Resources(cpu="3", memory="20Gi"), None, "ml.m5.2xlarge"),
        (Resources(cpu="500m"), None, "ml.m5.large"),
        (Resources(gpu_count=1, gpu_models=["a10g"]), "ml.c5.xlarge", "ml.g5.xlarge"),
        (Resources(gpu_count=2, gpu_models=["L4"]), None, "ml.g6.12xlarge"),
        (Resources(gpu_count=8, gpu_models=["H100"]), None, "ml.p5.48xlarge"),
        (Resources(gpu_count=8, gpu_models=["T4", "V100"]), None, "ml.p3.16xlarge"),
        (Resources(gpu_count=4), "ml.g5.12xlarge", "ml.g5.12xlarge"),
        (Resources(gpu_count=8, gpu_models=["A100"]), None, "ml.p4d.24xlarge"),
        (
            Resources(gpu_count=8, gpu_models=["A100"], min_gpu_memory_gb=80),
            None,
            "ml.p4de.24xlarge",
        ),
    ],
)
def test_the_smallest_that_has_what_is_needed(
    needs: Resources, usual: str | None, instance: str
) -> None:
    assert instance_for(needs, usual) == instance


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (Resources(gpu_count=1, gpu_models=["RTX"]), "gpu_models: 'RTX'.*A10G, A100"),
        (Resources(gpu_count=9, gpu_models=["H100"]), "gpu_count: 9.*at most 8"),
        (Resources(gpu_models=["H100"]), "expected gpu_count above 0"),
        (Resources(cpu="97"), "cpu: '97'.*at most 96 CPUs"),
        (Resources(memory="400Gi"), "memory: '400Gi'"),
        (Resources(gpu_count=1, gpu_models=["T4"], min_gpu_memory_gb=40), "min_gpu_memory_gb: 40"),
    ],
)
def test_what_no_instance_has_is_refused_by_its_field(needs: Resources, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        instance_for(needs, None)


def test_sagemaker_has_all_of_them() -> None:
    model = botocore.session.get_session().get_service_model("sagemaker")
    known = set(model.shape_for("TrainingInstanceType").enum)
    own = {row.name for row in GPUS} | {name for _, _, name in CPUS}
    assert own <= known
