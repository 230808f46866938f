"""Played by the Python that has the client under test: `scenes.py SCENE OPTIONS`.

Each scene uses the client as its users do and says what it found, as JSON on the last line.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import basilica
from basilica import BasilicaClient, ProviderFilter, WorldSize

WAIT_S = 19  # below 20 the client looks every second, not every five


def deploy(client, name, command, world, **options):
    size = WorldSize(*world)
    options = {"timeout": WAIT_S, "cpu": "1", "memory": "1Gi", **options}
    if hasattr(client, "deploy_distributed"):
        return client.deploy_distributed(name=name, command=command, world_size=size, **options)
    return basilica.distributed(
        name=name, command=command, world_size=size, client=client, **options
    )


def ended(client, name, seconds=100):
    """The deployment once it is over. The old client has no such wait."""
    deadline = time.monotonic() + seconds
    while True:
        found = client.get_deployment(name)
        if found.phase in ("succeeded", "failed", "cancelled"):
            return found
        assert time.monotonic() < deadline, found.phase
        time.sleep(0.05)


def gone(client, name):
    deadline = time.monotonic() + 30
    while True:
        try:
            client.get(name)
        except basilica.DeploymentNotFound as error:
            return type(error).__name__
        assert time.monotonic() < deadline
        time.sleep(0.05)


def world(training):
    return dataclasses.asdict(training.world)


def raised(action, *args, **options):
    """What an action raises, as [type, text]."""
    try:
        found = action(*args, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", repr(found)]


def lifecycle(client, name, flag, argv):
    training = deploy(
        client, name, argv, (2, 2, 4),
        env={"GREETING": "hello there"}, args=["from", "args"],
        nccl_env={"NCCL_DEBUG": "WARN"}, gpu_models=["H100"], min_gpu_memory_gb=40,
        provider_filter=ProviderFilter(include=[], exclude=["plum"]), topology_spread="pack",
        rendezvous_backend="c10d",
    )  # fmt: skip
    found = {"deployed": world(training), "name": training.name}
    scaled = training.scale(target=4)
    found["scaled"] = dataclasses.asdict(scaled)
    training.wait_until_target_world(timeout=WAIT_S)
    found["up"] = world(training)
    found["ranks"] = [dataclasses.asdict(rank) for rank in training.ranks]
    deadline = time.monotonic() + WAIT_S
    while not Path(f"{flag}-3").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # a rank that is stopped before it spoke has no log
    training.scale(target=2)
    training.wait_until_target_world(timeout=WAIT_S)
    found["down"] = world(training)
    found["left"] = [rank.rank for rank in training.ranks if rank.phase == "Running"]
    found["out of bounds"] = raised(training.scale, 5)
    found["metrics"] = dataclasses.asdict(training.metrics())
    found["listed"] = [item.name for item in client.list()]
    found["by name"] = client.get_by_name(name).name
    Path(flag).touch()
    if hasattr(training, "wait_until_complete"):
        found["complete"] = dataclasses.asdict(training.wait_until_complete(timeout=59))
        training.refresh()
        found["exits"] = [dataclasses.asdict(ended) for ended in training.rank_exits]
        found["phase"] = training.phase
        found["again"] = raised(training.wait_until_complete)
        found["too late"] = raised(training.scale, 3)
    ended(client, name)
    training.refresh()
    found["raw scale"] = raised(client._client.scale_distributed_deployment, name, 3)
    found["world"] = world(training)
    found["distributed"] = training._cached_status["distributed"]
    found["logs"] = training.logs()
    found["tail"] = training.logs(tail=1)
    found["events"] = training.events()
    found["few events"] = client.get_deployment_events(name, limit=2)
    training.delete()
    found["gone"] = gone(client, name)
    found["deleted twice"] = raised(training.delete)
    return found


def fast(client, name, command):
    """Over before the client looks for the first time."""
    training = deploy(client, name, command, (2, 2, 2), timeout=100)
    final = ended(client, name)
    found = {"phase": final.phase, "world": world(training), "state": final.state}
    found["logs"] = training.logs()
    if hasattr(training, "rank_exits"):
        training.refresh()
        found["exits"] = [dataclasses.asdict(each) for each in training.rank_exits]
    training.delete()
    return found


def failure(client, name, command, flag):
    training = deploy(client, name, command, (2, 2, 2))
    Path(flag).touch()
    found = {}
    if hasattr(training, "wait_until_complete"):
        found["complete"] = raised(training.wait_until_complete, timeout=59)
        found["exits"] = [dataclasses.asdict(each) for each in training.rank_exits]
        found["target"] = raised(training.wait_until_target_world, timeout=WAIT_S)
    final = ended(client, name)
    found.update(phase=final.phase, state=final.state)
    training.delete()
    return found


def errors(client, name, sleep):
    found = {"bad name": raised(deploy, client, "Not_A_Name", ["true"], (1, 1, 1))}
    training = deploy(client, name, sleep, (1, 1, 2))
    low_level = client._client
    found["taken"] = raised(deploy, client, name, sleep, (1, 1, 1))
    found["reserved"] = raised(deploy, client, "env", sleep, (1, 1, 1), env={"RANK": "3"})
    found["bounds"] = raised(low_level.scale_distributed_deployment, name, 7)
    found["min above target"] = raised(low_level.create_distributed_deployment, {
        "instanceName": "raw", "image": "x", "replicas": 1, "port": 1,
        "resources": {"cpu": "1", "memory": "1Gi"},
        "distributed": {"worldSize": {"min": 3, "target": 2, "max": 4}, "command": "true"},
    })  # fmt: skip
    found["get nobody"] = raised(client.get, "nobody")
    found["low-level get"] = raised(client.get_deployment, "nobody")
    found["delete nobody"] = raised(client.delete_deployment, "nobody")
    found["scale nobody"] = raised(low_level.scale_distributed_deployment, "nobody", 1)
    found["events nobody"] = raised(client.get_deployment_events, "nobody")
    found["logs nobody"] = raised(client.get_deployment_logs, "nobody")
    found["path"] = raised(client.get_deployment, "a/b")
    found["odd name"] = raised(client.get_deployment, "a b")
    large = {"BLOB": "x" * (65 * 2**20)}
    found["too large"] = raised(deploy, client, "large", sleep, (1, 1, 1), env=large)
    stranger = BasilicaClient(base_url=os.environ["BASILICA_API_URL"], api_key="wrong")
    found["denied"] = raised(stranger.get_deployment, name)
    found["denied health"] = raised(stranger.health_check)
    found["inference"] = raised(
        client.create_deployment, instance_name="web", image="nginx", port=80
    )
    found["rentals"] = raised(client.list_rentals)
    found["nodes"] = raised(client.list_nodes)
    found["ssh keys"] = raised(client.get_ssh_key)
    found["balance"] = raised(client.get_balance)
    health = client.health_check()
    found["health"] = [health.status, str(health.timestamp)]
    training.delete()
    found["reused"] = raised(deploy, client, name, sleep, (1, 1, 1))
    found["restarted"] = restarted(client, name)
    client.delete_deployment(name)
    return found


def restarted(client, name):
    before = client.get_deployment(name).created_at
    after = client.restart_deployment(name)
    return [after.instance_name, after.created_at > before]


def torchrun(client, name, command, options):
    training = deploy(client, name, command, (2, 2, 2), **options)
    return shown(client, training)


def function(client, name, backend):
    @basilica.distributed(
        name=name, world_size=WorldSize(2, 2, 2), timeout=59, rendezvous_backend=backend,
        cpu="1", memory="1Gi", env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    def train():
        import os

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1) * (int(os.environ["RANK"]) + 1)
        dist.all_reduce(total)
        os.write(1, f"total {int(total.item())} of {os.environ['WORLD_SIZE']}\n".encode())
        dist.destroy_process_group()

    return shown(client, train.deploy(client=client))


def shown(client, training):
    final = ended(client, training.name)
    training.refresh()
    found = {"phase": final.phase, "logs": training.logs()}
    found["rendezvous"] = training._cached_status["distributed"]["rendezvous"]
    training.delete()
    return found


def long_command(client, name, size):
    script = f": {'x' * size}; echo still here"
    training = deploy(client, name, ["sh", "-c", script], (1, 1, 1))
    found = {"phase": ended(client, name).phase, "logs": training.logs()}
    training.delete()
    return found


def outputs(client, name, commands):
    """What each command prints when it is given arguments too."""
    found = []
    for number, command in enumerate(commands):
        training = deploy(client, f"{name}-{number}", command, (1, 1, 1), args=["--more", "x y"])
        found.append([ended(client, training.name).phase, training.logs()])
        training.delete()
    return found


def bench(client, name, command, mode):
    """Measured while the ranks run."""
    training = deploy(client, name, command, (2, 2, 2), bench=mode)
    deadline = time.monotonic() + 90
    while training.bench is None:
        assert time.monotonic() < deadline, training._cached_status["distributed"]["bench"]
        time.sleep(0.1)
        training.refresh()
    found = dataclasses.asdict(training.bench)
    found["diagnostics"] = getattr(training, "bench_diagnostics", None)
    training.delete()
    return found


def outlived(client, name, command):
    """A time to live that ends before the run does, and what there is to read after it."""
    training = deploy(client, name, command, (1, 1, 1), ttl_seconds=8)
    final = ended(client, name)
    found = {"phase": final.phase, "message": final.message, "logs": training.logs()}
    training.delete()
    return found


def follow(client, name, command, flag):
    """A followed log is one answer, which ends with the training."""
    training = deploy(client, name, command, (1, 1, 1))
    import threading

    threading.Timer(0.5, Path(flag).touch).start()
    found = {"logs": training.logs(follow=True), "phase": ended(client, name).phase}
    training.delete()
    return found


def scope(client, name, sleep):
    """`with training:` deletes it, whatever happens inside."""
    try:
        with deploy(client, name, sleep, (1, 1, 1)):
            raise RuntimeError("inside")
    except RuntimeError as error:
        return {"error": str(error), "gone": gone(client, name)}


def start_only(client, name, command):
    return {"world": world(deploy(client, name, command, (2, 2, 2)))}


def finish(client, name, flag):
    before = client.get_deployment(name)
    Path(flag).touch()
    final = ended(client, name)
    return {"before": before.phase, "phase": final.phase, "ready": final.replicas.ready}


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(globals()[sys.argv[1]](BasilicaClient(), **json.loads(sys.argv[2])), default=str)
    )
