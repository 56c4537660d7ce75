"""The admin port of a scheduler."""

from mooncake_scheduler.admin.api import build_api
from mooncake_scheduler.admin.server import AdminServer

__all__ = ["AdminServer", "build_api"]
