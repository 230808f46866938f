"""What the API server would refuse in a pod's spec, found before anything is stored. Pure.

Each check yields what is wrong as `Flaw(path, value, expected)`. Fields that are not here are left
to the API server. Values are judged as it judges them: what it takes is refused only if it could
never work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from atoll.core.errors import ValidationError

Json = dict[str, Any]

_WORD = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(|[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})"
)
_POWERS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}

NAME = "expected letters, digits, '-', '_' or '.', up to 63, with a letter or digit at both ends"
KEY = f"{NAME}; a DNS name and '/' may be before it"
SUBDOMAIN = "expected a name of lower-case letters, digits, '-' or '.', up to 253"
LABEL = "expected a name of lower-case letters, digits or '-', up to 63"
QUANTITY = "expected a quantity such as '2', '500m', '4Gi'"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
STANDARD = ("cpu", "memory", "ephemeral-storage")


class Flaw(NamedTuple):
    """What is wrong, and where: `tolerations[0].effect`."""

    path: str
    value: object
    expected: str

    def refuse(self, prefix: str) -> ValidationError:
        joint = "" if self.path.startswith("[") or not self.path else "."
        return ValidationError(f"{prefix}{joint}{self.path}", self.value, self.expected)


Flaws = Iterator[Flaw]


def quantity(value: object) -> Decimal | None:
    """The number that a quantity stands for; None if it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    digits, suffix = match.groups()
    try:
        number = Decimal(digits)
        if suffix in _BINARY:
            return number * Decimal(2) ** _BINARY[suffix]
        power = _POWERS[suffix] if suffix in _POWERS else int(suffix[1:])
        return number.scaleb(power)
    except InvalidOperation:
        return None


def check_labels(
    field: str, labels: Mapping[str, object], *, has_free_values: bool = False
) -> None:
    """Raises ValidationError for labels, or for annotations, whose values may be any text."""
    for flaw in _labels(labels, has_free_values=has_free_values):
        raise flaw.refuse(field)


def check_label_value(field: str, value: object) -> None:
    if not _is_value(value):
        raise ValidationError(field, value, NAME)


def check_key(field: str, key: object) -> None:
    if not _is_key(key):
        raise ValidationError(field, key, KEY)


def flaws_of(pod: Json) -> Flaws:
    """Of a pod's spec, or of a part of one."""
    for field in ("serviceAccountName", "priorityClassName", "runtimeClassName"):
        # An empty name is none to the server, but for a runtime class.
        is_set = pod.get(field) is not None if field == "runtimeClassName" else pod.get(field)
        if is_set and not _is_subdomain(pod[field]):
            yield Flaw(field, pod[field], SUBDOMAIN)
    yield from _under("nodeSelector", _labels(pod.get("nodeSelector") or {}))
    yield from _each(pod, "tolerations", _toleration)
    yield from _each(pod, "imagePullSecrets", _named)
    yield from _each(pod, "volumes", _volume)
    yield from _each(pod, "topologySpreadConstraints", _constraint)
    yield from _under("affinity", _affinity(pod.get("affinity") or {}))
    yield from _each(pod, "initContainers", _init_container)
    yield from _each(pod, "containers", _container)


def _each(holder: Json, field: str, check: Callable[[Json], Flaws]) -> Flaws:
    for at, entry in enumerate(holder.get(field) or ()):
        if isinstance(entry, dict):
            yield from _under(f"{field}[{at}]", check(entry))


def _under(where: str, flaws: Iterable[Flaw]) -> Flaws:
    for flaw in flaws:
        joint = "." if flaw.path and not flaw.path.startswith("[") else ""
        yield flaw._replace(path=f"{where}{joint}{flaw.path}")


