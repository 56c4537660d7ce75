"""Token ids of conversations so far, so that each turn tokenises only what is new.

A text may be cut behind a special token: tokenizers cut there themselves before anything else. What was
tokenised up to such a place is kept by the hash of the text before it, and the next turn of the conversation
contains that text again. Tokenizers for which this does not hold are found out by trying, and not cached.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from threading import Lock
from typing import Final

from xxhash import xxh3_128_digest

from mooncake_scheduler.gateway.tokens.folder import ModelFolder

MOST_TOKENS: Final = 16_000_000
"""Ids kept in all: 64 MB."""
LOOK_BACK: Final = 64
"""Special tokens from the end at which a known beginning is looked for."""
_SAMPLES: Final = (
    "Hello, world",
    " leading space",
    "\nnew line",
    "ünïcödé 中文",
    "1234 + 5678",
    "  two  spaces ",
)


class Conversations:
    """Tokenises texts that begin like earlier ones. May be used from several threads.

    Args:
        folder: the model's tokenizer.
        most_tokens: bound on the ids kept.
    """

    def __init__(self, folder: ModelFolder, most_tokens: int = MOST_TOKENS) -> None:
        self._folder = folder
        self._most_tokens = most_tokens
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self._tokens = 0
        self._lock = Lock()
        self._cuts = self._find_cuts()
        self.hits = 0
        self.misses = 0

    @property
    def can_cut(self) -> bool:
        """Whether this tokenizer's texts can be cut at all."""
        return self._cuts is not None

    def encode(self, text: str) -> array[int]:
        """Ids of a text in which special tokens stand already, such as a rendered chat."""
        if self._cuts is None:
            return array("I", self._folder.encode(text, add_special_tokens=False))
        places = [match.end() for match in self._cuts.finditer(text)]
        known, begin = self._longest_known(text, places)
        if begin == 0:
            self.misses += 1
        else:
            self.hits += 1
        if places and places[-1] > begin:
            # Up to the last cut separately: that part is what the next turn will ask for.
            known = known + array(
                "I", self._folder.encode(text[begin : places[-1]], add_special_tokens=False)
            )
            begin = places[-1]
            self._keep(_key(text[:begin]), known)
        return known + array("I", self._folder.encode(text[begin:], add_special_tokens=False))

    def _longest_known(self, text: str, places: list[int]) -> tuple[array[int], int]:
        for place in reversed(places[-LOOK_BACK:]):
            key = _key(text[:place])
            with self._lock:
                ids = self._kept.get(key)
                if ids is not None:
                    self._kept.move_to_end(key)
                    return ids, place
        return array("I"), 0

    def _keep(self, key: bytes, ids: array[int]) -> None:
        with self._lock:
            before = self._kept.pop(key, None)
            self._tokens += len(ids) - (0 if before is None else len(before))
            self._kept[key] = ids
            while self._tokens > self._most_tokens and self._kept:
                self._tokens -= len(self._kept.popitem(last=False)[1])

    def _find_cuts(self) -> re.Pattern[str] | None:
        """A pattern for the special tokens behind which texts may be cut; None when it does not hold."""
        able = [
            token.content
            for token in self._folder.tokenizer.get_added_tokens_decoder().values()
            if token.special and not (token.lstrip or token.rstrip or token.normalized or token.single_word)
        ]
        if not able:
            return None
        encode = self._folder.encode
        for token in (able[0], able[-1]):
            for sample in _SAMPLES:
                head, tail = "start " + sample + token, sample + token + sample
                whole = encode(head + tail, add_special_tokens=False)
                if whole != encode(head, add_special_tokens=False) + encode(tail, add_special_tokens=False):
                    return None
        return re.compile("|".join(re.escape(token) for token in sorted(able, key=len, reverse=True)))


def _key(text: str) -> bytes:
    return xxh3_128_digest(text.encode("utf-8", "surrogatepass"))
