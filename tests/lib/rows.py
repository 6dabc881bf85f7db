"""Rows of data sets in files, and a tokenizer that spells them out."""

import json

import numpy as np


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


def prompt(number, token_ids=(1, 2), **fields):
    """A prompt as data sets give them."""
    texts = {"prompt_text": f"question {number}", "answer": f"answer {number}"}
    return {"prompt_index": number, "prompt_ids": np.array(token_ids), **texts} | fields
