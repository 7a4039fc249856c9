"""Command line of ``python -m bridges`` (also ``skyrl-convert``): list, inspect, import, export, merge, verify."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from bridges.errors import BridgeError, UnknownFamilyError
from bridges.source import CAST_TO, parse_dtype

EXIT_CODES = """\
exit codes:
  0    done; verify: equal
  1    verify: differences found
  2    wrong arguments, or a folder that cannot be read or converted
  3    the output cannot be written (disk full, permissions)
  130  interrupted; no output folder was created
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m bridges",
        description="Exact, streaming conversion between HF folders and Megatron distributed checkpoints.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--plugin", action="append", default=[], help="module that registers families; may be repeated")
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object and no progress")
        return sub

    def streaming(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--out", type=Path, required=True, help="folder to create; must not exist")
        sub.add_argument("--dtype", choices=sorted(CAST_TO), help="cast weights; default: keep each tensor's dtype")
        sub.add_argument("--workers", type=int, default=2, help="threads (default 2)")
        sub.add_argument("--drop-mtp", action="store_true", help="omit multi-token-prediction layers")

    command("list", "the supported families and what is verified for each")
    text = "architecture, parameters, dtypes, bytes and layout of a folder; for an unknown family the nearest one"
    sub = command("inspect", text)
    sub.add_argument("folder", type=Path)
    sub.add_argument("--hf-template", type=Path, help="folder with config.json, if a checkpoint has none")
    sub.add_argument(
        "--megatron-bridge", type=Path, help="for an unknown family: folder of pip install --target megatron-bridge"
    )
    sub = command("import", "HF folder -> Megatron checkpoint (torch_dist) that loads at any tp/pp/vpp/ep/etp")
    sub.add_argument("--hf", type=Path, required=True, help="HF folder of the model")
    streaming(sub)
    sub = command("export", "Megatron checkpoint, plain or of a training run -> HF folder")
    sub.add_argument("--megatron", type=Path, required=True, help="checkpoint, or ckpt_path/global_step_N of a run")
    sub.add_argument("--hf-template", type=Path, help="original HF folder, for config, tokenizer and MTP layers")
    sub.add_argument("--max-shard-size", default="5GB", help="largest safetensors file (default 5GB)")
    streaming(sub)
    sub = command("merge", "HF folder + PEFT adapter folder -> HF folder with merged weights")
    sub.add_argument("--hf", type=Path, required=True, help="the base model")
    sub.add_argument("--adapter", type=Path, required=True, help="folder with adapter_config.json")
    sub.add_argument("--max-shard-size", default="5GB", help="largest safetensors file (default 5GB)")
    streaming(sub)
    sub = command("verify", "compare two folders bit by bit, or the logits of both models")
    sub.add_argument("a", type=Path, help="HF or Megatron folder (HF with --logits)")
    sub.add_argument("b", type=Path, help="HF or Megatron folder (Megatron with --logits)")
    sub.add_argument("--hf-template", type=Path, help="folder with config.json, if a checkpoint has none")
    sub.add_argument("--logits", action="store_true", help="run both models and print the largest difference")
    sub.add_argument("--layout", default="", help="with --logits: e.g. tp=2,ep=2")
    return top


def run(args: argparse.Namespace) -> int:
    """Run one command, print its result and return the exit code."""
    for module in args.plugin:
        try:
            import_module(module)
        except ImportError as error:
            raise BridgeError(
                f"--plugin {module}: cannot be imported ({error}); give a module on PYTHONPATH"
            ) from error
    if args.command == "list":
        from bridges.catalog import rows, table

        _print(args, {"families": rows()}, table())
        return 0
    if args.command == "inspect":
        from bridges.catalog import inspect
        from bridges.nearest import nearest_report

        try:
            facts = inspect(args.folder, args.hf_template)
        except UnknownFamilyError:
            _print(args, *nearest_report(args.folder, args.megatron_bridge))
            raise
        _print(args, facts, _facts(facts))
        return 0
    if args.command == "verify":
        return _verify(args)
    from bridges.staging import progress_stream, require_new

    require_new(args.out)
    from bridges.convert import export_megatron, import_hf

    if args.workers < 1:
        raise BridgeError(f"--workers {args.workers}: use at least 1")
    shared: dict[str, Any] = dict(
        dtype=parse_dtype(args.dtype), workers=args.workers, drop_mtp=args.drop_mtp, stream=progress_stream(args.json)
    )
    from bridges.hf_io import parse_size

    if args.command == "import":
        report = import_hf(args.hf, args.out, **shared)
    elif args.command == "merge":
        from bridges.peft import merge_adapter

        size = parse_size(args.max_shard_size)
        report = merge_adapter(args.hf, args.adapter, args.out, max_shard_size=size, **shared)
    else:
        size = parse_size(args.max_shard_size)
        report = export_megatron(args.megatron, args.out, template=args.hf_template, max_shard_size=size, **shared)
    facts = report.as_dict()
    _print(args, facts, f"{facts['out']}: {facts['tensors']} tensors, {report.bytes / 1e9:.3f} GB, "
                        f"{facts['gb_per_s']} GB/s")  # fmt: skip
    return 0


def _verify(args: argparse.Namespace) -> int:
    from bridges.convert import SHOWN, compare, compare_logits
    from bridges.staging import progress_stream

    if args.logits:
        facts = compare_logits(args.a, args.b, args.layout)
        _print(args, facts, _facts(facts))
        return 0
    result = compare(args.a, args.b, args.hf_template, progress_stream(args.json))
    lines = [f"{result.tensors} tensors, {result.bytes / 1e9:.3f} GB"]
    lines += [f"ignored (holds no separate weights): {name}" for name in result.ignored]
    lines += result.differences[:SHOWN]
    lines += [f"… {len(result.differences)} differences in total"] if len(result.differences) > SHOWN else []
    lines += ["every tensor is bit-equal"] if result.equal else []
    _print(args, result.as_dict(), "\n".join(lines))
    return 0 if result.equal else 1


def _facts(facts: dict[str, Any]) -> str:
    width = max(map(len, facts))
    numbers = {key: f"{value:,}" if isinstance(value, int) else str(value) for key, value in facts.items()}
    return "\n".join(f"{key.replace('_', ' '):<{width}}  {value}" for key, value in numbers.items())


def _print(args: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    print(json.dumps(facts) if args.json else text)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. A user error prints one message and no traceback."""
    args = parser().parse_args(argv)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run(args)
    except BridgeError as error:
        if args.json:
            print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; no output folder was created", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
