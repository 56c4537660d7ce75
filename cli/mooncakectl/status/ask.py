"""Asking the schedulers of a cluster how it fares."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mooncakectl.admin import AdminClient, AdminError
from mooncakectl.status.snapshot import Answers
from mooncakectl.status.stores import ask_stores


async def ask_all(admins: Sequence[AdminClient]) -> Answers:
    """What schedulers and stores say now; schedulers that do not answer are problems, not errors."""
    results = await asyncio.gather(*map(_ask, admins), return_exceptions=True)
    answers = Answers()
    for result in results:
        if isinstance(result, AdminError):
            answers.problems.append(str(result))
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.instances.append(result[0])
            answers.stats.append(result[1])
    if answers.instances:
        answers.stores = await ask_stores(answers.instances[0].get("instances", []))
    return answers


async def _ask(admin: AdminClient) -> tuple[dict[str, Any], dict[str, Any]]:
    instances, stats = await asyncio.gather(admin.instances(), admin.stats())
    return instances, stats
