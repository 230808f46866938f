"""`@atoll.distributed`: a function that can be called here, or deployed as a training."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack, overload

from atoll.core.errors import ValidationError
from atoll.sdk.client import Client
from atoll.sdk.options import DeployOptions, check_options
from atoll.sdk.sweep import Sweep, check_arguments, label_of
from atoll.sdk.training import DistributedTraining

_SUFFIX_BYTES = 3  # 16 million names: few enough characters to type


class DistributedFunction:
    """A function and the options of its trainings. Calling it calls the function here."""

    def __init__(self, function: Callable[..., Any], options: DeployOptions) -> None:
        for name in ("command", "source", "args"):
            if name in options:
                expected = "expected none: the function is what runs"
                raise ValidationError(name, dict(options)[name], expected)
        check_options(options)
        self.function = function
        self.options = options
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        return self.function(*args, **arguments)

    def local(self, *args: Any, **arguments: Any) -> Any:
        """Calls the function here, in this process, and returns what it returns."""
        return self.function(*args, **arguments)

    def deploy(self, *args: Any, **arguments: Any) -> DistributedTraining:
        """Deploys a call of the function with these arguments, and returns the handle at once.

        `result()` of the handle is what rank 0 returned. Raises ValidationError for arguments that
        the function does not take, before anything is sent.
        """
        name, options = self._call(args, arguments)
        return Client().deploy_distributed(name, **options)

    async def deploy_async(self, *args: Any, **arguments: Any) -> DistributedTraining:
        name, options = self._call(args, arguments)
        return await Client().deploy_distributed_async(name, **options)

    def map(
        self, settings: Iterable[Mapping[str, Any]], *, concurrency: int | None = None
    ) -> Sweep:
        """A training for each of the settings; see `Client.map`."""
        return Client().map(self.function, settings, concurrency=concurrency, **self.options)

    def with_options(self, **options: Unpack[DeployOptions]) -> DistributedFunction:
        """The same function with these options over its own."""
        return DistributedFunction(self.function, {**self.options, **options})

    def _call(self, args: Any, arguments: Mapping[str, Any]) -> tuple[str, DeployOptions]:
        check_arguments(self.function, arguments, "arguments", args)
        name = f"{label_of(self.function)}-{os.urandom(_SUFFIX_BYTES).hex()}"
        return name, {
            **self.options,
            "source": functools.partial(self.function, *args, **arguments),
        }


@overload
def distributed(function: Callable[..., Any], /) -> DistributedFunction: ...
@overload
def distributed(
    **options: Unpack[DeployOptions],
) -> Callable[[Callable[..., Any]], DistributedFunction]: ...
def distributed(function: Any = None, /, **options: Any) -> Any:
    """Makes a function deployable: `train.deploy(lr=0.1)`, and `train.local(lr=0.1)` here.

        @atoll.distributed(world_size=4, gpu_count=1)
        def train(lr: float): ...

    The options are those of `deploy_distributed`.
    """
    if function is not None:
        return DistributedFunction(function, {})
    return lambda body: DistributedFunction(body, options)  # type: ignore[arg-type]
