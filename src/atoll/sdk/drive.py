"""Two drivers for one set of flows. This is the only code that exists twice."""

from __future__ import annotations

from atoll.sdk.effects import Flow, T
from atoll.sdk.wire import AsyncPerformer, Performer, Wire


def drive(flow: Flow[T], wire: Wire) -> T:
    perform = Performer(wire)
    try:
        effect = next(flow)
        while True:
            try:
                answer = perform(effect)
            except Exception as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        perform.close()


async def adrive(flow: Flow[T], wire: Wire) -> T:
    perform = AsyncPerformer(wire)
    try:
        effect = next(flow)
        while True:
            try:
                answer = await perform(effect)
            except Exception as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        await perform.close()
