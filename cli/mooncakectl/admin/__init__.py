"""Asking a scheduler's admin port."""

from mooncakectl.admin.client import AdminClient, AdminError
from mooncakectl.admin.find import admin_url

__all__ = ["AdminClient", "AdminError", "admin_url"]
