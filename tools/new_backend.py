"""`python -m tools.new_backend NAME`: writes the files of a new backend, and registers it.

The backend is one whose jobs see nothing together but an object store, as most services are; see
docs/architecture.md#add-a-backend for the steps that follow. What is written passes `make check`, its golden
test, and the fault table, whose rows it lists as not written yet.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LABEL = 20  # so that no line of a template has more than 100

FILES = {
    "src/atoll/backends/{name}/__init__.py": '''"""Ranks as jobs of {label}."""
''',
    "src/atoll/backends/{name}/options.py": '''"""The options of {label}, checked before anything is created."""

from __future__ import annotations

from atoll.backends.base import StoreOptions, separate_jobs
from atoll.core.ports import ignore, refuse

# A row refuses a field of a spec, or says that it has no effect. Take out what you render.
SUPPORTS = (
    *separate_jobs("jobs of {label}"),
    refuse("provider_filter", "expected none: {label} chooses the place"),
    ignore("topology_spread", "{label} places the jobs"),
    *(
        ignore(field, "it is not rendered yet")
        for field in ("cpu", "memory", "gpu_count", "gpu_models", "min_gpu_memory_gb")
    ),
)


class {cls}Options(StoreOptions, frozen=True):
    """The options of {cls}Executor."""

    SUPPORTS = SUPPORTS
    LABEL, PACKAGE, EXTRA = "{label}", "{package}", "{name}"
    OWN_VARIABLES = ("{upper}_",)

    # Your own options. What is wrong of one is said by its type, `Annotated[int, Meta(ge=1, le=9)]`
    # or `Annotated[str, Pattern("[a-z]+", "expected …")]`; what is wrong of two together in
    # `__post_init__`: `raise ValidationError("field", self.field, "expected …")`.
''',
    "src/atoll/backends/{name}/render.py": '''"""From a training, a rank and an attempt to the job that is asked for. Pure."""

from __future__ import annotations

from typing import Any

from atoll.backends.base import labels_of, wrapper_command
from atoll.backends.{name}.options import {cls}Options
from atoll.backends.records import AttemptKey
from atoll.core.status import Training


def render_job(training: Training, key: AttemptKey, options: {cls}Options) -> dict[str, Any]:
    """The job of one attempt: it runs the wrapper, which finds the rest with the records."""
    return {{
        "name": f"atoll-{{training.uid[:12]}}-r{{key[0]}}-a{{key[1]}}",
        "image": training.spec.image or options.image,
        "command": wrapper_command(training, key, options),
        "labels": labels_of(training.uid, key),
    }}
''',
    "src/atoll/backends/{name}/executor.py": '''"""Each attempt of a rank is a job of {label}, with its records in an object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.backends.base import StoreBackend
from atoll.backends.{name}.options import {cls}Options
from atoll.backends.{name}.render import render_job
from atoll.backends.records import AttemptKey, JobState
from atoll.core.status import Training


class {cls}Backend(StoreBackend):
    """The Executor of {label}. Ranks do not reach each other."""

    name = "{name}"
    options_type = {cls}Options
    options: {cls}Options
    render = staticmethod(render_job)

    def check_machine(self) -> None:
        """Raise Permanent, with what to do, without credentials. Ask nobody."""

    async def probe(self) -> None:
        """Raise BackendError or Denied if the service does not answer."""

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        raise NotImplementedError("ask for `render` of each rank; asking twice must be harmless")

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        raise NotImplementedError("all attempts that the service knows of, in one question")

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        raise NotImplementedError("end these; already gone is success")
''',
    "src/atoll/replicas/{name}.py": '''"""Replicas on {label}, launched from a script: `{cls}Executor`."""

from __future__ import annotations

from atoll.backends.{name}.options import {cls}Options
from atoll.replicas.recorded import StoreReplicas


class {cls}Executor(StoreReplicas):
    """Replicas as jobs of {label}, one for each attempt of each.

    `image` has Python and `atoll[store]`; `store` is an object store that the jobs and this machine
    reach, with the records and logs of all launches. Other `options` are those of
    `{cls}Options`. `command` runs exactly as it is, in the image; without it the code of the
    entrypoint is sent along, with the working directory unless `code` is False. `max_restarts`:
    how often each replica is restarted. Bad options raise ValidationError here.
    """

    backend_name = "{name}"
    _launch_noun = "set of jobs"
    _options_type = {cls}Options
    _required = {{
        "image": "expected an image: replicas run in containers",
        "store": "expected s3://, gs:// or az://: records and logs of launches are there",
    }}