def _is_subdomain(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 253 and bool(_SUBDOMAIN.fullmatch(value))


def _is_key(value: object) -> bool:
    """What Kubernetes calls a qualified name."""
    if not isinstance(value, str):
        return False
    *prefix, name = value.split("/")
    is_prefixed = not prefix or (len(prefix) == 1 and _is_subdomain(prefix[0]))
    return is_prefixed and bool(_WORD.fullmatch(name))


def _is_value(value: object) -> bool:
    return isinstance(value, str) and (not value or bool(_WORD.fullmatch(value)))


def _labels(labels: Mapping[str, object], *, has_free_values: bool = False) -> Flaws:
    for key, value in labels.items():
        if not _is_key(key.lower() if has_free_values else key):
            yield Flaw("", key, KEY)
        elif has_free_values and not isinstance(value, str):
            yield Flaw(key, value, "expected text")
        elif not has_free_values and not _is_value(value):
            yield Flaw(key, value, NAME)


def _one_of(entry: Json, field: str, *choices: str, is_optional: bool = True) -> Flaws:
    value = entry.get(field)
    if value in choices or (is_optional and value in (None, "")):
        return
    yield Flaw(field, value, "expected " + " or ".join(map(repr, choices)))


def _toleration(entry: Json) -> Flaws:
    key, how, value = entry.get("key"), entry.get("operator") or "Equal", entry.get("value")
    if key and not _is_key(key):
        yield Flaw("key", key, KEY)
    yield from _one_of(entry, "operator", "Equal", "Exists")
    if not key and how != "Exists":
        yield Flaw("operator", entry.get("operator"), "expected 'Exists' where there is no key")
    if how == "Exists" and value:
        yield Flaw("value", value, "expected none with the operator Exists")
    elif value and not _is_value(value):
        yield Flaw("value", value, NAME)
    yield from _one_of(entry, "effect", "NoSchedule", "PreferNoSchedule", "NoExecute")
    if entry.get("tolerationSeconds") is not None and entry.get("effect") != "NoExecute":
        words = "expected 'NoExecute' where there are tolerationSeconds"
        yield Flaw("effect", entry.get("effect"), words)


def _named(entry: Json) -> Flaws:
    if not _is_subdomain(entry.get("name")):
        yield Flaw("name", entry.get("name"), SUBDOMAIN)


def _volume(entry: Json) -> Flaws:
    name = entry.get("name")
    if not (isinstance(name, str) and _LABEL.fullmatch(name)):
        yield Flaw("name", name, LABEL)
    sources = [field for field, value in entry.items() if field != "name" and value is not None]
    if len(sources) > 1:
        yield Flaw("", sources, "expected one kind of volume")
    size = (entry.get("emptyDir") or {}).get("sizeLimit")
    if size is not None and ((amount := quantity(size)) is None or amount < 0):
        yield Flaw("emptyDir.sizeLimit", size, QUANTITY)
    for source, field in (("secret", "secretName"), ("persistentVolumeClaim", "claimName")):
        if isinstance(entry.get(source), dict) and not entry[source].get(field):
            yield Flaw(f"{source}.{field}", entry[source].get(field), "expected a name")
    claim = (entry.get("persistentVolumeClaim") or {}).get("claimName")
    if claim and not _is_subdomain(claim):
        yield Flaw("persistentVolumeClaim.claimName", claim, SUBDOMAIN)
    host = entry.get("hostPath")
    if isinstance(host, dict) and (not host.get("path") or ".." in host["path"].split("/")):
        yield Flaw("hostPath.path", host.get("path"), "expected a path without '..'")


def _constraint(entry: Json) -> Flaws:
    if not isinstance(entry.get("maxSkew"), int) or entry["maxSkew"] < 1:
        yield Flaw("maxSkew", entry.get("maxSkew"), "expected a whole number, 1 or more")
    yield from _topology_key(entry)
    choices = ("DoNotSchedule", "ScheduleAnyway")
    yield from _one_of(entry, "whenUnsatisfiable", *choices, is_optional=False)
    yield from _under("labelSelector", _selector(entry.get("labelSelector") or {}))


def _topology_key(entry: Json) -> Flaws:
    if not _is_key(entry.get("topologyKey")):
        yield Flaw("topologyKey", entry.get("topologyKey"), KEY)


def _selector(selector: Json) -> Flaws:
    yield from _under("matchLabels", _labels(selector.get("matchLabels") or {}))
    yield from _each(selector, "matchExpressions", _label_rule)


def _label_rule(entry: Json) -> Flaws:
    yield from _rule(entry, "In", "NotIn", "Exists", "DoesNotExist")


def _node_rule(entry: Json) -> Flaws:
    yield from _rule(entry, "In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")


def _rule(entry: Json, *operators: str) -> Flaws:
    if not _is_key(entry.get("key")):
        yield Flaw("key", entry.get("key"), KEY)
    how, values = entry.get("operator"), entry.get("values") or []
    yield from _one_of(entry, "operator", *operators, is_optional=False)
    if how in ("In", "NotIn") and not values:
        yield Flaw("values", values, f"expected one or more with the operator {how}")
    if how in ("Exists", "DoesNotExist") and values:
        yield Flaw("values", values, f"expected none with the operator {how}")
    if how in ("Gt", "Lt") and len(values) != 1:
        yield Flaw("values", values, f"expected exactly one with the operator {how}")
    for at, value in enumerate(values):
        if how in ("In", "NotIn") and not _is_value(value):
            yield Flaw(f"values[{at}]", value, NAME)


def _affinity(rules: Json) -> Flaws:
    node = rules.get("nodeAffinity") or {}
    required = node.get(REQUIRED)
    where = f"nodeAffinity.{REQUIRED}"
    if isinstance(required, dict):
        if not required.get("nodeSelectorTerms"):
            yield Flaw(f"{where}.nodeSelectorTerms", [], "expected one or more")
        yield from _under(where, _each(required, "nodeSelectorTerms", _node_term))
    yield from _weighted("nodeAffinity", node, "preference", _node_term)
    for kind in ("podAffinity", "podAntiAffinity"):
        near = rules.get(kind) or {}
        yield from _under(kind, _each(near, REQUIRED, _pod_term))
        yield from _weighted(kind, near, "podAffinityTerm", _pod_term)


def _weighted(kind: str, rules: Json, field: str, check: Callable[[Json], Flaws]) -> Flaws:
    def one(entry: Json) -> Flaws:
        weight = entry.get("weight")
        if not isinstance(weight, int) or not 1 <= weight <= 100:
            yield Flaw("weight", weight, "expected a whole number from 1 to 100")
        yield from _under(field, check(entry.get(field) or {}))

    yield from _under(kind, _each(rules, PREFERRED, one))


def _node_term(term: Json) -> Flaws:
    yield from _each(term, "matchExpressions", _node_rule)


def _pod_term(term: Json) -> Flaws:
    yield from _topology_key(term)
    yield from _under("labelSelector", _selector(term.get("labelSelector") or {}))


def _init_container(entry: Json) -> Flaws:
    if not entry.get("image"):
        yield Flaw("image", entry.get("image"), "expected the name of an image")
    yield from _one_of(entry, "restartPolicy", "Always")
    yield from _container(entry)


def _container(entry: Json) -> Flaws:
    name = entry.get("name")
    if not (isinstance(name, str) and _LABEL.fullmatch(name)):
        yield Flaw("name", name, LABEL)
    image = entry.get("image")
    if isinstance(image, str) and image != image.strip():
        yield Flaw("image", image, "expected no spaces around it")
    yield from _one_of(entry, "imagePullPolicy", "Always", "IfNotPresent", "Never")
    yield from _under("resources", _resources(entry.get("resources") or {}))
    yield from _each(entry, "volumeMounts", _mount)
    yield from _each(entry, "envFrom", _env_source)
    for at, variable in enumerate(entry.get("env") or ()):
        if variable.get("value") and variable.get("valueFrom"):
            words = "expected a value or valueFrom, not both"
            yield Flaw(f"env[{at}].valueFrom", variable["valueFrom"], words)
    yield from _each(entry, "ports", _port)


def _resources(entry: Json) -> Flaws:
    amounts = {}
    for kind in ("requests", "limits"):
        for name, value in (entry.get(kind) or {}).items():
            amount = amounts[kind, name] = quantity(value)
            if name not in STANDARD and not ("/" in name and _is_key(name)):
                words = "expected cpu, memory, ephemeral-storage or a name such as nvidia.com/gpu"
                yield Flaw(kind, name, words)
            elif amount is None or amount < 0:
                yield Flaw(f"{kind}.{name}", value, QUANTITY)
    for (kind, name), amount in amounts.items():
        limit = amounts.get(("limits", name))
        if kind == "requests" and amount is not None and limit is not None and amount > limit:
            words = f"expected at most the limit, {entry['limits'][name]}"
            yield Flaw(f"requests.{name}", entry["requests"][name], words)


def _mount(entry: Json) -> Flaws:
    path = entry.get("mountPath")
    if not path or ":" in path:
        yield Flaw("mountPath", path, "expected a path without ':'")
    sub = entry.get("subPath")
    if sub and (sub.startswith("/") or ".." in sub.split("/")):
        yield Flaw("subPath", sub, "expected a relative path without '..'")


def _env_source(entry: Json) -> Flaws:
    for kind in ("secretRef", "configMapRef"):
        if kind in entry:
            yield from _under(kind, _named(entry[kind] or {}))


def _port(entry: Json) -> Flaws:
    number = entry.get("containerPort")
    if not isinstance(number, int) or not 1 <= number <= 65_535:
        yield Flaw("containerPort", number, "expected a whole number from 1 to 65535")
    yield from _one_of(entry, "protocol", "TCP", "UDP", "SCTP")
