"""From requests to token ids and block keys."""

from mooncake_scheduler.gateway.tokens.prefix import Prefix
from mooncake_scheduler.gateway.tokens.tokens import Tokens

__all__ = ["Prefix", "Tokens"]
