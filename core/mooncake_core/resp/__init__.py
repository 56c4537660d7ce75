"""A lean RESP client for the hot path: asyncio on hiredis' parser, one pipelined connection.

    client = RespClient("redis://127.0.0.1:6379/0", password=None)
    client.on_new_server = lambda run_id: ...      # Redis came back as another process: its memory is gone
    await client.connect()
    await client.call(b"GET", b"key", timeout_s=0.005)          # reply, or ReplyError, or ConnectionError
    await client.call_many([(b"GET", b"a"), (b"GET", b"b")])    # one write, replies in order
    client.send_nowait(b"INCR", b"n")                           # fire and forget
    await client.eval(Script("return ARGV[1]"), [], [b"x"])     # EVALSHA, loaded where it is not known
    await client.close()

Any number of tasks may share one client. A call on a broken connection fails at once with ConnectionError
while the client reconnects in the background; nothing is queued or sent twice.
"""

from mooncake_core.resp.address import Address
from mooncake_core.resp.client import RespClient
from mooncake_core.resp.connection import Argument, Reply
from mooncake_core.resp.errors import DeadlineError, DemotedError, ReplyError, UnavailableError, reply_error
from mooncake_core.resp.script import Script

__all__ = [
    "Address",
    "Argument",
    "DeadlineError",
    "DemotedError",
    "Reply",
    "ReplyError",
    "RespClient",
    "Script",
    "UnavailableError",
    "reply_error",
]
