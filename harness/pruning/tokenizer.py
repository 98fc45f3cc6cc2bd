"""SentencePiece BPE from a vocabulary with scores: text to token numbers.

    "so low"  ->  s o ▁ l o w  ->  so ▁ l o w  ->  so ▁ lo w  ->  so ▁ low  ->  so ▁low

Pieces that the vocabulary's author defined whole (runs of spaces or of line ends) are cut out
first, the longest that fits. In what is left a space is written ▁. Of all neighbours whose join is
a piece, the two of highest score are joined, the leftmost of equals, until none are left. A
character that is no piece becomes the pieces <0x..> of its UTF-8 bytes.
Source: Kudo and Richardson, arXiv 1808.06226; github google/sentencepiece, bpe_model.cc.
"""

import heapq
from collections.abc import Iterator, Sequence

NORMAL, USER_DEFINED = 1, 4  # SentencePiece's and GGUF's numbers for kinds of pieces


class Tokenizer:
    """A vocabulary: pieces, and by piece its score and its kind."""

    def __init__(self, pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]):
        """Index the pieces: their place is their token's number."""
        self.numbers = {piece: number for number, piece in enumerate(pieces)}
        entries = list(zip(pieces, scores, kinds, strict=True))
        self.scores = {piece: score for piece, score, kind in entries if kind == NORMAL}
        self.whole = {
            piece.replace("▁", " "): self.numbers[piece]
            for piece, _, kind in entries
            if kind == USER_DEFINED
        }
        self.longest = max(map(len, self.whole), default=0)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the text's tokens; nothing is put before or after."""
        numbers: list[int] = []
        for fragment in self._fragments(text):
            if fragment in self.whole:
                numbers.append(self.whole[fragment])
            else:
                for piece in self._join(fragment.replace(" ", "▁")):
                    numbers += self._numbers(piece)
        return numbers

    def _numbers(self, piece: str) -> list[int]:
        if piece in self.numbers:
            return [self.numbers[piece]]
        return [self.numbers[f"<0x{byte:02X}>"] for byte in piece.encode()]

    def _fragments(self, text: str) -> Iterator[str]:
        """Cut the text at its pieces that were defined whole."""
        start = at = 0
        while at < len(text):
            lengths = range(min(self.longest, len(text) - at), 0, -1)
            fits = next((size for size in lengths if text[at : at + size] in self.whole), 0)
            if fits:
                if start < at:
                    yield text[start:at]
                yield text[at : at + fits]
                start = at + fits
            at += max(fits, 1)
        if start < len(text):
            yield text[start:]

    def _join(self, text: str) -> list[str]:
        """Join characters to pieces; a joined piece stays at its left one's place."""
        symbols: list[str] = list(text)
        end = len(symbols)
        after, before = list(range(1, end + 1)), list(range(-1, end - 1))
        queue: list[tuple[float, int, str]] = []

        def offer(left: int) -> None:
            if left >= 0 and after[left] < end:
                joined = symbols[left] + symbols[after[left]]
                if joined in self.scores:
                    heapq.heappush(queue, (-self.scores[joined], left, joined))

        for left in range(end - 1):
            offer(left)
        while queue:
            _, left, joined = heapq.heappop(queue)
            right = after[left]
            if right == end or not symbols[left] or symbols[left] + symbols[right] != joined:
                continue  # one of the two was joined to another in the meantime
            symbols[left], symbols[right] = joined, ""
            after[left] = after[right]
            if after[left] < end:
                before[after[left]] = left
            offer(before[left])
            offer(left)
        return [symbol for symbol in symbols if symbol]
