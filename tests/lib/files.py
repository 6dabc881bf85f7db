"""Writes text files, and reads all that is below a folder."""


def write_text(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tree_of(folder):
    """Return what is below a folder: path -> the bytes of a file, or None for a folder."""
    return {path: None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}
