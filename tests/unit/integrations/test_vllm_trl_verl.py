"""Weights in TRL, vLLM and verl: what their trainers and workers call, with stand-ins for them.

tests/integrations has the real ones.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from atoll.core.errors import NotFound, ValidationError
from atoll.integrations import trl, verl, vllm
from atoll.weights import Follower, Publisher


def test_trl_publishes_each_call(tmp_path: Path) -> None:
    transfer = trl.WeightTransfer(tmp_path, dtype=torch.bfloat16, full_every=2)
    transfer.init_weight_transfer()
    follower = Follower(tmp_path)
    for step in range(3):
        transfer.pause()
        transfer.send_weights(iter([("w", torch.full((4,), float(step)))]))
        transfer.resume()
        version = follower.next()
        assert version is not None
        assert version.step == step + 1  # as the trainer's model_version after it
        assert follower.tensors()["w"].tolist() == [step] * 4
        assert follower.tensors()["w"].dtype == torch.bfloat16
    transfer.destroy()


class _Engine(ABC):
    """As vLLM's WeightTransferEngine: what subclasses must have, and what they are given."""

    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.model, self.model_config = model, vllm_config

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class _Info:
    pass


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    for end in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        if part not in sys.modules:
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


def test_a_vllm_worker_loads_the_number_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    base = "vllm.distributed.weight_transfer.base"
    install(
        monkeypatch,
        base,
        WeightTransferEngine=_Engine,
        WeightTransferInitInfo=_Info,
        WeightTransferUpdateInfo=_Info,
    )
    install(
        monkeypatch,
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=lambda model: calls.append("start"),
        finalize_layerwise_reload=lambda model, config: calls.append("finish"),
    )

    class Factory:
        _registry: dict[str, Any] = {}

        @classmethod
        def register_engine(cls, name: str, engine: Any) -> None:
            cls._registry[name] = engine

    install(
        monkeypatch,
        "vllm.distributed.weight_transfer.factory",
        WeightTransferEngineFactory=Factory,
    )
    vllm.engine_class.cache_clear()
    vllm.register()
    vllm.register()

    class Model(torch.nn.Linear):
        def load_weights(self, weights: Any) -> None:
            calls.append("load")
            self.load_state_dict(dict(weights))

    publisher = Publisher(tmp_path)
    numbers = []
    for step in range(3):
        tensors = {"weight": torch.full((2, 3), float(step)), "bias": torch.zeros(2)}
        numbers.append(publisher.publish(tensors).number)
    model = Model(3, 2)
    engine = Factory._registry["atoll"](None, None, None, model)
    engine.init_transfer_engine(engine.init_info_cls(uri=str(tmp_path)))
    engine.start_weight_update()
    engine.receive_weights(engine.update_info_cls(number=numbers[1]))
    engine.finish_weight_update()
    assert calls == ["start", "load", "finish"]
    assert model.weight.unique().tolist() == [1.0]
    with pytest.raises(NotFound, match="99"):
        engine.receive_weights(engine.update_info_cls(number=99, timeout=0))
    engine.shutdown()
    vllm.engine_class.cache_clear()


def test_verl_receives_the_version_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: dict[str, Any] = {}

    class Registry:
        @staticmethod
        def register(backend: str) -> Any:
            return lambda cls: engines.setdefault(backend, cls)

    install(
        monkeypatch,
        "verl.checkpoint_engine.base",
        CheckpointEngine=object,
        CheckpointEngineRegistry=Registry,
    )
    verl.engine_class.cache_clear()
    verl.engine_class()
    with pytest.raises(ValidationError, match="uri"):
        engines["atoll"](bucket_size=1)
    uri = str(tmp_path)
    senders = [engines["atoll"](bucket_size=1, uri=uri) for _ in range(2)]
    receiver = engines["atoll"](bucket_size=1, uri=uri)
    actors, rollouts = engines["atoll"].build_topology(2, 1, [{}] * 3)
    for rank, sender in enumerate(senders):
        sender.init_process_group(is_sender=actors["is_sender"][rank])
    receiver.init_process_group(is_sender=rollouts["is_sender"][0])

    async def update(step: int) -> dict[str, torch.Tensor]:
        for sender in senders:
            weights = (pair for pair in [("w", torch.full((3,), float(step)))])
            await sender.send_weights(weights, global_steps=step)
            assert next(weights, None) is None
        return {name: each.clone() async for name, each in receiver.receive_weights(step)}

    for step in (1, 2, 2):
        assert asyncio.run(update(step))["w"].tolist() == [step] * 3
    verl.engine_class.cache_clear()
