"""Rows of data sets in files, and a tokenizer that spells them out."""

import json


class Characters:
    """One token per character, after a token 0 that marks the beginning."""

    def encode(self, text, add_bos, add_eos):
        return [0] * add_bos + [ord(character) for character in text] + [1] * add_eos

    def decode(self, ids):
        return "".join(map(chr, ids))


def write_rows(path, *rows):
    """Write rows, or lines of bytes, into a file; returns its path."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path
