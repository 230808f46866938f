"""The parameters of a model by plain names, whatever is wrapped around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from atoll.core.errors import ValidationError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Compiling and checkpointing a part of a model put this into the names of its parameters.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
# Classes that hold a whole model, and where.
OUTER = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
}
_HOLDER = "module."  # what holds a model of which nothing else is known


def plain_name(name: str) -> str:
    """The name of a parameter without what compiling and checkpointing put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model without what is around it."""
    while type(model).__name__ in OUTER:
        model = getattr(model, OUTER[type(model).__name__])
    return model


def plain_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All parameters, by names that do not tell of what is around the model or its parts."""
    return plain_names(model, dict(unwrapped(model).named_parameters()))


def plain_names(model: torch.nn.Module, values: dict[str, T]) -> dict[str, T]:
    """`values`, by their names in the unwrapped model, by the names they have without wrappers."""
    wrapped = [
        (f"{name}.{OUTER[type(part).__name__]}.", f"{name}.")
        for name, part in unwrapped(model).named_modules()
        if type(part).__name__ in OUTER
    ]
    # Inner parts first, as the names of those around them are still whole then.
    wrapped.sort(key=lambda each: -len(each[0]))

    def plain(name: str) -> str:
        for inside, outside in wrapped:
            if name.startswith(inside):
                name = outside + name[len(inside) :]
        return plain_name(name)

    named = {plain(name): value for name, value in values.items()}
    while named and all(name.startswith(_HOLDER) for name in named):
        named = {name[len(_HOLDER) :]: value for name, value in named.items()}
    return named if len(named) == len(values) else values


def check_module(model: Any) -> None:
    """Raises ValidationError for what is no model."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ValidationError("model", type(model).__name__, "expected a torch.nn.Module")


def read_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by their plain names.

    Raises ValidationError for a model without one, or with one that cannot be synchronised.
    """
    import torch

    kinds = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in kinds:
        raise ValidationError(
            "model", "FullyShardedDataParallel", "expected fully_shard, the second FSDP"
        )
    named: dict[str, torch.nn.Parameter] = {}
    for name, value in plain_parameters(model).items():
        if not value.requires_grad:
            continue
        if not value.is_floating_point():
            raise ValidationError(f"model.{name}", value.dtype, "expected a float type")
        if isinstance(value, torch.nn.parameter.UninitializedParameter):
            raise ValidationError(
                f"model.{name}", "without a shape", "expected the model to have seen a batch before"
            )
        if value.dtype.itemsize < 2:
            expected = "expected 16 bits or more: train it in another type, or freeze it"
            raise ValidationError(f"model.{name}", value.dtype, expected)
        if value.layout != torch.strided:
            raise ValidationError(f"model.{name}", value.layout, "expected a dense parameter")
        if value.is_meta:
            raise ValidationError(f"model.{name}", "on the meta device", "expected it with values")
        named[name] = value
    if not named:
        raise ValidationError("model", model, "expected a parameter with requires_grad")
    return named


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The values that this process holds; writing to them changes the parameter."""
    import torch

    if not hasattr(parameter, "to_local"):
        return parameter.detach()
    with torch.no_grad():  # it is quick then
        return parameter.to_local().detach()  # type: ignore[no-any-return]
