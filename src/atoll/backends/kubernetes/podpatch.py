"""The option `pod`: how the ranks' pods differ from what atoll renders. Pure.

It is a partial pod spec, merged as `kubectl patch` does: objects field by field, lists of named
things by name, other lists whole; null takes a field away. What atoll itself relies on is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from atoll.backends.kubernetes.names import (
    AGENT,
    ARCHIVE_VOLUME,
    CODE_VOLUME,
    CONTAINER,
    GATE,
    REPORT_VOLUME,
)
from atoll.core.checks import check_choice, check_env, check_name, check_strings
from atoll.core.errors import ValidationError
from atoll.core.model import SpecModel

Json = dict[str, Any]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]

OWN_DIR = "/atoll"  # of a rank's container, for what atoll mounts there


class ListRule(NamedTuple):
    """How a list is merged: by this field of its entries, or joined where there is none."""

    key: str | None
    is_new_first: bool = False
    is_deep: bool = False  # entries of one key are merged, and not replaced


LISTS = {
    "containers": ListRule("name", is_deep=True),
    "initContainers": ListRule("name", is_deep=True),
    "volumes": ListRule("name", is_new_first=True),
    "volumeMounts": ListRule("mountPath", is_new_first=True),
    "env": ListRule("name"),  # new ones may use `$(NAME)` of those before them
    "imagePullSecrets": ListRule("name"),
    "tolerations": ListRule(None),
    "topologySpreadConstraints": ListRule(None),
}
KINDS: dict[str, type] = {
    **dict.fromkeys(LISTS, list),
    **dict.fromkeys(("affinity", "nodeSelector", "securityContext", "resources"), dict),
    **dict.fromkeys(
        ("serviceAccountName", "priorityClassName", "runtimeClassName", "schedulerName"), str
    ),
}
KIND_NAMES: dict[type, str] = {list: "a list of objects", dict: "an object", str: "text"}

# What a patch may not say, with what would be right.
FIXED = {
    "restartPolicy": "expected none: ranks are restarted by max_restarts of the training",
    "subdomain": "expected none: ranks find each other by it",
    "hostname": "expected none: ranks find each other by it",
    "terminationGracePeriodSeconds": "expected as stop_grace_s of the training",
    "activeDeadlineSeconds": "expected as deadline_s of the training",
    "metadata": "expected the fields of a pod's spec; labels and annotations are options",
    "spec": "expected the fields of a pod's spec, without spec around them",
    "template": "expected the fields of a pod's spec, without template around them",
    **dict.fromkeys(
        ("args", "command", "env", "envFrom", "image", "imagePullPolicy", "volumeMounts"),
        f"expected in containers, in the one named {CONTAINER!r}",
    ),
}
FIXED_OF_RANK = {
    "command": "expected as command of the training",
    "args": "expected as command of the training",
    "image": "expected as image of the training; the option image is for those that name none",
    "restartPolicy": FIXED["restartPolicy"],
    "terminationMessagePath": "expected none: how a rank ended is read from there",
    "terminationMessagePolicy": "expected none: how a rank ended is read by it",
}
# What holds something of atoll's own or of the training's, so null may not take it away.
NEEDED = {"containers", "initContainers", "volumes", "env", "volumeMounts", "resources"}
OWN_NAMES = {
    "initContainers": {GATE, AGENT},
    "volumes": {GATE, REPORT_VOLUME, CODE_VOLUME, ARCHIVE_VOLUME},
}


def merge_pod(base: Json, patch: Json) -> Json:
    """Merges `patch` into `base`; neither is changed."""
    merged = dict(base)
    for field, value in patch.items():
        before = merged.get(field)
        if value is None:
            merged.pop(field, None)
        elif isinstance(value, dict):
            merged[field] = merge_pod(before if isinstance(before, dict) else {}, value)
        elif isinstance(value, list) and field in LISTS:
            merged[field] = _merge_list(LISTS[field], before or [], value)
        else:
            merged[field] = value
    return merged


def _merge_list(rule: ListRule, base: list[Json], patch: list[Json]) -> list[Json]:
    if rule.key is None:
        return [*base, *patch]
    merged = {entry.get(rule.key): entry for entry in base}
    known = set(merged)
    for entry in patch:
        key = entry.get(rule.key)
        before = merged.get(key, {}) if rule.is_deep else {}
        merged[key] = merge_pod(before, entry)
    existing = [entry for key, entry in merged.items() if key in known]
    new = [entry for key, entry in merged.items() if key not in known]
    return [*new, *existing] if rule.is_new_first else [*existing, *new]


def check_patch(patch: object, field: str = "pod") -> None:
    """Raises ValidationError for what atoll relies on, and for what is clearly a mistake."""
    if not isinstance(patch, dict):
        raise ValidationError(field, patch, "expected an object: fields of a pod's spec")
    _check_fields(field, patch, FIXED)
    for at, container in enumerate(patch.get("containers", ())):
        _check_rank(f"{field}.containers[{at}]", container)
    for at, container in enumerate(patch.get("initContainers", ())):
        _check_fields(f"{field}.initContainers[{at}]", container, {})


def _check_fields(where: str, fields: Json, fixed: dict[str, str]) -> None:
    for name, value in fields.items():
        field = f"{where}.{name}"
        if name in fixed:
            raise ValidationError(field, value, fixed[name])
        if name not in KINDS and (meant := _MEANT.get(_plain(name))):
            raise ValidationError(field, value, f"there is no such field: did you mean {meant!r}?")
        if value is None and name not in NEEDED:
            continue
        if name in KINDS and not isinstance(value, KINDS[name]):
            raise ValidationError(field, value, f"expected {KIND_NAMES[KINDS[name]]}")
        if name in LISTS:
            _check_entries(field, name, value)


def _check_entries(field: str, name: str, entries: list[object]) -> None:
    key = LISTS[name].key
    for at, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValidationError(f"{field}[{at}]", entry, "expected an object")
        if key is None:
            continue
        if not isinstance(entry.get(key), str):
            raise ValidationError(f"{field}[{at}].{key}", entry.get(key), "expected text")
        if entry[key] in OWN_NAMES.get(name, ()):
            raise ValidationError(
                f"{field}[{at}].{key}", entry[key], "expected another name: atoll has one of it"
            )


def _check_rank(where: str, container: Json) -> None:
    if container["name"] != CONTAINER:
        raise ValidationError(
            f"{where}.name",
            container["name"],
            f"expected {CONTAINER!r}, the container of the rank; what is to run beside it belongs "
            "to initContainers, with restartPolicy Always, so that the pod ends with the rank",
        )
    _check_fields(where, container, FIXED_OF_RANK)
    for at, variable in enumerate(container.get("env", ())):
        check_env(f"{where}.env[{at}]", {variable["name"]: str(variable.get("value", ""))})
    for at, mount in enumerate(container.get("volumeMounts", ())):
        if f"{mount['mountPath']}/".startswith(f"{OWN_DIR}/"):
            raise ValidationError(
                f"{where}.volumeMounts[{at}].mountPath",
                mount["mountPath"],
                f"expected a path outside {OWN_DIR}, which is atoll's own",
            )


def _plain(name: str) -> str:
    """The same for `container`, `Containers` and `containers`."""
    return name.replace("_", "").lower().removesuffix("s")


_MEANT = {_plain(name): name for name in KINDS}


class ShortNames(SpecModel, frozen=True):
    """Options that each stand for one field of `pod`, by the table SHORT_NAMES."""

    service_account: str | None = None  # IRSA and Pod Identity go by this name
    node_selector: dict[str, str] = {}
    tolerations: list[Json] | None = None  # unset: the GPU toleration where there is a GPU
    affinity: Json | None = None
    runtime_class_name: str | None = None
    image_pull_policy: PullPolicy | None = None
    image_pull_secrets: list[str] = []
    priority_class_name: str | None = None
    scheduler_name: str | None = None
    env_from_secrets: list[str] = []
    volumes: list[Json] = []
    volume_mounts: list[Json] = []
    shm_size: str | None = None  # /dev/shm in memory, for data loaders and NCCL
    is_host_network: bool = False
    # The rank is then not process 1, which is deaf to signals it does not handle.
    is_process_namespace_shared: bool = True
    security_context: Json | None = None  # of the pods
    container_security_context: Json | None = None  # of the rank, and of its start gate

    def check_short_names(self) -> None:
        if self.service_account is not None:
            check_name("service_account", self.service_account)
        for field in ("image_pull_secrets", "env_from_secrets"):
            check_strings(field, getattr(self, field))
        if self.image_pull_policy is not None:
            check_choice("image_pull_policy", self.image_pull_policy, PullPolicy)
        for name, render in SHORT_NAMES.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                _check_kind(name, value, render(value))
        check_patch(self.with_short_names({}))

    def with_short_names(self, pod: Json) -> Json:
        for name, render in SHORT_NAMES.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                pod = merge_pod(pod, render(value))
        return pod


def _check_kind(name: str, value: object, patch: Json) -> None:
    for field, part in patch.items():
        if field in KINDS and not isinstance(part, KINDS[field]):
            raise ValidationError(name, value, f"expected {KIND_NAMES[KINDS[field]]}")


def _of_rank(**fields: Any) -> Json:
    return {"containers": [{"name": CONTAINER, **fields}]}


def _shm(size: str) -> Json:
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    return {"volumes": [volume], **_of_rank(volumeMounts=[mount])}


# The patch that each short name stands for.
SHORT_NAMES: dict[str, Callable[[Any], Json]] = {
    "service_account": lambda name: {"serviceAccountName": name},
    "node_selector": lambda labels: {"nodeSelector": labels},
    "tolerations": lambda entries: {"tolerations": entries},
    "affinity": lambda rules: {"affinity": rules},
    "runtime_class_name": lambda name: {"runtimeClassName": name},
    "image_pull_policy": lambda policy: _of_rank(imagePullPolicy=policy),
    "image_pull_secrets": lambda names: {"imagePullSecrets": [{"name": name} for name in names]},
    "priority_class_name": lambda name: {"priorityClassName": name},
    "scheduler_name": lambda name: {"schedulerName": name},
    "env_from_secrets": lambda names: _of_rank(
        envFrom=[{"secretRef": {"name": name}} for name in names]
    ),
    "shm_size": _shm,
    "volumes": lambda entries: {"volumes": entries},
    "volume_mounts": lambda entries: _of_rank(volumeMounts=entries),
    "is_host_network": lambda is_on: {"hostNetwork": is_on},
    "is_process_namespace_shared": lambda is_on: {"shareProcessNamespace": is_on},
    "security_context": lambda context: {"securityContext": context},
    "container_security_context": lambda context: _of_rank(securityContext=context),
}
