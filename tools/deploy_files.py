"""How much code one deploy runs: functions and files of the control plane, counted by a profiler.

    python -m tools.deploy_files [--list] [--until-end]

Counts what `POST /v1/trainings` touches on a local control plane, from the request to the first
status that the controller writes (or the last one), in every thread, without the SDK and the CLI.
A reader who wants to follow a deploy has to open these files.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx2

import atoll
from atoll.main import build, ensure_token
from atoll.store.sqlite import SQLiteStore

SOURCE = Path(atoll.__file__).parent
WITHIN_S = 60.0  # to delete a training takes as long as its ranks take to stop: twice the default
CLIENTS = ("sdk", "cli")
BODY = {"name": "one", "command": ["true"], "worldSize": {"target": 2, "min": 1, "max": 2}}


async def count(where: Path, *, until_end: bool) -> dict[str, set[str]]:
    """The functions that one deploy calls, by file."""
    functions: dict[str, set[str]] = collections.defaultdict(set)
    is_written = asyncio.Event()

    def profile(frame: Any, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if not is_written.is_set() and event == "call" and file.startswith(str(SOURCE)):
            functions[str(Path(file).relative_to(SOURCE))].add(frame.f_code.co_qualname)

    plane = build(where)
    await ensure_token(plane.tokens, where)
    headers = {"Authorization": f"Bearer {(where / 'token').read_text().strip()}"}
    update_status = SQLiteStore.update_status

    async def update_and_end(*args: Any, **options: Any) -> Any:
        training = await update_status(*args, **options)
        if until_end and not training.status.phase.is_terminal:
            return training
        sys.setprofile(None)
        is_written.set()
        return training

    SQLiteStore.update_status = update_and_end  # type: ignore[method-assign]
    transport = httpx2.ASGITransport(plane.app)
    async with (
        plane.app.lifespan_context(plane.app),
        httpx2.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=headers
        ) as client,
    ):
        await asyncio.sleep(1)  # background tasks have begun and wait
        threading.setprofile(profile)
        sys.setprofile(profile)
        answer = await client.post("/v1/trainings", json=BODY)
        answer.raise_for_status()
        await is_written.wait()
        await client.delete("/v1/trainings/one")
        async with asyncio.timeout(WITHIN_S):
            async for update in plane.informer.updates():
                if update.is_removed:
                    break
    return {file: names for file, names in functions.items() if file.split("/")[0] not in CLIENTS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the files and their functions")
    parser.add_argument("--until-end", action="store_true", help="count until the ranks have ended")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch) / "state"
        where.mkdir(mode=0o700)
        functions = asyncio.run(count(where, until_end=options.until_end))
    if options.list:
        for file, names in sorted(functions.items()):
            sys.stdout.write(f"{file} ({len(names)}): {', '.join(sorted(names))}\n")
    sys.stdout.write(f"{sum(map(len, functions.values()))} functions in {len(functions)} files\n")


if __name__ == "__main__":
    main()
