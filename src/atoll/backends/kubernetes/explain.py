"""What `kubectl explain training` says of each field, and the schema of a status. Pure.

A description is looked up by the path of its field, else by its name: `rootCause.exitCode`, then
`exitCode`. Items of lists have no step of their own in a path.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.backends.kubernetes.resource import ExitGroup, RankGroup
from atoll.core.phase import Phase
from atoll.core.reasons import ExitReason, PhaseReason, listing
from atoll.core.status import AttemptStatus, Event, StatusHead

Json = dict[str, Any]

SPEC = {
    "worldSize.min": "Fewest ranks that the training can run with. Below it, it is pending.",
    "worldSize.target": "Ranks wanted now; the one number that may change later, by kubectl scale.",
    "worldSize.max": "Most ranks that it may be scaled to.",
    "worldSize": "How many ranks: at least min, at most max, target of them now.",
    "command": "The program that every rank runs, with its arguments. Either this or source.",
    "source": "Code that is shipped with the training and run by every rank.",
    "source.kind": "What the content is.",
    "source.content": "The code itself, in base64.",
    "source.filename": "The name of the file that ranks find it under.",
    "source.directory": "Where its modules are, if ranks can see that directory.",
    "code": "The directory that the training was deployed from; ranks start in its root.",
    "code.content": "The digest of its archive in base64; the archive is in ConfigMaps.",
    "code.size": "Bytes of the archive.",
    "code.unpacked": "Bytes of its files.",
    "code.files": "Number of its files.",
    "code.path": "Folders in it where ranks look for modules, too.",
    "args": "Arguments that are added to the command, or given to the source.",
    "image": "The container image of ranks.",
    "env": "Environment variables of ranks. Those that atoll sets itself are refused.",
    "workingDir": "The directory that ranks start in; an absolute path.",
    "resources": "What every rank needs.",
    "resources.cpu": "CPUs of a rank, as a quantity of Kubernetes: 500m, 2.",
    "resources.memory": "Memory of a rank, as a quantity of Kubernetes: 4Gi.",
    "resources.gpuCount": "GPUs of a rank.",
    "resources.gpuModels": "Models of GPU that will do; any, if there are none.",
    "resources.minGpuMemoryGb": "The least memory of a GPU that will do, in GB.",
    "providerFilter": "Which providers of machines may be used.",
    "providerFilter.include": "Only these providers; any, if it is not set.",
    "providerFilter.exclude": "None of these providers.",
    "topologySpread": "How ranks are spread over hosts, providers and regions.",
    "ncclEnv": "Environment variables for NCCL, which count more than those in env.",
    "bench": "Whether the link between two hosts is measured at the start.",
    "bench.mode": "on-start or off.",
    "bench.placement": "preferred, or strict: the training waits for hosts that can be measured.",
    "bench.requireGbps": "The training fails if the link is slower, in Gbit/s.",
    "rendezvous": "How ranks find each other.",
    "rendezvous.backend": "The kind of rendezvous.",
    "rendezvous.uri": "An object store where ranks meet: s3://bucket/prefix.",
    "runId": "The run in the object store that the training begins, or goes on with.",
    "mesh": "Whether ranks wait until every host can reach every other.",
    "pipPackages": "Python packages that are installed before a rank starts.",
    "maxRestarts": "How often a rank that fails is started again.",
    "startGraceS": "Seconds after which min ranks may start without the rest.",
    "stopGraceS": "Seconds that a rank has to end after it was asked to stop.",
    "deadlineS": "Seconds after which the training fails, counted from when ranks were let go.",
    "ttlSeconds": "Seconds after its end when the training is removed.",
    "stallS": "Seconds without a line, a report or CPU after which a rank is told of.",
    "stallRestart": "Whether such a rank is started again, out of maxRestarts.",
    "executor": "Where ranks run: the name of an executor.",
    "cancel": "true stops the ranks and keeps the record. It cannot be taken back.",
}

SECONDS = "in seconds since 1970"
STATUS = {
    "phase": f"One of {', '.join(filter(None, Phase))}.",
    "reason": f"Why it is in its phase. {listing(PhaseReason)}.",
    "message": "The same for people, in one sentence.",
    "observedGeneration": "The newest generation of the spec that this status takes into account.",
    "selector": "The labels of the pods of its ranks.",
    "restarts": "How often ranks were started again, all together.",
    "world": "How many ranks there are, and how many there should be.",
    "ready": "Ranks wanted that run or have exited with code 0.",
    "target": "Ranks wanted.",
    "min": "Fewest ranks that it can run with.",
    "max": "Most ranks that it may be scaled to.",
    "belowMinimum": "Whether fewer than min ranks are ready.",
    "rootCause": "How the rank ended that brought the training down.",
    "rank": "The number of the rank.",
    "exitCode": "The exit code; not there if it could not be learned.",
    "terminationReason": f"How it ended. {listing(ExitReason)}.",
    "restartCount": "How often the rank had been started again.",
    "signal": "The signal that killed it.",
    "startedAt": f"When it started, {SECONDS}.",
    "endedAt": f"When it ended, {SECONDS}.",
    "host": "The node that it ran on.",
    "collateral": "Whether it fell or was stopped because another had failed.",
    "logTail": "The last lines of its log.",
    "conditions": "What is true of the training; kubectl wait --for=condition=Ready waits for one.",
    "type": "The name of it.",
    "status": "True, False or Unknown.",
    "lastTransitionTime": "When its status last changed.",
    "conditions.type": "Ready, Complete, Succeeded, Failed, Cancelled, Admitted, BelowMinimum, "
    "and others where they apply: RanksLost, Warnings, ExitsFromBackend, MeshCapable, "
    "DegradedMesh, ExecutorMissing, ExecutorUnreachable, StatusIncomplete.",
    "conditions.reason": "Why, in one word.",
    "gateOpenedAt": f"When ranks were let go, {SECONDS}.",
    "failing": "The reason of a decision to fail, until every rank has stopped.",
    "failingMessage": "The same for people.",
    "desiredAt": f"When the executor was last asked for ranks that it does not show, {SECONDS}.",
    "desired": "What the executor was last asked for.",
    "version": "It grows with every change.",
    "size": "Ranks 0 to size-1 are wanted.",
    "discardedAttempts": "Ranks, each with an attempt that does not count.",
    "worldSizeHistory": "How the size of the world changed, the latest changes.",
    "at": f"When it was, {SECONDS}.",
    "lastResize": "The latest change of the target.",
    "fromTarget": "The target before.",
    "toTarget": "The target after.",
    "isReleased": "Whether the executor holds nothing of it any more.",
    "rendezvousEndpoint": "Where ranks find each other.",
    "mesh": "Whether the hosts can reach each other.",
    "state": "How far that is.",
    "hosts": "How many hosts there are.",
    "foreignWrites": "Keys of the gate that somebody else wrote, and that were put right.",
    "startedMonotonic": "The steady time of created, ended and bench, where it is not the wall's.",
    "clockSkew": "Seconds by which the clock of the ranks differs from the steady one.",
    "bench": "The measurement of the link between two hosts.",
    "result": "What was measured.",
    "completedAt": f"When it was over, {SECONDS}.",
    "measuredAt": f"When it was measured, {SECONDS}.",
    "probeNodeA": "The one host.",
    "probeNodeB": "The other host.",
    "sizeBytesSwept": "The sizes of messages, in bytes.",
    "busbwGbpsP10": "Bus bandwidth, 10th percentile, in Gbit/s.",
    "busbwGbpsP50": "Bus bandwidth, median, in Gbit/s.",
    "busbwGbpsP90": "Bus bandwidth, 90th percentile, in Gbit/s.",
    "algbwGbpsP50": "Bandwidth as a program sees it, median, in Gbit/s.",
    "latencyUsAt1Mib": "Time of a message of 1 MiB, in microseconds.",
    "isWorkerPair": "Whether the hosts are those of two ranks.",
    "points": "Pairs of bytes and Gbit/s.",
    "events": "What happened, the oldest first; the latest 100.",
    "events.reason": "What happened, in one word.",
    "events.type": "Normal or Warning.",
    "warnings": "What is wrong with how it trains, in sentences.",
    "stalled": "Ranks that do not move, and since when, in seconds since 1970.",
    "attempts": "Earlier attempts of ranks: the latest 20 of each, 500 in all.",
    "attempts.rank": "The rank.",
    "attempts.attempt": "Its number, from 0.",
    "attempts.reason": f"How it ended, in one word: {listing(ExitReason)}.",
    "attempts.message": "The same for people.",
    "count": "How often it happened in a row.",
    "id": "Its number.",
    "ranks": "The ranks, those in the same state together.",
    "ranks.ranks": "Which ranks: 0-192, 195.",
    "ranks.phase": "Pending, Running, Succeeded, Failed or Stopped.",
    "ranks.message": "What these ranks wait for, or how they ended.",
    "ranks.restarts": "How often each of them was started again.",
    "removedRanks": "Ranks that were scaled away, those in the same state together.",
    "rankData": "All that is known of the ranks: JSON through zlib, in base64. atoll reads this.",
    "isStopped": "Whether atoll asked it to stop.",
    "rankExits": "How every rank that ran ended; those that ended alike together.",
}


def status_schema() -> Json:
    """Open: a newer controller may add fields. Only types are checked, and no field is required."""
    roots = (StatusHead, RankGroup, ExitGroup, Event, AttemptStatus)
    schemas, parts = msgspec.json.schema_components(roots, ref_template="{name}")
    head, ranks, exits, event, attempt = (_opened(node, parts) for node in schemas)
    head["properties"] |= {
        "selector": {"type": "string"},
        "restarts": {"type": "integer"},
        "conditions": _list(_object({name: {"type": "string"} for name in CONDITION})),
        "events": _list(event),
        "attempts": _list(attempt),
        "ranks": _list(ranks),
        "removedRanks": _list(ranks),
        "rankExits": _list(exits),
        "rankData": {"type": "string"},
    }
    moment = head["properties"]["conditions"]["items"]["properties"]["lastTransitionTime"]
    moment["format"] = "date-time"
    text = f"What was seen. Of rankExits, terminationReason is {listing(ExitReason)}."
    return described(head, STATUS, text)


CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")


def described(schema: Json, texts: dict[str, str], description: str, path: str = "") -> Json:
    """The schema with the description of every field. Raises KeyError if there is none."""
    schema = {**schema, "description": description}
    node = schema["items"] if "items" in schema else schema
    if properties := node.get("properties"):
        named = {}
        for name, part in properties.items():
            own = f"{path}.{name}".removeprefix(".")
            text = texts.get(own) or texts.get(name)
            if text is None:
                raise KeyError(f"{own} has no description in backends/kubernetes/explain.py")
            named[name] = described(part, texts, text, own)
        node = {**node, "properties": named}
        schema = {**schema, "items": node} if "items" in schema else {**schema, **node}
    return schema


def _object(properties: Json) -> Json:
    return {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": properties,
    }


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _opened(node: Json, parts: dict[str, Any]) -> Json:
    """The types of a schema alone, every object of it open."""
    if "$ref" in node:
        return _opened(parts[node["$ref"]], parts)
    if "anyOf" in node:
        # Otherwise the API server drops a null, and an exit code that is not known is missing.
        (node,) = [part for part in node["anyOf"] if part.get("type") != "null"]
        return {**_opened(node, parts), "nullable": True}
    if "properties" in node:
        return _object({name: _opened(part, parts) for name, part in node["properties"].items()})
    if node.get("type") == "array":
        items = node.get("items") or {}
        return _list(_opened(items, parts) if items else ANYTHING)
    if node.get("type") == "object":
        values = _opened(node["additionalProperties"], parts)
        return {"type": "object", "additionalProperties": values}
    if "type" not in node and "enum" not in node:
        return ANYTHING
    return {"type": node.get("type", "string")}


ANYTHING = {"x-kubernetes-preserve-unknown-fields": True}
