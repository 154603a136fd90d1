"""Several generations read as one stream: the choices of one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from deployment.serving import GenerationCall, ServedChunk, Service


async def merged(service: Service, calls: Sequence[GenerationCall]) -> AsyncGenerator[tuple[int, ServedChunk], None]:
    """Chunks of all calls as they come, each with the index of its call.

    The first error ends all of them. Closing the generator cancels every call and returns after each was closed.
    """
    if len(calls) == 1:
        async with aclosing(service.generate(calls[0])) as stream:
            async for served in stream:
                yield 0, served
        return
    queue: asyncio.Queue[tuple[int, ServedChunk] | BaseException | None] = asyncio.Queue(maxsize=len(calls))
    tasks = [asyncio.create_task(_pump(service, call, index, queue)) for index, call in enumerate(calls)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    service: Service,
    call: GenerationCall,
    index: int,
    queue: asyncio.Queue[tuple[int, ServedChunk] | BaseException | None],
) -> None:
    """Move one call's chunks, then ``None`` or its error, into the queue; a full queue slows the call down."""
    try:
        async with aclosing(service.generate(call)) as stream:
            async for served in stream:
                await queue.put((index, served))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
