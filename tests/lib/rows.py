"""Rows of data sets and records of runs in files, and a tokenizer that spells them out."""

import csv
import json

import numpy as np
import pyarrow
import pyarrow.parquet


class Characters:
    """Tokenizer with one token per character, after a token 0 that marks the beginning."""

    def encode(self, text, add_bos, add_eos):
        return [0] * add_bos + [ord(character) for character in text] + [1] * add_eos

    def decode(self, ids):
        return "".join(map(chr, ids))


def write_rows(path, *rows, torn=""):
    """Write rows, or lines of bytes, into a file of the kind that its name says.

    `torn` is the beginning of one more line. Returns the file's path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        path.write_bytes(b"".join(line + b"\n" for line in lines) + torn.encode())
    return path


def read_rows(path):
    return [json.loads(line) for line in path.open()]


def prompt(number, token_ids=(1, 2), **fields):
    texts = {"prompt_text": f"question {number}", "answer": f"answer {number}"}
    return {"prompt_index": number, "prompt_ids": np.array(token_ids), **texts} | fields
