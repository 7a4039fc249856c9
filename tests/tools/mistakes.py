"""What users type wrong in their first hour, and the message that each mistake must get."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

P = "trainer.policy."
M = f"{P}megatron_config."
E = "generator.inference_engine."


@dataclass(frozen=True, slots=True)
class Mistake:
    """One row: a command with one thing wrong in it."""

    name: str
    """The mistake in a few words; the test's id."""
    arguments: Callable[[Path], list[str]]
    """Folder of its own, with ``model`` and ``rows.parquet`` → arguments beside :func:`usual`."""
    says: tuple[str, ...]
    """Parts of the one message: the key, the value or the fix."""
    environment: Mapping[str, str] = field(default_factory=dict)
    holds: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What is there meanwhile."""


def usual(folder: Path) -> list[str]:
    """Arguments of a run with nothing wrong, on the files of :func:`write_files`."""
    places = [f"trainer.{name}_path={folder}/{name}" for name in ("log", "ckpt", "export")]
    return [
        f"model={folder}/model",
        f"data.train_data=[{folder}/rows.parquet]",
        f"data.val_data=[{folder}/rows.parquet]",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=4",
        "trainer.logger=console",
        *places,
    ]


def command_line(folder: Path, mistake: Mistake) -> list[str]:
    """Return the usual arguments with the mistake's in their place."""
    wrong = mistake.arguments(folder)
    keys = {argument.partition("=")[0] for argument in wrong}
    return [*(argument for argument in usual(folder) if argument.partition("=")[0] not in keys), *wrong]


def write_files(folder: Path) -> Path:
    """Write a model and eight rows of GSM8K's form; returns ``folder``."""
    from tests.bridges.tiny_models import tiny_config
    from tests.support.whole_folder import write_sums, write_whole_folder

    sizes = dict(hidden_size=64, head_dim=32, num_hidden_layers=2, max_position_embeddings=4096)
    write_whole_folder(folder / "model", tiny_config("qwen3_moe", **sizes))
    write_sums(folder / "rows.parquet")
    return folder


