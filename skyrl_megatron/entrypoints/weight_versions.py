"""Weights for engines elsewhere, by a folder or an object store: each version costs what changed since the one before.

    python -m skyrl_megatron.entrypoints.weight_versions publish FOLDER STORE [--name NAME] [--base-every N]
    python -m skyrl_megatron.entrypoints.weight_versions fetch STORE FOLDER --like FOLDER

``publish`` takes a Hugging Face folder, such as a run's export of a step (``trainer.hf_save_interval``). ``fetch``
makes the newest version's folder, bit for bit, with config and tokenizer of ``--like``. STORE: a folder, or ``s3://…``,
``gs://…`` (the fsspec package of that scheme is then needed). Exit code 1: nothing is published, or no folder made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bridges.assets import copy_assets
from bridges.errors import BridgeError
from bridges.hf_io import HfFolder
from bridges.hf_write import HfWriter
from bridges.staging import staged
from skyrl_megatron.entrypoints.command import run_command
from skyrl_megatron.errors import LaunchError
from skyrl_megatron.weight_sync.versions import BASE_EVERY, VersionReader, VersionWriter


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)

    def work() -> int:
        try:
            return int(options.work(options))
        except BridgeError as error:
            raise LaunchError(str(error)) from error
        except OSError as error:
            reason = f"{error.filename or options.store}: {error.strerror or error}"
            raise LaunchError(f"{reason}: mend that, and give the command again") from error

    return run_command(work)


def _parser() -> argparse.ArgumentParser:
    about, *rest = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        "python -m skyrl_megatron.entrypoints.weight_versions", description=about, epilog=rest[-1]
    )
    commands = parser.add_subparsers(required=True, metavar="publish|fetch")
    publish = commands.add_parser("publish", help="publish a folder's weights as the next version")
    publish.add_argument("folder", type=Path)
    publish.add_argument("store")
    publish.add_argument("--name", default=None, help="of the version; default: the folder's name")
    publish.add_argument("--base-every", type=int, default=BASE_EVERY, help="versions from one whole one to the next")
    publish.set_defaults(work=_publish)
    fetch = commands.add_parser("fetch", help="make a folder of the newest version")
    fetch.add_argument("store")
    fetch.add_argument("folder", type=Path)
    fetch.add_argument("--like", type=Path, required=True, help="folder with the model's config and tokenizer")
    fetch.set_defaults(work=_fetch)
    return parser


def _publish(options: argparse.Namespace) -> int:
    folder = HfFolder(options.folder)
    if options.base_every < 1:
        raise LaunchError(f"--base-every {options.base_every}: give 1 or more")
    writer = VersionWriter(options.store, options.base_every)
    done = writer.publish(options.name or options.folder.name, ((name, folder.read(name)) for name in folder.tensors))
    kind = "a base" if done.base else f"{done.changed} of {done.elements} elements"
    print(f"version {done.number}: {kind}, {done.nbytes / 1e6:.1f} MB")
    return 0


def _fetch(options: argparse.Namespace) -> int:
    like = HfFolder(options.like)
    reader = VersionReader(options.store)
    reader.update()
    with staged(options.folder, sum(tensor.nbytes for tensor in reader.tensors.values())) as folder:
        copy_assets(like.path, folder, like.config)
        writer = HfWriter(folder, {name: (tuple(t.shape), t.dtype) for name, t in reader.tensors.items()})
        for name, tensor in reader.tensors.items():
            writer.write(name, tensor)
        writer.finish()
    print(f"{options.folder}: version {reader.number}, {reader.version}, {len(reader.tensors)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
