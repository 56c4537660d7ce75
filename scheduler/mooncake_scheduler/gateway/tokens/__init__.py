"""From requests to token ids and block keys."""

from mooncake_scheduler.gateway.tokens.folder import ModelFolder, TemplateFailedError
from mooncake_scheduler.gateway.tokens.parity import mismatch
from mooncake_scheduler.gateway.tokens.prefix import Domain, Prefix
from mooncake_scheduler.gateway.tokens.tokens import Tokens

__all__ = ["Domain", "ModelFolder", "Prefix", "TemplateFailedError", "Tokens", "mismatch"]
