"""What is applied to a cluster: equal to the files in deploy/, fit for the published schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from atoll.core.errors import ValidationError
from atoll.core.model import decode
from atoll.core.spec import TrainingSpec
from atoll.operator.crd import LIMITS, spec_schema
from atoll.operator.manifests import RIGHTS, render_manifests

DEPLOY = Path(__file__).parents[3] / "deploy"


def written(*, update: bool) -> list[Any]:
    crd, *rest = render_manifests(image="atoll")
    texts = {
        "crd.yaml": yaml.safe_dump(crd, sort_keys=False, width=100),
        "operator.yaml": yaml.safe_dump_all(rest, sort_keys=False, width=100),
    }
    for name, text in texts.items():
        if update:
            (DEPLOY / "base" / name).write_text(text)
    return [(name, text, (DEPLOY / "base" / name).read_text()) for name, text in texts.items()]


def test_the_files_in_deploy_are_what_the_code_renders(request: pytest.FixtureRequest) -> None:
    update = request.config.getoption("--update-golden", default=False)
    for name, made, kept in written(update=update):
        assert made == kept, f"deploy/base/{name} is old: run pytest --update-golden, and read it"


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("namespace", [None, "team-a"])
def test_manifests_fit_the_published_schemas(version: str, namespace: str | None) -> None:
    for manifest in render_manifests(image="atoll:1", namespace=namespace):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_options_reach_the_operator_and_bad_ones_are_refused() -> None:
    options = '{"kueueQueue": "research", "annotations": {"cost": "$(LOW)"}}'
    made = render_manifests(image="x", options=options)
    (deployment,) = (m for m in made if m["kind"] == "Deployment")
    command = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["--options", options.replace("$", "$$")]
    with pytest.raises(ValidationError, match="--options: kueueQueu:"):
        render_manifests(image="x", options='{"kueueQueu": "research"}')
    with pytest.raises(ValidationError, match="--options: 'nope'"):
        render_manifests(image="x", options="nope")


def test_nothing_waits_for_an_operator_that_stands_by_and_is_not_ready() -> None:
    """Neither a rollout nor a drain: the leader alone is ready, however many there are."""
    made = {m["kind"]: m.get("spec") for m in render_manifests(image="x", replicas=2)}
    assert made["Deployment"]["strategy"] == {"type": "Recreate"}
    assert "PodDisruptionBudget" not in made
    assert made["Service"]["selector"] == made["Deployment"]["selector"]["matchLabels"]
    (container,) = made["Deployment"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_a_volume_and_a_configuration_are_mounted_where_the_operator_looks() -> None:
    made = render_manifests(image="x", volume="metrics", config="atoll-config")
    (deployment,) = (m for m in made if m["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert command[command.index("--data") + 1] == mounts["data"]
    assert command[command.index("--config") + 1] == f"{mounts['config']}/atoll.toml"
    volumes = {v.pop("name"): v for v in pod["volumes"]}
    assert volumes["data"] == {"persistentVolumeClaim": {"claimName": "metrics"}}
    assert volumes["config"]["secret"] == {"secretName": "atoll-config", "defaultMode": 0o440}
    for manifest in render_manifests(image="x", volume="metrics", config="atoll-config"):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_with_a_namespace_no_right_reaches_beyond_it() -> None:
    made = render_manifests(image="atoll:1", home="ops", namespace="team-a")
    bound = [m for m in made if m["kind"].endswith("RoleBinding")]
    assert {(m["kind"], m["metadata"]["namespace"]) for m in bound} == {
        ("RoleBinding", "team-a"),
        ("RoleBinding", "ops"),
    }


def test_the_operator_may_not_read_secrets_or_run_in_pods_of_others() -> None:
    everywhere = {resource for _, resources, _ in RIGHTS for resource in resources}
    assert not everywhere & {"secrets", "pods/exec", "nodes", "*"}
    verbs = {verb for _, _, verbs in RIGHTS for verb in verbs}
    assert "*" not in verbs
    assert "update" not in verbs


def test_the_schema_names_every_field_of_the_spec_but_its_name() -> None:
    wire = {field.encode_name for field in msgspec.structs.fields(TrainingSpec)}
    assert set(spec_schema()["properties"]) == wire - {"name"}


def test_every_limit_is_of_a_field_that_exists() -> None:
    schema = spec_schema()
    for path in LIMITS:
        node = schema
        for part in path.split("."):
            node = node["properties"][part]


def test_the_example_is_a_training() -> None:
    example = yaml.safe_load((DEPLOY / "examples" / "training.yaml").read_text())
    spec = {**example["spec"], "name": example["metadata"]["name"]}
    assert decode(msgspec.json.encode(spec), TrainingSpec).world_size.target == 4
