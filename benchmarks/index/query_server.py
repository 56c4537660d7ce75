"""`POST /query` over the index on Redis with nothing around it. Prints its port, then serves."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop
from mooncake_core.blocks import block_keys
from mooncake_core.index import RedisIndex
from mooncake_core.resp import RespClient


class Query(msgspec.Struct):
    model: str
    token_ids: list[int]
    block_size: int


async def serve(url: str, namespace: str) -> None:
    client = RespClient(url)
    await client.connect()
    index = RedisIndex(client, namespace=namespace, timeout_s=10)
    decoder = msgspec.json.Decoder(Query)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            length = int(head.lower().partition(b"content-length:")[2].split(None, 1)[0])
            query = decoder.decode(await reader.readexactly(length))
            matched = await index.match(block_keys(query.token_ids, query.block_size))
            size = query.block_size
            body = msgspec.json.encode(
                {
                    name: {"longest_matched": depth.ssd * size, "GPU": depth.hbm * size}
                    for name, depth in matched.items()
                }
            )
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2]))
