from mooncake_core.index import Source
from mooncake_core.index.redis import RedisIndex
from mooncake_core.resp import RespClient
from mooncake_testing.redis import RedisServer


async def test_the_index_tells_the_attached_life_of_each_instance(redis_server: RedisServer) -> None:
    client = RespClient(redis_server.url)
    await client.connect()
    index = RedisIndex(client, namespace="sources")
    try:
        assert await index.sources() == []
        await index.attach(Source("a", 1))
        await index.attach(Source("b", 7))
        await index.attach(Source("a", 2))
        assert sorted(await index.sources()) == [Source("a", 2), Source("b", 7)]
        await index.detach(Source("b", 7))
        assert await index.sources() == [Source("a", 2)]
    finally:
        await client.close()
