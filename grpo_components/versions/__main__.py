"""Rebuild versions of a policy: `python -m grpo_components.versions OUTPUT_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from safetensors import SafetensorError

from grpo_components.exchange.policy_versions import VersionId
from grpo_components.models.lora import lora_options
from grpo_components.plain_text import one_line
from grpo_components.settings import LoraSettings
from grpo_components.versions.kept_run import KeptRun


def open_run(output_dir: Path, attempts: dict[int, int] | None = None) -> KeptRun:
    """Open the versions that a run has kept."""
    config: Any = OmegaConf.load(output_dir / "config.yaml")
    try:
        values: Any = OmegaConf.to_container(config)
        section = values.get("lora")
        lora = LoraSettings(**section) if section else None
        base = Path(config.base_model_path)
    except Exception as error:  # whatever the file has there
        raise ValueError(f"{output_dir / 'config.yaml'}: {error!r}") from error
    return KeptRun(output_dir, base, lora_options(lora), attempts)


def _listing(run: KeptRun) -> str:
    lines = []
    for identity in run.kept.identities():
        header = run.kept.header(identity)
        base = header.base or "the base model"
        size = (run.folder / f"attempt_{identity.attempt}" / f"version_{identity.version}").stat()
        lines.append(f"{identity}: {header.checksum}, {size.st_size:,} bytes on {base}\n")
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """List the versions of a run, or rebuild one."""
    prog = "python -m grpo_components.versions"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir")
    parser.add_argument("--version", type=int, help="policy version; without it, all are listed")
    parser.add_argument("--attempt", type=int, help="attempt of the run; default: the last with it")
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder to write; must not exist")
    options = parser.parse_args(arguments)
    if (options.version is None) != (options.to is None):
        parser.error("--version and --to go together")
    try:
        run = open_run(options.output_dir)
    except OSError as error:
        folder = one_line(str(options.output_dir))
        sys.stderr.write(f"{folder} is no output_dir of a run: {one_line(str(error))}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"{one_line(str(error))}\n")
        return 2
    if not run:
        sys.stderr.write(f"no versions in {one_line(str(run.folder))}\n")
        return 2
    try:
        if options.to is None:
            sys.stdout.write(_listing(run))
            return 0
        identity = run.newest(options.version)
        if options.attempt is not None:
            identity = VersionId(options.attempt, options.version)
        if options.to.exists():
            raise ValueError(f"--to: {options.to} exists")
        run.write(identity, options.to)
    except (OSError, ValueError, SafetensorError) as error:
        sys.stderr.write(f"{one_line(str(error))}\n")
        return 1
    sys.stdout.write(f"{identity} is in {one_line(str(options.to))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
