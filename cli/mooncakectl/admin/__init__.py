"""Asking a scheduler's admin port."""

from mooncakectl.admin.client import AdminClient, AdminError, connected
from mooncakectl.admin.find import admin_urls

__all__ = ["AdminClient", "AdminError", "admin_urls", "connected"]
