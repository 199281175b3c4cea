"""The tokens of byte-level tokenizers, as texts and as the bytes that they stand for."""

from pathlib import Path


def byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level vocabularies: printable Latin-1 stands for itself, other bytes for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def spell(token: str, alphabet: dict[str, int]) -> bytes:
    """The bytes of a token as the vocabulary writes it; one that was put there as plain text stands for that."""
    values = [alphabet.get(character) for character in token]
    return token.encode() if None in values else bytes(value for value in values if value is not None)


def vocabulary(folder: Path) -> list[str]:
    """The tokens of a checkpoint's byte-level tokenizer, as its file spells them; special ones match no text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return ["" if token in special else tokenizer.id_to_token(token) or "" for token in range(size)]
