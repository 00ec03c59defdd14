"""The state of a sequence that both sides compare: absolute positions and a chained hash (docs/design.md §4).

h_0 is eight zero bytes; h_i = BLAKE2b-64(h_{i-1} || token id as uint32, little-endian). As an integer a hash
is the little-endian value of its eight bytes. Being chained, the hash of any prefix is one look-up, and two
sequences that agree at a position agree everywhere before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

GENESIS_HASH = 0  # of the empty text
_MAX_TOKEN_ID = 2**32 - 1


def extend_hash(hash: int, token_ids: Iterable[int]) -> int:
    """Returns the hash of a sequence with hash `hash` after appending `token_ids`."""
    for token_id in token_ids:
        hash = _next_hash(hash, token_id)
    return hash


def _next_hash(hash: int, token_id: int) -> int:
    content = hash.to_bytes(8, "little") + int(token_id).to_bytes(4, "little")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def _hashes_after(hash: int, token_ids: Iterable[int]) -> list[int]:
    hashes = []
    for token_id in token_ids:
        hash = _next_hash(hash, token_id)
        hashes.append(hash)
    return hashes


class TokenChain:
    """Holds a sequence of token ids with the hash of each of its prefixes.

    Appending costs about a microsecond a token; truncating and `hash_at` are list operations.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._token_ids: list[int] = []
        self._hashes: list[int] = [GENESIS_HASH]  # _hashes[i] belongs to _token_ids[:i]
        self._ahead: tuple[int, list[int], list[int]] = (GENESIS_HASH, [], [])  # see `hash_with`
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def position(self) -> int:
        """Returns the number of tokens."""
        return len(self._token_ids)

    @property
    def hash(self) -> int:
        """Returns the hash of the whole sequence."""
        return self._hashes[-1]

    @property
    def token_ids(self) -> list[int]:
        """Returns the ids themselves, not a copy: they must not be changed."""
        return self._token_ids

    def hash_at(self, position: int) -> int:
        """Returns the hash of the first `position` tokens; 0 <= position <= self.position."""
        assert 0 <= position <= self.position, f"position {position} of {self.position}"
        return self._hashes[position]

    def hashes_after(self, position: int) -> list[int]:
        """Returns the hashes of all prefixes that are longer than `position`, the shortest first."""
        return self._hashes[position + 1 :]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens. An id outside uint32 raises OverflowError and leaves the chain unchanged."""
        new_ids = [int(token_id) for token_id in token_ids]
        last, known_ids, known = self._ahead
        if last != self._hashes[-1] or known_ids[: len(new_ids)] != new_ids:
            known = _hashes_after(self._hashes[-1], new_ids)
        self._token_ids += new_ids
        self._hashes += known[: len(new_ids)]

    def hash_with(self, token_ids: Iterable[int]) -> int:
        """Returns the hash after appending `token_ids`, without appending; to append them next is then free.

        An id outside uint32 raises OverflowError.
        """
        ids, last = list(token_ids), self._hashes[-1]
        hashes = _hashes_after(last, ids)
        self._ahead = (last, ids, hashes)
        return hashes[-1] if hashes else last

    def truncate(self, position: int) -> None:
        """Keeps the first `position` tokens; 0 <= position <= self.position."""
        assert 0 <= position <= self.position, f"truncate to {position} of {self.position}"
        del self._token_ids[position:]
        del self._hashes[position + 1 :]

    def agrees(self, position: int, hash: int) -> bool:
        """Returns whether the first `position` tokens exist here and have this hash."""
        return 0 <= position <= self.position and self._hashes[position] == hash

    def check_integrity(self) -> None:
        """Recomputes every hash; raises AssertionError where one is wrong."""
        assert len(self._hashes) == len(self._token_ids) + 1, "one hash a prefix"
        assert self._hashes[0] == GENESIS_HASH, "the empty text's hash"
        for index, token_id in enumerate(self._token_ids):
            assert 0 <= token_id <= _MAX_TOKEN_ID, f"token id {token_id} at {index}"
            expected = _next_hash(self._hashes[index], token_id)
            assert self._hashes[index + 1] == expected, f"the hash at {index + 1}"
