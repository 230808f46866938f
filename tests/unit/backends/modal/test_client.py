"""The unmodified client against the stand-in; each place where Modal's own word is false."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import modal
import pytest

from atoll.backends.modal.client import AlreadyStarted, Sandboxes, answer, read_end
from atoll.backends.modal.options import Bucket, ModalOptions
from atoll.backends.records import JobState
from atoll.core.errors import Permanent, Temporary
from tests.support.modal_stand_in import ModalStandIn, StandInSandbox

SLEEP = ["sleep", "600"]


def request(command: list[str], *, rank: int = 0, attempt: int = 0, **more: Any) -> dict[str, Any]:
    tags = {"atoll-uid": "u1", "atoll-rank": str(rank), "atoll-attempt": str(attempt)}
    name, image = f"u1-r{rank}-a{attempt}", "python:3.11-slim"
    return {"name": name, "tags": tags, "command": command, "image": image, "timeout": 60, **more}


async def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def ended(box: StandInSandbox) -> None:
    await until(lambda: not box.is_running)


@pytest.mark.parametrize("gpu", [None, "H100:2"], ids=["V2", "V1"])
def test_a_sandbox_lives_and_ends_with_its_own_code(
    stand_in: ModalStandIn, gpu: str | None
) -> None:
    async def run() -> None:
        boxes = Sandboxes(ModalOptions())
        made = await boxes.create(request(SLEEP, gpu=gpu))
        assert await boxes.running({"atoll-uid": "u1"}) == {made}
        assert await boxes.running({"atoll-uid": "u2"}) == set()
        assert await boxes.end_of(id=made) is None
        tags = await boxes.tags(made)
        assert (tags["atoll-rank"], tags["atoll-attempt"]) == ("0", "0")
        other = await boxes.create(request(["sh", "-c", "exit 7"], rank=1, gpu=gpu))
        await ended(stand_in.sandboxes[other])
        end = await boxes.end_of(id=other)
        assert end is not None
        assert (end.reason, end.message) == ("", "Modal says failure, exit code 7")

    asyncio.run(run())


def test_what_is_asked_for_arrives(stand_in: ModalStandIn) -> None:
    stand_in.secrets = {"aws": {"KEY": "secret-value"}, "registry": {"REGISTRY_USERNAME": "u"}}
    stand_in.secrets["registry"]["REGISTRY_PASSWORD"] = "p"
    stand_in.volumes = {"data": "vo-1"}
    options = ModalOptions(
        secrets=["aws"],
        registry_secret="registry",
        volumes={"/data": "data"},
        buckets={"/in": Bucket(bucket="b", prefix="p/", secret="aws", read_only=True)},
        region=["us-east", "eu"],
        cloud="aws",
    )

    async def run() -> str:
        boxes = Sandboxes(options)
        return await boxes.create(
            request(["sh", "-c", "exit $KEY"], gpu="A100-80GB:4", cpu=2.5, memory=4096)
        )

    box = stand_in.sandboxes[asyncio.run(run())]
    asked = box.definition.definition
    assert (asked.resources.gpu_config.gpu_type, asked.resources.gpu_config.count) == (
        "A100-80GB",
        4,
    )
    assert (asked.resources.milli_cpu, asked.resources.memory_mb) == (2500, 4096)
    assert list(asked.scheduler_placement.regions) == ["us-east", "eu"]
    assert asked.cloud_provider_str == "aws"
    assert [(m.mount_path, m.volume_id) for m in asked.volume_mounts] == [("/data", "vo-1")]
    (bucket,) = asked.cloud_bucket_mounts
    assert (bucket.bucket_name, bucket.mount_path, bucket.key_prefix) == ("b", "/in", "p/")
    assert bucket.read_only
    assert asked.timeout_secs == 60
    assert box.env["KEY"] == "secret-value"
    assert stand_in.images == [["FROM python:3.11-slim"]]


def test_an_image_may_be_an_object_of_the_client(stand_in: ModalStandIn) -> None:
    image = modal.Image.from_registry("debian:12", add_python=None)
    asyncio.run(Sandboxes(ModalOptions()).create(request(SLEEP, image=image)))
    assert stand_in.images == [["FROM debian:12"]]


def test_a_name_that_runs_is_not_started_again(stand_in: ModalStandIn) -> None:
    async def run() -> None:
        boxes = Sandboxes(ModalOptions())
        await boxes.create(request(SLEEP))
        with pytest.raises(AlreadyStarted):
            await boxes.create(request(SLEEP))

    asyncio.run(run())
    assert len(stand_in.running()) == 1


def test_a_name_that_has_ended_is_taken_again(stand_in: ModalStandIn) -> None:
    """So the name alone does not keep an attempt from running twice."""

    async def run() -> None:
        boxes = Sandboxes(ModalOptions())
        first = await boxes.create(request(["true"]))
        await ended(stand_in.sandboxes[first])
        assert await boxes.create(request(["true"])) != first

    asyncio.run(run())


def test_terminated_says_nothing_of_the_code(stand_in: ModalStandIn) -> None:
    """Modal says 137 of every sandbox that was terminated, and so it would look out of memory."""

    async def run() -> None:
        boxes = Sandboxes(ModalOptions())
        made = await boxes.create(request(SLEEP))
        await boxes.terminate(made)
        await ended(stand_in.sandboxes[made])
        sandbox = await modal.Sandbox.from_id.aio(made)
        assert sandbox.returncode == 137
        end = await boxes.end_of(id=made)
        assert end is not None
        assert (end.reason, end.message) == ("Deleted", "Modal says terminated")
        await boxes.terminate(made)

    asyncio.run(run())


def test_timed_out_says_nothing_of_the_code(stand_in: ModalStandIn) -> None:
    """Modal says 124 of every sandbox whose life is over."""

    async def run() -> None:
        boxes = Sandboxes(ModalOptions())
        made = await boxes.create(request(SLEEP, timeout=1))
        await ended(stand_in.sandboxes[made])
        sandbox = await modal.Sandbox.from_id.aio(made)
        assert sandbox.returncode == 124
        end = await boxes.end_of(id=made)
        assert end is not None
        assert (end.reason, end.message) == ("TimeLimit", "Modal says timeout")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("KERNEL_OOM_KILL", "OOMKilled"),
        ("MEMORY_MANAGER_EVICTION", "OOMKilled"),
        ("INTERNAL_FAILURE", "HostLost"),
    ],
)
def test_the_wire_knows_more_than_the_code(
    stand_in: ModalStandIn, status: str, reason: str
) -> None:
    async def run() -> None:
        boxes = Sandboxes(ModalOptions())
        made = await boxes.create(request(SLEEP))
        box = stand_in.sandboxes[made]
        await until(lambda: box.process)
        stand_in.lose(box, status)
        await ended(box)
        end = await boxes.end_of(id=made)
        assert end is not None
        assert end.reason == reason
        assert "exit code 137" in end.message

    asyncio.run(run())


def test_an_ended_sandbox_is_in_no_list(stand_in: ModalStandIn) -> None:
    async def run() -> None:
        boxes = Sandboxes(ModalOptions())
        made = await boxes.create(request(["true"]))
        await ended(stand_in.sandboxes[made])
        assert await boxes.running({"atoll-uid": "u1"}) == set()
        assert (await boxes.end_of(id=made)) is not None
        by_name = await boxes.end_of(name="u1-r0-a0")
        assert by_name is not None
        assert by_name.message == "Modal says success, exit code 0"

    asyncio.run(run())


def test_a_listing_is_one_question_and_one_page_of_it(stand_in: ModalStandIn) -> None:
    async def run() -> None:
        boxes = Sandboxes(ModalOptions())
        made = {await boxes.create(request(SLEEP, rank=rank)) for rank in range(3)}
        stand_in.calls.clear()
        assert await boxes.running({"atoll-uid": "u1"}, made) == made
        assert stand_in.calls == {"SandboxListV2": 1}
        stand_in.page = 2
        stand_in.calls.clear()
        assert await boxes.running({"atoll-uid": "u1"}, made) == made
        assert stand_in.calls == {"SandboxListV2": 2}
        assert boxes.questions["running"] == 2

    asyncio.run(run())


def test_a_service_that_is_down_is_temporary(stand_in: ModalStandIn) -> None:
    async def run() -> None:
        boxes = Sandboxes(ModalOptions())
        await boxes.open()
        stand_in.down()
        with pytest.raises(Temporary, match="Modal"):
            await boxes.running({"atoll-uid": "u1"})
        stand_in.up()
        assert await boxes.running({"atoll-uid": "u1"}) == set()

    asyncio.run(run())


def test_without_credentials_it_says_what_to_set(
    stand_in: ModalStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name)
    with pytest.raises(Permanent, match="modal token new.*MODAL_TOKEN_ID"):
        asyncio.run(Sandboxes(ModalOptions()).open())
    assert stand_in.calls == {}


def test_an_image_that_cannot_be_had_is_permanent(stand_in: ModalStandIn) -> None:
    stand_in.bad_images.add("nonesuch")
    with pytest.raises(Permanent, match="pull access denied"):
        asyncio.run(Sandboxes(ModalOptions()).create(request(SLEEP, image="nonesuch:1")))


def test_a_secret_that_is_not_there_is_permanent(stand_in: ModalStandIn) -> None:
    with pytest.raises(Permanent, match="nonesuch"):
        asyncio.run(Sandboxes(ModalOptions(secrets=["nonesuch"])).create(request(SLEEP)))
    assert stand_in.running() == []


def test_a_cancel_ends_the_wait_though_the_client_does_not_let_go() -> None:
    async def work() -> None:
        async def deaf() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()

        async def odd() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise ConnectionError("closed") from error

        for call in (deaf, odd):
            asked = asyncio.create_task(answer(call()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asked.cancel()
            done, _ = await asyncio.wait([asked], timeout=60)
            assert done
            assert asked.cancelled()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("code", "message"), [(137, "Modal says ended"), (3, "Modal says ended, exit code 3")]
)
def test_a_client_that_hides_the_end_names_no_cause(code: int, message: str) -> None:
    class Hidden:
        returncode = code

    assert read_end(Hidden()) == JobState("ended", "", message)
