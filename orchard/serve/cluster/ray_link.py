"""The front's end of a replica on Ray Serve: calls over its handle, and Ray's errors as ours."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from orchard.serve.cluster.link import HttpRequest, Message, Pulse, ReplicaLost


class RayLink:
    """One replica, over its Ray Serve handle."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._answer = handle.options(method_name="answer", stream=True)
        self._pulses = handle.options(method_name="pulses", stream=True)

    async def answer(self, request: HttpRequest) -> AsyncIterator[list[Message]]:
        async with aclosing(_items(self._answer.remote(request.scope, request.body))) as batches:
            async for batch in batches:
                yield batch

    async def pulses(self) -> AsyncIterator[Pulse]:
        async with aclosing(_items(self._pulses.remote())) as signs:
            async for fields in signs:
                yield Pulse(**fields)


async def _items(response: Any) -> AsyncGenerator[Any, None]:
    """What a stream of Ray Serve brings. Leaving it early cancels the call in the replica."""
    done = False
    try:
        with _losses():
            async for item in response:
                yield item
        done = True
    finally:
        if not done:
            response.cancel()


@contextmanager
def _losses() -> Iterator[None]:
    """Ray's ways to say that a replica is gone, as ours. What the app itself raised stays an error of the app."""
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except RayTaskError as error:
        raise RuntimeError("the app failed in its replica; Ray's log says more") from error
    except (RayError, RayServeException) as error:
        raise ReplicaLost(f"{type(error).__name__}: {error}") from error