def _keys(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda folder: list(arguments)


def _rows(rows: int = 8, **changes: Any) -> Callable[[Path], list[str]]:
    """Other training rows."""

    def arguments(folder: Path) -> list[str]:
        from tests.support.whole_folder import write_sums

        return [f"data.train_data=[{write_sums(folder / 'train.parquet', rows, **changes)}]", "data.val_data=[]"]

    return arguments


def _model(change: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    """Another model: the usual one after ``change`` of its folder."""

    def arguments(folder: Path) -> list[str]:
        change(folder / "model")
        return []

    return arguments


def _config(**changes: Any) -> Callable[[Path], list[str]]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return _model(change)


def _small_heads(model: Path) -> None:
    from tests.support.whole_folder import write_whole_folder

    config = json.loads((model / "config.json").read_text())
    write_whole_folder(model, config | {"head_dim": 16})


def _chosen_keys(model: Path) -> None:
    from tests.bridges.tiny_models import tiny_config
    from tests.support.whole_folder import write_whole_folder

    write_whole_folder(model, tiny_config("deepseek_v32", hidden_size=64, max_position_embeddings=4096))


def _cut(model: Path) -> None:
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1000)


def _without_tokenizer(model: Path) -> None:
    for path in model.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()


def _without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


def _index(model: Path) -> None:
    weights = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _text(text: str) -> Callable[[Path], list[str]]:
    def arguments(folder: Path) -> list[str]:
        (folder / "train.parquet").write_text(text)
        return [f"data.train_data=[{folder}/train.parquet]"]

    return arguments


def _late(answer: bytes) -> Callable[[Path], list[str]]:
    """Rows of JSON lines, one of which, neither the first nor the last, has another answer."""

    def arguments(folder: Path) -> list[str]:
        prompt = b'{"prompt": [{"role": "user", "content": "1 + 2"}], "env_class": "gsm8k", '
        rows = [
            prompt + b'"reward_spec": {"ground_truth": ' + (answer if n == 5 else b'"3"') + b"}}" for n in range(8)
        ]
        (folder / "train.jsonl").write_bytes(b"\n".join(rows))
        return [f"data.train_data=[{folder}/train.jsonl]", "data.val_data=[]"]

    return arguments


PORT = 28173


@contextlib.contextmanager
def _busy_port() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", PORT)):
        yield


MISTAKES: tuple[Mistake, ...] = (
    # folders
    Mistake("logs below a file", _keys("trainer.log_path=/etc/hostname/x"), ("log_path=/etc/hostname/x", "is a file")),
    Mistake("logs in /proc", _keys("trainer.log_path=/proc/nope"), ("log_path=/proc/nope", "cannot be written")),
    Mistake(
        "exports in /proc",
        _keys("trainer.export_path=/proc/nope", "trainer.eval_before_train=true"),
        ("trainer.export_path=/proc/nope", "set it to a folder that you can write to"),
    ),
    Mistake("checkpoints in /proc", _keys("trainer.ckpt_path=/proc/nope"), ("=/proc/nope", "cannot be written")),
    Mistake(
        "a checkpoint that is not there",
        _keys("trainer.resume_mode=from_path", "trainer.resume_path=/none/global_step_4"),
        ("trainer.resume_path=/none/global_step_4", "no such folder"),
    ),
    # model
    Mistake(
        "a misspelt folder of a model",
        lambda folder: [f"model={folder}/modle"],
        ("no such folder", "modle (did you mean", "/model?)"),
    ),
    Mistake("weights cut off", _model(_cut), ("model.safetensors is damaged", "fetch the file again")),
    Mistake("a missing shard", _model(_index), ("model-00001-of-00002.safetensors", "is missing")),
    Mistake("another model's config", _config(num_hidden_layers=3), ("missing model.layers.2.", "config.json")),
    Mistake("no tokenizer", _model(_without_tokenizer), ("has no tokenizer", "tokenizer.json")),
    Mistake("no chat template", _model(_without_template), ("has no chat template", "set generator.chat_template")),
    Mistake(
        "an unknown chat template",
        _keys("generator.chat_template.name_or_path=qwen3"),
        ("chat_template.name_or_path=qwen3", "qwen3_with_thinking"),
    ),
    Mistake("an unsupported model type", _config(model_type="qwen3_mo"), ("qwen3_mo", "nearest: qwen3_moe")),
    Mistake("head_dim 16 on CPU", _model(_small_heads), ("head_dim=16", "on CPU vLLM's attention supports 32, 64")),
    Mistake(
        "attention that vLLM has for GPUs alone",
        _model(_chosen_keys),
        ("on CPU vLLM's attention does not support sparse attention",),
    ),
    # data
    Mistake("no rows", _rows(0), ("train.parquet", "has no rows")),
    Mistake("wrong columns", _rows(prompt=None, question=["?"] * 8), ("no column 'prompt'", "question")),
    Mistake("a text as prompt", _rows(prompt=["10 + 20"] * 8), ("row 0", "list of messages with role and content")),
    Mistake("damaged parquet", _text("PAR1 and nothing else"), ("train.parquet", "cannot be read as parquet")),
    Mistake("damaged jsonl", lambda folder: _jsonl(folder), ("train.jsonl", "cannot be read as json")),
    Mistake("a late byte of Latin-1", _late(b'"caf\xe9"'), ("train.jsonl", "row 5", "0xe9", "not UTF-8")),
    Mistake("a late answer that is null", _late(b"null"), ("row 5", "gsm8k", "no reward_spec.ground_truth")),
    Mistake("a late answer that is a list", _late(b'["3"]'), ("row 5", "gsm8k", "the row has ['3']")),
    Mistake("answers that are true", _rows(reward_spec=[{"ground_truth": True}] * 8), ("row 0", "the row has True")),
    Mistake("no such file", _keys("data.train_data=[/none/rows.parquet]"), ("/none/rows.parquet", "no such file")),
    Mistake("prompts too long", _keys("trainer.max_prompt_length=2"), ("max_prompt_length=2", "none of 8 prompts")),
    Mistake(
        "fewer rows than a batch",
        _keys("trainer.train_batch_size=1024"),
        ("trainer.train_batch_size=1024", "8 prompts do not fill one batch"),
    ),
    Mistake("an unknown environment in rows", _rows(env_class=["gsm9k"] * 8), ("no environment 'gsm9k'", "'gsm8k'?")),
    Mistake("an unknown environment", _keys("environment.env_class=gsm9k"), ("env_class=gsm9k", "you mean 'gsm8k'")),
    Mistake("no reward_spec", _rows(reward_spec=None), ("row 0", "gsm8k", "no reward_spec.ground_truth")),
    # names that are handed on
    Mistake(
        "transformer_config_kwargs",
        _keys(f"{M}transformer_config_kwargs.recompute_granularit=full"),
        ("transformer_config_kwargs.recompute_granularit=full", "did you mean recompute_granularity?"),
    ),
    Mistake(
        "optimizer_config_kwargs",
        _keys(f"{M}optimizer_config_kwargs.adam_ep=1e-8"),
        ("optimizer_config_kwargs.adam_ep", "did you mean adam_eps?"),
    ),
    Mistake(
        "engine_init_kwargs",
        _keys(f"{E}engine_init_kwargs.max_modl_len=64"),
        ("engine_init_kwargs.max_modl_len=64", "did you mean max_model_len?"),
    ),
    Mistake(
        "additional_kwargs",
        _keys("generator.sampling_params.additional_kwargs={min_token: 3}"),
        ("sampling_params.additional_kwargs.min_token=3", "did you mean min_tokens?"),
    ),
    Mistake(
        "a sampling value of another type",
        _keys("generator.sampling_params.additional_kwargs={min_tokens: true}"),
        ("sampling_params.additional_kwargs.min_tokens=True", "must be an int"),
    ),
    Mistake(
        "an unknown parser of tool calls",
        _keys(f"{E}tool_call_parser=hermess"),
        ("tool_call_parser=hermess", "unknown parser: use one of ", "hermes, "),
    ),
    Mistake(
        "model_config_kwargs",
        _keys(f"{M}model_config_kwargs.rms_norm_ep=1e-5"),
        ("model_config_kwargs.rms_norm_ep", "did you mean rms_norm_eps?"),
    ),
    # text that is no value
    Mistake("an interpolation that ends too soon", _keys("trainer.run_name=${x"), ("run_name=${x", "${other.key}")),
    Mistake("a project of 100,000 letters", _keys(f"trainer.project_name={'a' * 100_000}"), ("at most 255 bytes",)),
    Mistake("checkpoints in a long name", _keys(f"trainer.ckpt_path=/tmp/{'a' * 300}"), ("cannot be created",)),
    Mistake("rows in a long name", _keys(f"data.train_data=[{'a' * 300}.parquet]"), ("no such file",)),
    # the machine
    Mistake(
        "a port in use",
        _keys(f"{E}enable_http_endpoint=true", f"{E}http_endpoint_port={PORT}"),
        (f"http_endpoint_port={PORT}", "set another port, or 0 for a free one"),
        holds=_busy_port,
    ),
    Mistake(
        "a registry's port in use",
        _keys(f"{E}enable_registry=true", f"{E}registry_port={PORT}", "trainer.placement.colocate_all=false"),
        (f"registry_port={PORT}", "set another port, or 0 for a free one"),
        holds=_busy_port,
    ),
    Mistake(
        "a tracker that is not installed",
        _keys("trainer.logger=wandb"),
        ("trainer.logger=wandb", "uv pip install --python", " wandb, or set trainer.logger=tensorboard"),
        environment={"WANDB_API_KEY": "x"},
    ),
    # roles
    Mistake(
        "a λ above 1",
        _keys("trainer.algorithm.gae.critic_lambd=1.5"),
        ("trainer.algorithm.gae.critic_lambd=1.5", "at most 1"),
    ),
    Mistake("no critic", _keys("trainer.algorithm.advantage_estimator=gae"), ("gae needs a critic: set its model",)),
    Mistake(
        "a critic that nobody asks",
        lambda folder: ["trainer.critic_mini_batch_size=4", f"trainer.critic.model.path={folder}/model"],
        ("trainer.critic.model.path=", "advantage_estimator=grpo uses no critic"),
    ),
    Mistake(
        "a critic of another tokenizer",
        lambda folder: [*_gae(folder), f"trainer.critic.model.path={_renumbered(folder)}"],
        (
            "trainer.critic.model.path=",
            "its tokenizer differs from the policy's",
            "use a model with the policy's tokenizer",
        ),
    ),
    Mistake(
        "a critic of another vocabulary",
        lambda folder: [*_gae(folder), f"trainer.critic.model.path={_without_tokenizer(folder)}"],
        ("trainer.critic.model.path=", "its vocabulary has 77 entries"),
    ),
    Mistake(
        "a reference of another model that follows",
        lambda folder: ["trainer.update_ref_every_epoch=true", f"trainer.ref.model.path={_copied(folder, 'ref')}"],
        ("trainer.update_ref_every_epoch=True", "the reference becomes a copy of the policy"),
    ),
    Mistake(
        "no teacher",
        _keys("trainer.algorithm.advantage_estimator=distillation"),
        ("trainer.teacher.model.path=None", "distillation needs a teacher"),
    ),
    Mistake(
        "a teacher that teaches nothing",
        lambda folder: [f"trainer.teacher.model.path={folder}/model"],
        ("trainer.teacher.model.path=", "does not learn from this teacher"),
    ),
    Mistake(
        "a teacher behind an address at another temperature",
        _keys(
            "trainer.algorithm.advantage_estimator=distillation",
            "trainer.teacher.models={main: 'http://teacher:8000'}",
            "generator.sampling_params.temperature=0.7",
        ),
        ("generator.sampling_params.temperature=0.7", "returns log-probs at temperature 1"),
    ),
    # rollouts that run ahead
    Mistake(
        "a loss that knows no lag",
        _keys(
            "trainer.fully_async.enabled=true",
            "trainer.policy_mini_batch_size=2",
            "trainer.placement.colocate_all=false",
        ),
        ("policy_loss_type=regular", "off_policy_correction.tis_ratio_type=token", "rollout_is, dppo or m2po"),
    ),
)


def _gae(folder: Path) -> list[str]:
    return ["trainer.algorithm.advantage_estimator=gae", "trainer.critic_mini_batch_size=4"]


def _copied(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder / "model", folder / name, dirs_exist_ok=True))


def _renumbered(folder: Path) -> Path:
    """The model with two tokens that have changed places."""
    copy = _copied(folder, "renumbered")
    described = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (copy / "tokenizer.json").write_text(json.dumps(described))
    return copy


def _without_tokenizer(folder: Path) -> Path:
    """A model without a tokenizer, and with fewer embeddings."""
    from tests.bridges.tiny_models import tiny_config
    from tests.support.whole_folder import write_whole_folder

    sizes = dict(hidden_size=64, head_dim=32, num_hidden_layers=2, max_position_embeddings=4096, vocab_size=77)
    write_whole_folder(folder / "small", tiny_config("qwen3_moe", **sizes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "small" / name).unlink(missing_ok=True)
    return folder / "small"


def _jsonl(folder: Path) -> list[str]:
    (folder / "train.jsonl").write_text('{"prompt": [{"role": "user"\n')
    return [f"data.train_data=[{folder}/train.jsonl]"]
