"""What single tokens look like, for log-probabilities: their text and their bytes."""

from itertools import count

from transformers import PreTrainedTokenizerBase

from quire.sampling.detokenizer import REPLACEMENT


class TokenPieces:
    """Texts and bytes of a tokenizer's tokens.

    Args:
        tokenizer: None for a model without one: tokens are then named by their ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # as large as the vocabulary at most

    def text(self, token_id: int) -> str:
        """The text a token adds to what is before it: with its leading space, where it has one.

        Decoded alone, SentencePiece tokens lose that space; so a token is decoded after itself.
        """
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        if token_id not in self._texts:
            alone = self._decode([token_id])
            self._texts[token_id] = self._decode([token_id, token_id])[len(alone) :]
        return self._texts[token_id]

    def raw(self, token_id: int) -> bytes:
        """A token's bytes, exact also where they are only a part of a character."""
        text = self.text(token_id)
        if self._tokenizer is None or REPLACEMENT not in text:
            return text.encode()
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if len(name) == len("<0x00>") and name.startswith("<0x"):
            return bytes.fromhex(name[3:5])
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


def _byte_level_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with (Radford et al. 2019, GPT-2).

    Printable bytes stand for themselves, the others for the letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(0x100)}


_BYTE_OF = _byte_level_alphabet()
