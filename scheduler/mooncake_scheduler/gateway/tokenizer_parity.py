"""Keeps track of which instances tokenise as the gateway does."""

from __future__ import annotations

import structlog

from mooncake_scheduler.gateway.roster import Member, Roster
from mooncake_scheduler.gateway.tokens import ModelFolder, mismatch

_log = structlog.get_logger(__name__)


class TokenizerParity:
    """Compares each instance once in its life.

    Args:
        folder: the gateway's tokenizer; None = there is nothing to compare.
        roster: the instances.
        model: the model's name at the engines.
    """

    def __init__(self, folder: ModelFolder | None, roster: Roster, model: str) -> None:
        self._folder = folder
        self._roster = roster
        self._model = model

    def trusted(self) -> bool:
        """Whether no instance is known to tokenise otherwise."""
        return not any(member.tokenizer_mismatch for member in self._roster.members.values())

    async def compare_new(self) -> None:
        """Compare the instances that were not compared in their present life."""
        if self._folder is None:
            return
        for member in list(self._roster.members.values()):
            if member.tokenizer_compared != member.instance.epoch and member.reachable:
                await self._compare(self._folder, member)

    async def _compare(self, folder: ModelFolder, member: Member) -> None:
        epoch = member.instance.epoch
        try:
            found = await mismatch(folder, member.upstream, self._model)
        except ConnectionError as error:
            _log.info("tokenisers not compared yet", instance=member.instance.id, error=str(error))
            return
        member.tokenizer_compared = epoch
        member.tokenizer_mismatch = found
        if found:
            _log.warning("TokenizerMismatch: /tokenize is used", instance=member.instance.id, why=found)
