"""KV events: what an engine publishes of its cache, on the wire and as values.

`decode_batch` and `encode_batch` turn a payload into values and back, `framing` knows the ZMQ frames around
it, and `SequenceTracker` makes an exactly-once stream of messages that may be lost and replayed.

Source: vLLM `distributed/kv_events.py`, versions 0.12 to 0.33 (array and map encodings).
"""

from mooncake_core.events.decode import EventDecodeError, decode_batch
from mooncake_core.events.encode import encode_batch
from mooncake_core.events.model import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    low64,
)
from mooncake_core.events.sequence import (
    Apply,
    AskReplay,
    Effect,
    Resync,
    ResyncReason,
    SequenceTracker,
)

__all__ = [
    "AllBlocksCleared",
    "Apply",
    "AskReplay",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "Effect",
    "Event",
    "EventBatch",
    "EventDecodeError",
    "Resync",
    "ResyncReason",
    "SequenceTracker",
    "decode_batch",
    "encode_batch",
    "low64",
]
