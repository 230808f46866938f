"""The shape of the code: who imports whom, how long files are, what is public."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

import atoll

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_DEPLOY_FILES = 35
MAX_POD_FUNCTIONS, MAX_POD_FILES = 140, 24
# Of a round: which replica waits for the other is chance, and adds a few.
MAX_ROUND_FUNCTIONS, MAX_ROUND_FILES, MAX_ROUND_CHANGES = 176, 13, 112
MAX_LINES = 900  # one idea a file, read from top to bottom; httpx and starlette go to 2,000 and 900


def test_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    assert linter.exists() or shutil.which("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_file_is_too_long_to_read() -> None:
    everything = [*SOURCES, *(ROOT / "examples").glob("*.py")]
    long = {
        str(path.relative_to(ROOT)): lines
        for path in everything
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_public_names_can_be_imported() -> None:
    for name in atoll.__all__:
        assert getattr(atoll, name) is not None
    assert set(atoll.__all__) <= set(dir(atoll))


def test_type_checkers_find_every_public_name() -> None:
    stub = ast.parse((ROOT / "src/atoll/__init__.pyi").read_text())
    typed = {
        alias.asname
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    typed |= {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert typed == set(atoll.__all__)


def test_importing_atoll_loads_nothing_heavy() -> None:
    heavy = ("msgspec", "httpx2", "starlette", "uvicorn", "numpy", "torch", "click", "asyncio")
    code = f"import atoll, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


HEAVY = ("httpx2", "starlette", "uvicorn", "numpy", "torch", "asyncio", "sqlite3", "ssl", "yaml")
# What a start waits for if it is loaded: `atoll run` and a supervisor last 0.1 s besides.
SLOW = (
    *("concurrent", "dataclasses", "email", "hashlib", "http", "logging", "multiprocessing"),
    *("random", "secrets", "shutil", "subprocess", "tempfile"),
)


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("from atoll.cli.main import app; app(['--help'], standalone_mode=False)", HEAVY),
        (
            "import atoll.cli.run, atoll.cli.follow, atoll.cli.follow, atoll.core.problem\n"
            "import atoll.cli.main, atoll.sdk.config, atoll.sdk.endpoint, atoll.sdk.options\n"
            "from pathlib import Path; from atoll.sdk.endpoint import Address\n"
            "from atoll.sdk.wire import _blocking; _blocking(Address('', directory=Path('/')))",
            HEAVY + SLOW,
        ),
        (
            "import atoll.backends.local.watchdog, atoll.backends.local.supervisor",
            (*HEAVY, *SLOW, "click", "inspect", "msgspec"),
        ),
    ],
    ids=["help", "a run with a local server", "a supervisor"],
)
def test_what_is_waited_for_loads_nothing_heavy(code: str, unwanted: tuple[str, ...]) -> None:
    code += f"\nimport sys; print([m for m in {unwanted!r} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_runs_beside_a_rank_needs_the_standard_library_alone() -> None:
    """Some of it travels to hosts without atoll; the rest starts with every rank."""
    code = (
        "import atoll.agent as agent, importlib, pkgutil, sys\n"
        "for module in pkgutil.iter_modules(agent.__path__, 'atoll.agent.'):\n"
        "    importlib.import_module(module.name)\n"
        "own = {m for m in sys.modules if m.startswith('atoll.')}\n"
        "others = {m for m in own if not m.startswith('atoll.agent')}\n"
        "print(sorted(others | {'msgspec', 'numpy', 'obstore'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_torch_is_never_imported_by_a_module_at_its_top() -> None:
    """What ranks import must be light: torch comes when it is used."""
    at_top = {
        path.name
        for path in SOURCES
        for line in path.read_text().splitlines()
        if line.startswith(("import torch", "from torch"))
    }
    assert at_top == set()


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if not (path.read_text().startswith(('"""', 'r"""')))
    ]
    assert silent == []


def test_every_module_can_be_imported() -> None:
    for path in SOURCES:
        if path.name == "__main__.py":
            continue
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))


def test_unit_tests_mirror_the_tree() -> None:
    """A test is found from its module: `core/plan.py` has `core/test_plan.py`, or more of them."""
    strays = []
    for path in sorted((ROOT / "tests/unit").rglob("test_*.py")):
        folder = ROOT / "src/atoll" / path.parent.relative_to(ROOT / "tests/unit")
        subject = path.stem.removeprefix("test_")
        modules = {p.stem for p in folder.glob("*.py")} | {p.name for p in folder.glob("*/")}
        if not any(subject == name or subject.startswith(f"{name}_") for name in modules):
            strays.append(str(path.relative_to(ROOT)))
    assert strays == []


def test_no_two_tests_of_the_command_name_a_training_alike() -> None:
    """They share a control plane, in whatever order, and a name that is left there is taken."""
    named: dict[str, set[str]] = {}
    for path in (ROOT / "tests" / "e2e").glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            if "atoll" not in {argument.arg for argument in node.args.args}:
                continue
            for call in ast.walk(node):
                words = call.args if isinstance(call, ast.Call) else []
                texts = [word.value if isinstance(word, ast.Constant) else None for word in words]
                for option, name in zip(texts, texts[1:], strict=False):
                    if option == "--name" and isinstance(name, str):
                        named.setdefault(name, set()).add(f"{path.name}:{node.name}")
    assert {name: tests for name, tests in named.items() if len(tests) > 1} == {}


def test_types_are_decoded_by_decoders_that_are_made_in_one_place() -> None:
    """Two threads that make msgspec know a type at the same moment crash the process."""
    wrong = []
    for path in SOURCES:
        if path.parts[-2:] == ("core", "model.py"):
            continue
        tree = ast.parse(path.read_text())
        inner = {
            node
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            is_typed = len(node.args) > 1 or any(word.arg == "type" for word in node.keywords)
            is_msgspec = name.startswith(("msgspec.", "json.", "msgpack."))
            is_own_kind = path.name == "model.py" and name == "json_decoder"  # of any caller
            if (
                (name.endswith((".json.decode", "msgpack.decode")) and is_msgspec and is_typed)
                or (name == "msgspec.convert" or (is_msgspec and name.endswith("Decoder")))
                or (name in ("json_decoder", "msgpack_decoder") and node in inner)
                and not is_own_kind
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_every_number_in_a_query_has_bounds() -> None:
    """Else `inf`, or more than SQLite holds, would get as far as the code behind."""
    from atoll.core.checks import bounds_of
    from atoll.server import app
    from atoll.server.http.operations import Query

    assert app
    unbounded = []
    kinds = list(Query.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
        for field in msgspec.structs.fields(kind):
            parts = [part for part in (field.type, *get_args(field.type)) if part is not list]
            is_number = any(part in (int, float) for part in parts)
            if is_number and not any(map(bounds_of, parts)):
                unbounded.append(f"{kind.__name__}.{field.name}")
    assert len(kinds) > 10
    assert unbounded == []


def test_a_deploy_runs_code_of_few_files() -> None:
    """What a reader has to open to follow one: from the request to the first status."""
    command = [sys.executable, "-m", "tools.deploy_files"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    functions, _, _, files, _ = done.stdout.split()
    assert int(functions) > 100
    assert int(files) <= MAX_DEPLOY_FILES, "python -m tools.deploy_files --list"


def test_a_pod_event_runs_few_functions_of_few_files() -> None:
    """What a reader has to open to follow one: from the watch to the status."""
    command = [sys.executable, "-m", "tools.pod_path"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    functions, _, _, files, _ = done.stdout.split()
    assert 50 < int(functions) <= MAX_POD_FUNCTIONS, "python -m tools.pod_path --list"
    assert int(files) <= MAX_POD_FILES, "python -m tools.pod_path --list"


def test_a_round_runs_few_functions_of_few_files() -> None:
    """What a reader has to open to follow one: from the tensors to their mean."""
    command = [sys.executable, "-m", "tools.round_path"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    functions, files, changes = (int(each.split()[0]) for each in done.stdout.split(", "))
    assert 50 < functions <= MAX_ROUND_FUNCTIONS, "python -m tools.round_path --list"
    assert files <= MAX_ROUND_FILES
    assert changes <= MAX_ROUND_CHANGES
