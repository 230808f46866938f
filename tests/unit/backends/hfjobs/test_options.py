"""What may be said of ranks on Hugging Face Jobs, and which hardware holds one."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import JobHardware
from msgspec.structs import replace

from atoll.backends.hfjobs.executor import read_job
from atoll.backends.hfjobs.flavors import FLAVORS, flavor_for
from atoll.backends.hfjobs.options import HFJobsOptions
from atoll.core.errors import ValidationError
from atoll.core.spec import Resources
from tests.unit.backends.hfjobs.test_render import SPEC


def test_the_flavors_are_those_of_the_client() -> None:
    assert {hardware.value for hardware in JobHardware} == FLAVORS


@pytest.mark.parametrize(
    ("needs", "flavor"),
    [
        ({}, "cpu-basic"),
        ({"gpu_count": 1, "gpu_models": ["T4"]}, "t4-small"),
        ({"gpu_count": 2, "gpu_models": ["h200"]}, "h200x2"),
        ({"gpu_count": 3, "gpu_models": ["L4"]}, "l4x4"),
        ({"gpu_count": 8, "gpu_models": ["L4", "A100"]}, "a100x8"),
        ({"gpu_count": 1, "gpu_models": ["T4", "L40S"], "min_gpu_memory_gb": 40}, "l40sx1"),
    ],
)
def test_the_smallest_flavor_that_fits(needs: dict[str, Any], flavor: str) -> None:
    assert flavor_for(Resources(**needs), None) == flavor


@pytest.mark.parametrize(
    ("needs", "usual", "field"),
    [
        ({"gpu_count": 1}, None, "gpu_count"),
        ({"gpu_count": 1}, "cpu-xl", "gpu_count"),
        ({"gpu_models": ["T4"]}, None, "gpu_models"),
        ({"gpu_count": 1, "gpu_models": ["P100"]}, None, "gpu_models"),
        ({"gpu_count": 16, "gpu_models": ["H200"]}, None, "gpu_count"),
        (
            {"gpu_count": 1, "gpu_models": ["T4"], "min_gpu_memory_gb": 40},
            None,
            "min_gpu_memory_gb",
        ),
    ],
)
def test_what_no_flavor_has_is_named(needs: dict[str, Any], usual: str | None, field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        HFJobsOptions(image="i", flavor=usual).check(replace(SPEC, resources=Resources(**needs)))
    assert refused.value.field == field


def test_a_flavor_of_the_executor_counts_where_no_gpu_is_named() -> None:
    assert flavor_for(Resources(gpu_count=1), "a10g-large") == "a10g-large"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"flavor": "cpu-huge"}, "flavor"),
        ({"store": "file:///x"}, "store"),
        ({"store": "hf://buckets/a"}, "store"),
        ({"secrets": ["A B"]}, "secrets[0]"),
        ({"env": {"A=B": "1"}}, "env"),
        ({"max_runtime_s": 1}, "max_runtime_s"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        HFJobsOptions(**options)
    assert refused.value.field == field


def test_variables_that_the_service_sets_are_refused() -> None:
    options = HFJobsOptions(image="i")
    with pytest.raises(ValidationError, match="Hugging Face Jobs sets those"):
        options.check(replace(SPEC, env={"JOB_ID": "1"}))


class Job:
    """A job as the client shows it."""

    def __init__(self, stage: str, message: str | None = None) -> None:
        self.status = self
        self.stage, self.message = stage, message


@pytest.mark.parametrize(
    ("job", "state", "reason"),
    [
        (Job("SCHEDULING"), "pending", ""),
        (Job("RUNNING"), "running", ""),
        (Job("COMPLETED"), "ended", ""),
        (Job("CANCELED"), "ended", "Deleted"),
        (Job("DELETED"), "ended", "Deleted"),
        (Job("ERROR", "Job timeout"), "ended", "TimeLimit"),
        (Job("ERROR", "OOMKilled"), "ended", "OOMKilled"),
        (Job("ERROR", "exit code 3"), "ended", ""),
        (Job("ERROR"), "ended", ""),
    ],
)
def test_what_is_believed_of_a_stage(job: Job, state: str, reason: str) -> None:
    assert (read_job(job).state, read_job(job).reason) == (state, reason)
