"""The executors of a control plane: which are configured, and whether each is reachable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.core.errors import AtollError, ValidationError
from atoll.core.executors import LOCAL, ExecutorList, ExecutorStatus
from atoll.core.ports import Executor

PROBE_S = 3.0


@dataclass(frozen=True)
class Setup:
    """What a control plane was started with."""

    kinds: Mapping[str, str] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)  # configured, but not usable: why
    default: str | None = None
    # The one namespace of an executor that cannot keep the ranks of several apart.
    only: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None  # the file
    is_changed: Callable[[], bool] = lambda: False
    notes: Callable[[], Sequence[str]] = lambda: ()  # what else is to be told of the executors
    # Since when statuses cannot be written, and why; None where they can.
    stale: Callable[[], tuple[float, str] | None] = lambda: None
    read_only: str = ""  # why nothing can be written, and what to do; empty if all is well
    new_token: str = "atoll token create"  # how a token is made for this control plane
    restart: str = ""  # how to start the control plane with a new file; empty if it cannot be

    def default_of(self, executors: Mapping[str, Executor]) -> str | None:
        """The executor of a training that names none: `local` if there is one, else the first."""
        if self.default is not None:
            return self.default
        return LOCAL if LOCAL in executors else next(iter(executors), None)

    def refusal(self, name: str | None, executors: Mapping[str, Executor]) -> str:
        """Why no training can start on that executor, and what to do about it."""
        if name is not None and name in self.unusable:
            return f"{self.unusable[name]}; once that is put right, {self.restart}"
        text = f"this control plane has: {', '.join(sorted(executors)) or 'none'}"
        if not self.restart:
            return text
        origin = "without an atoll.toml" if self.config is None else f"with {self.config}"
        changed = ", which has changed since" if self.is_changed() else ""
        return f"{text}; it was started {origin}{changed}; to start it anew, {self.restart}"

    def check_namespace(self, name: str | None, namespace: str) -> None:
        """Raises ValidationError where ranks of this namespace would not be kept from others'."""
        home = self.only.get(name or "", namespace)
        if namespace != home:
            raise ValidationError(
                "executor",
                name,
                f"its ranks all run as one user, so those of the namespace {namespace!r} could "
                f"read and stop everything of {home!r}: 'atoll serve --shared-namespaces' allows "
                "it where all who have a token trust each other",
            )

    def remark(self) -> str:
        """A note for readers of the list; empty if there is nothing to say."""
        changed = f"{self.config} has changed since the control plane was started: {self.restart}"
        first = [self.read_only] * bool(self.read_only) + [changed] * self.is_changed()
        return "\n".join([*first, *self.notes()])


async def probed(executors: Mapping[str, Executor], setup: Setup) -> ExecutorList:
    """The status of every executor. All are probed at once, and each has `PROBE_S` to answer."""
    default = setup.default_of(executors)
    reasons = await asyncio.gather(*(_why_not(executor) for executor in executors.values()))
    whys = {**dict(zip(executors, reasons, strict=True)), **setup.unusable}
    items = [
        ExecutorStatus(
            name=name,
            kind=setup.kinds.get(name, name),
            is_reachable=not why,
            message=why,
            is_default=name == default,
        )
        for name, why in sorted(whys.items())
    ]
    return ExecutorList(items=items, config=setup.config, message=setup.remark())


async def _why_not(executor: Executor) -> str:
    """Why the executor is not reachable, in one line; empty if it answers."""
    try:
        async with asyncio.timeout(PROBE_S):
            await executor.probe()
    except TimeoutError:
        return f"it did not answer within {PROBE_S:g} s"
    except (AtollError, OSError) as error:
        return " ".join(str(error).split())
    return ""
