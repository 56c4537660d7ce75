"""Lives that the index still knows although their instance is in no registry any more.

An instance that dies together with its sidecar can take no leave. Its registration expires; its blocks in
the index would be matched for ever and keep their slot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mooncake_core.index import Source


class Orphans:
    """Watches which sources have no registration, and for how long.

    Args:
        patience_s: how long a source may be without one: long enough for a sidecar to restart and carry its
            engine's epoch on, whose blocks would otherwise have to be written again.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: dict[Source, float] = {}

    def due(self, sources: Sequence[Source], registered: Collection[str], now_s: float) -> list[Source]:
        """The sources whose patience has ended; they are to be detached."""
        alone = [source for source in sources if source.instance not in registered]
        self._since_s = {source: self._since_s.get(source, now_s) for source in alone}
        return [source for source in alone if now_s - self._since_s[source] >= self._patience_s]
