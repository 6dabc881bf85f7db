"""Writes text below folders, and sees what is in them."""


def write_text(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tree_of(folder):
    """The bytes of each file, and None for each folder."""
    return {path: None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}
