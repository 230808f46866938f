"""The executors of this control plane over HTTP: which there are, and whether they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atoll.core.errors import AtollError
from atoll.core.executors import LOCAL, ExecutorList, ExecutorStatus
from atoll.core.ports import Executor, Probing

PROBE_S = 3.0


@dataclass(frozen=True)
class Setup:
    """What a control plane was started with."""

    kinds: Mapping[str, str] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)  # configured, but why it is not here
    default: str | None = None
    config: str | None = None  # the file
    is_changed: Callable[[], bool] = lambda: False
    restart: str = ""  # how it can be started with another file, if it can

    def default_of(self, executors: Mapping[str, Executor]) -> str | None:
        """Where a training runs that does not say: `local` if that is here, else the first."""
        if self.default is not None:
            return self.default
        return LOCAL if LOCAL in executors else next(iter(executors), None)

    def refusal(self, name: str | None, executors: Mapping[str, Executor]) -> str:
        """Why no training can be started on that executor, and what to do about it."""
        if name is not None and name in self.unusable:
            return f"{self.unusable[name]}; once that is put right, {self.restart}"
        text = f"this control plane has: {', '.join(sorted(executors)) or 'none'}"
        if not self.restart:
            return text
        origin = "without an atoll.toml" if self.config is None else f"with {self.config}"
        changed = ", which has changed since" if self.is_changed() else ""
        return f"{text}; it was started {origin}{changed}; to start it anew, {self.restart}"

    def remark(self) -> str:
        """What a reader of the list should know besides."""
        if not self.is_changed():
            return ""
        return f"{self.config} has changed since the control plane was started: {self.restart}"


async def probed(executors: Mapping[str, Executor], setup: Setup) -> ExecutorList:
    """All of them, asked at once; each has `PROBE_S` to answer."""
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
    """In one line; nothing if it answers."""
    if not isinstance(executor, Probing):
        return ""
    try:
        async with asyncio.timeout(PROBE_S):
            await executor.probe()
    except TimeoutError:
        return f"it did not answer within {PROBE_S:g} s"
    except (AtollError, OSError) as error:
        return " ".join(str(error).split())
    return ""