''',
    "tests/unit/backends/{name}/__init__.py": "",
    "tests/unit/backends/{name}/test_render.py": '''"""The job of one attempt, against golden files. `pytest --update-golden` writes them anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.backends.{name}.options import {cls}Options
from atoll.backends.{name}.render import render_job
from atoll.core.errors import ValidationError
from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize
from atoll.core.status import Training

GOLDEN = Path(__file__).parents[3] / "golden" / "{name}"
SPEC = TrainingSpec(
    name="t",
    command=["true"],
    world_size=WorldSize(min=1, target=2, max=2),
    rendezvous=RendezvousSpec(uri="s3://bucket/run"),
)
TRAINING = Training(namespace="default", uid="0123456789abcdef0123456789abcdef", spec=SPEC)
CASES = {{"plain": {cls}Options(image="train:1")}}


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for(name: str, pytestconfig: pytest.Config) -> None:
    rendered = json.dumps(render_job(TRAINING, (1, 2), CASES[name]), indent=2) + "\\n"
    path = GOLDEN / f"{{name}}.json"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(rendered)
    assert rendered == path.read_text()


def test_a_training_without_an_image_is_refused() -> None:
    with pytest.raises(ValidationError, match="image"):
        {cls}Options().check(SPEC)
''',
    "tests/golden/{name}/plain.json": """{{
  "name": "atoll-0123456789ab-r1-a2",
  "image": "train:1",
  "command": [
    "python3",
    "-m",
    "atoll.agent.wrapper",
    "s3://bucket/run/atoll-ranks/0123456789abcdef0123456789abcdef/records",
    "1",
    "2"
  ],
  "labels": {{
    "atoll-uid": "0123456789abcdef0123456789abcdef",
    "atoll-rank": "1",
    "atoll-attempt": "2"
  }}
}}
""",
    "tests/conformance/test_{name}.py": '''"""The table's faults on ranks that are jobs of a stand-in for {label}.

Write the stand-in, then a class on `served_backend.py:ServedBackend` as in `modal_backend.py`, and
yield it from the fixture. A row that cannot be provoked stays in `why_not`, with the reason.
"""

from __future__ import annotations

import pytest
from tests.conformance.table import ROWS, Row
from tests.conformance.test_table import quick_rows, run

# Rows that every run of the tests has; `make soak` has all.
QUICK = frozenset({{"none", "exit 3", "signal SIGKILL", "cancel", "supervisor killed"}})


class Unwritten:
    """Has no stand-in to provoke faults on."""

    name = "{name}"
    why_not = {{row.fault: "its stand-in is not written yet" for row in ROWS}}

    def cannot(self, row: Row) -> str:
        return self.why_not.get(row.fault, "")


@pytest.fixture(scope="module")
def backend() -> Unwritten:
    return Unwritten()


@pytest.mark.parametrize("row", quick_rows(QUICK))
def test_{name}(backend: Unwritten, row: Row) -> None:
    run(backend, row)  # type: ignore[arg-type]
''',
}
# By file: a pattern whose match is kept, and the line that goes in behind it.
ROWS = {
    "src/atoll/core/executors.py": [
        (
            r"KINDS = \{\n(?:    .*\n)+",
            '    "{name}": "atoll.backends.{name}.executor:{cls}Backend",\n',
        ),
        (r"EXTRAS = \{\n(?:    .*\n)+", '    "{name}": "{name}",\n'),
    ],
    "src/atoll/__init__.py": [
        (r"_HOME = \{\n(?:    .*\n)+", '    "{cls}Executor": "replicas.{name}",\n'),
    ],
    "src/atoll/__init__.pyi": [
        (
            r"(?:from atoll\.replicas\..*\n)+",
            "from atoll.replicas.{name} import {cls}Executor as {cls}Executor\n",
        ),
    ],
    "pyproject.toml": [
        (r"(?m)^sagemaker = .*\n", '{name} = ["atoll[store]"]\n'),
        (r'"backends are independent of each other"[^\]]*(?=\])', '    "atoll.backends.{name}",\n'),
    ],
}


def write(root: Path, name: str, cls: str, label: str, package: str) -> list[str]:
    """Write and register the backend; return the files that are new or changed."""
    words = {"name": name, "cls": cls, "label": label, "package": package, "upper": name.upper()}
    files = {path.format(**words): text.format(**words) for path, text in FILES.items()}
    if taken := [path for path in files if (root / path).exists()]:
        raise FileExistsError(f"{taken[0]} is there already: nothing was written")
    changes = {}
    for path, rows in ROWS.items():
        text = (root / path).read_text()
        for pattern, line in rows:
            match = re.search(pattern, text)
            if match is None:
                raise ValueError(f"{path} has no {pattern!r}: nothing was written")
            text = text[: match.end()] + line.format(**words) + text[match.end() :]
        changes[path] = text
    for path, text in {**files, **changes}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    own = [path for path in (*files, *changes) if path.endswith((".py", ".pyi"))]
    for command in (["check", "-q", "--fix"], ["format", "-q"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, *own], cwd=root, check=True)
    return [*files, *changes]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.new_backend", description=__doc__)
    parser.add_argument("name", help="the kind in atoll.toml, such as runpod: letters and digits")
    parser.add_argument("--cls", help="how its classes begin, such as RunPod")
    parser.add_argument("--label", help="what people call it, such as 'RunPod'")
    parser.add_argument("--package", help="its client library, as it is imported; '' for a command")
    options = parser.parse_args(arguments)
    name = options.name
    if not re.fullmatch(r"[a-z][a-z0-9]{1,30}", name):
        parser.error(f"{name!r}: expected lower-case letters and digits")
    cls = options.cls or name.capitalize()
    label = options.label or cls
    package = name if options.package is None else options.package
    if len(label) > MAX_LABEL:
        parser.error(f"{label!r}: expected at most {MAX_LABEL} characters, for lines of 100")
    try:
        paths = write(ROOT, name, cls, label, package)
    except (FileExistsError, ValueError) as error:
        parser.error(str(error))
    sys.stdout.write("".join(f"{path}\n" for path in paths))
    sys.stdout.write("next: docs/architecture.md#add-a-backend, step 2\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
