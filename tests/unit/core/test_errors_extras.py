"""What is said where the packages of a name are missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atoll.core.errors import class_without_package

# Hides packages as if they were not installed, whatever has been imported.
HIDE = """
import sys
MORE = ("modal", "boto3", "botocore", "huggingface_hub")
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightkube", "numpy", "obstore", "torch", "zstandard", *MORE):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_imports_without_any_extra() -> None:
    run("import atoll\nfor name in atoll.__all__: getattr(atoll, name)")
    run("import atoll.diloco\nfor name in atoll.diloco.__all__: getattr(atoll.diloco, name)")


def test_help_and_dir_work_without_any_extra() -> None:
    page = run("import atoll, atoll.diloco\nhelp(atoll)\nhelp(atoll.diloco)\nprint(dir(atoll))")
    assert "deploy_distributed" in page
    assert "'KubernetesExecutor'" in page
    assert "DiLoCo" in run("import atoll.diloco\nprint(dir(atoll.diloco))")


@pytest.mark.parametrize(
    ("use", "extra"),
    [
        ("atoll.EKSExecutor('image')", "kubernetes"),
        ("atoll.KubernetesExecutor()", "kubernetes"),
        ("atoll.ObjectStoreAllReduce('file:///tmp/x', 0, 1)", "store"),
        ("atoll.diloco.DiLoCo(None, None)", "torch"),
        ("atoll.ModalExecutor()", "modal"),
        ("atoll.SageMakerExecutor()", "sagemaker"),
        ("atoll.HFJobsExecutor()", "hfjobs"),
    ],
)
def test_using_a_name_says_what_to_install(use: str, extra: str) -> None:
    said = run(
        f"import atoll, atoll.diloco\ntry: {use}\nexcept RuntimeError as error: print(error)"
    )
    assert f"pip install '.[{extra}]' in a clone of atoll" in said


def test_a_missing_module_of_atoll_is_an_error_of_its_own() -> None:
    error = ModuleNotFoundError("No module named 'atoll.nothing'", name="atoll.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"atoll\.nothing"):
        class_without_package("Name", error, "store")
