"""The prefix index: which instance holds which blocks, in which tier."""

from mooncake_core.index.contract import Change, Depth, PrefixIndex, Removed, Source, Stored, Tier

__all__ = ["Change", "Depth", "PrefixIndex", "Removed", "Source", "Stored", "Tier"]
