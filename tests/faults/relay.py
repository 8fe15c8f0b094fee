"""`relay.py ADDRESS PORT`: whoever connects to ADDRESS:PORT talks to 127.0.0.1:PORT."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress


async def main(address: str, port: int) -> None:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))

    async with await asyncio.start_server(serve, address, port) as server:
        await server.serve_forever()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
