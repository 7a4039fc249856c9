"""Reading: command lines, YAML, mappings, older spellings; and what is refused."""

import dataclasses
import enum
import pickle
import warnings
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_megatron.config import (
    AlgorithmConfig,
    GeneratorConfig,
    PlacementConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    get_config_as_dict,
    get_config_as_yaml_str,
    make_config,
    resolve,
)
from skyrl_megatron.config.fields import Bounds, OneOf, field_types, get_path, leaves, members_of, owner_of
from skyrl_megatron.errors import ConfigError, Problem

MEGATRON = "trainer.policy.megatron_config."
KWARGS = MEGATRON + "transformer_config_kwargs"


def parse(*args):
    return SkyRLTrainConfig.from_cli_overrides(list(args))


def problems(*args):
    with pytest.raises(ConfigError) as caught:
        parse(*args)
    return {problem.key: problem.fix for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("arg", "value"),
    [
        ("trainer.seed=7", 7),
        ("trainer.run_name=007", "007"),
        ("trainer.run_name=1e3", "1e3"),
        ("trainer.run_name=true", "true"),
        ("trainer.run_name='null'", "null"),
        ("trainer.run_name=a=b: c #d", "a=b: c #d"),
        ("trainer.policy.optimizer_config.lr=3", 3.0),
        ("trainer.policy.optimizer_config.lr=1e-5", 1e-5),
        ("trainer.bf16=false", False),
        ("trainer.resume_mode=null", None),
        ("trainer.policy.fsdp_config.reshard_after_forward=4", 4),
        ("trainer.policy.fsdp_config.reshard_after_forward=true", True),
        ("data.train_data=['/$HOME/x.parquet','b']", ["/$HOME/x.parquet", "b"]),
        ("generator.sampling_params.stop=['</s>']", ["</s>"]),
        ("generator.inference_engine.engine_init_kwargs={max_model_len: 64, a: {b: [1, null]}}", None),
        ("generator.chat_template_kwargs.enable_thinking=false", None),
    ],
)
def test_values_of_the_command_line(arg, value):
    key = arg.partition("=")[0]
    expected = {
        "generator.inference_engine.engine_init_kwargs": {"max_model_len": 64, "a": {"b": [1, None]}},
        "generator.chat_template_kwargs.enable_thinking": False,
    }.get(key, value)
    cfg = parse(arg)
    got = cfg.generator.chat_template_kwargs["enable_thinking"] if "thinking" in key else get_path(cfg, key)
    assert got == expected and type(got) is type(expected)


def test_defaults_of_a_section_survive_setting_one_of_its_fields():
    cfg = parse("trainer.critic.optimizer_config.weight_decay=0", "trainer.policy.model.lora.rank=8")
    assert cfg.trainer.critic.optimizer_config.lr == 5e-6
    assert cfg.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"


def test_a_mapping_replaces_a_dict_option_and_a_dotted_key_changes_one_entry():
    def kwargs(*args):
        return get_path(parse(*args), KWARGS)

    one_entry = kwargs(f"{KWARGS}.gradient_accumulation_fusion=true")
    assert one_entry == kwargs() | {"gradient_accumulation_fusion": True}
    replaced = kwargs(f"{KWARGS}={{recompute_granularity: selective}}", f"{KWARGS}.a.b=1")
    assert replaced == {"recompute_granularity": "selective", "a": {"b": 1}}
    assert kwargs(f"{KWARGS}.a=1", f"{KWARGS}={{}}") == {}
    assert parse("trainer.placement={policy_num_nodes: 2}").trainer.placement.policy_num_gpus_per_node == 1


def test_later_assignments_win_over_a_yaml_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: 1\n  epochs: 2\n  placement.policy_num_nodes: 3\ngenerator.max_turns: 4\n")
    cfg = parse("trainer.epochs=9", "--config", str(file), "trainer.seed=5")
    assert (cfg.trainer.seed, cfg.trainer.epochs, cfg.trainer.placement.policy_num_nodes) == (5, 2, 3)
    assert parse(f"--config={file}").generator.max_turns == 4


def test_dict_overrides_take_python_values_and_typed_text():
    values = {
        "trainer.seed": "123",
        "trainer": {"run_name": "9", "placement": PlacementConfig(policy_num_nodes=2)},
        "generator.sampling_params": {"stop": ["x: y"]},
        "data.train_data": ("a", "b"),
        "trainer.resume_mode": None,
    }
    cfg = SkyRLTrainConfig.from_cli_overrides(values)
    assert (cfg.trainer.seed, cfg.trainer.run_name, cfg.trainer.resume_mode) == (123, "9", None)
    assert cfg.trainer.placement.policy_num_nodes == 2
    assert cfg.generator.sampling_params.stop == ["x: y"] and cfg.data.train_data == ["a", "b"]


def test_interpolation(monkeypatch):
    monkeypatch.setenv("SOME_RUN", "night")
    cfg = parse(
        "trainer.train_batch_size=64",
        "trainer.policy_mini_batch_size=${trainer.train_batch_size}",
        "trainer.run_name=${oc.env:SOME_RUN}-${trainer.seed}",
        "generator.chat_template_kwargs={a: '${trainer.seed}', b: '\\${trainer.seed}'}",
    )
    assert cfg.trainer.policy_mini_batch_size == 64 and cfg.trainer.run_name == "night-42"
    assert cfg.generator.chat_template_kwargs == {"a": 42, "b": "${trainer.seed}"}
    assert "nope" in problems("trainer.run_name=${trainer.nope}")["trainer.run_name"]


def test_omegaconf_node_resolves_itself():
    from omegaconf import OmegaConf

    node = OmegaConf.create({"n": 3, "g": {"max_turns": "${n}", "chat_template_kwargs": {"x": "\\${y}"}}})
    made = GeneratorConfig.from_dict_config(node.g)
    assert made.max_turns == 3 and made.chat_template_kwargs == {"x": "${y}"}


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ("trainer.lr=1", ["unknown key", "trainer.policy.optimizer_config.lr"]),
        ("trainer.polcy.model.path=x", ["unknown key", "trainer.policy.model.path"]),
        ("trainer.policy_mini_batchsize=2", ["trainer.policy_mini_batch_size"]),
        ("trainr.seed=1", ["trainer.seed"]),
        ("trainer.seed='4'", ["must be int, not str"]),
        ("trainer.seed=4.0", ["must be int, not float"]),
        ("trainer.seed=true", ["must be int, not bool"]),
        ("trainer.bf16=1", ["must be bool, not int"]),
        ("trainer.bf16=null", ["must be bool, not NoneType"]),
        ("trainer.run_name=[1]", ["must be str, not list"]),
        ("trainer.logprobs_chunk_size=a", ["must be int or null, not str"]),
        ("trainer.logprobs_chunk_size=0", ["must be at least 1"]),
        ("trainer.epochs=-3", ["must be at least 1"]),
        ("trainer.max_ckpts_to_keep=0", ["at least 1, or -1"]),
        ("trainer.algorithm.kl_loss_coef=.nan", ["finite"]),
        ("trainer.algorithm.lambd=1.5", ["at most 1"]),
        ("trainer.strategy=megatorn", ["one of megatron, fsdp, fsdp2", "did you mean megatron?"]),
        ("trainer.algorithm.loss_reduction=token_mean_legacy", ["did you mean token_mean?"]),
        ("data.train_data=x", ['["x"]']),
        ("data.train_data=[1]", ["must be str"]),
        ("generator.chat_template_kwargs=3", ["must be mapping, not int"]),
        ("trainer.placement=3", ["a section"]),
        ("trainer.seed.x=3", ["trainer.seed is a single value"]),
        ("trainer.seed=[1", ["not valid YAML"]),
        ("+trainer.new=1", ["Hydra", "subclass"]),
        ("~trainer.seed=1", ["Hydra"]),
        ("trainer.seed", ["key=value"]),
        ("--chekc", ["unknown option"]),
        ("--config=/no/such.yaml", ["no such file"]),
    ],
)
def test_refused(arg, words):
    (fix,) = problems(arg).values()
    assert all(word in fix for word in words), fix


def test_all_problems_are_listed_at_once():
    found = problems("trainer.seed=x", "trainer.lr=1", "+a=2", "trainer.strategy=y", "b")
    assert set(found) == {"trainer.seed", "trainer.lr", "+a", "trainer.strategy", "b"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer:\n  seed: 1\n bad: [2\n", ["line 3"]),
        ("a: 1\na: 2\n", ["line 2", "duplicate"]),
        ("- 1\n", ["mapping"]),
        ("\tx: 1\n", ["line 1"]),
    ],
)
def test_yaml_that_cannot_be_read(tmp_path, text, words):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    fix = problems(f"--config={file}")["--config"]
    assert all(word in fix for word in words), fix


def test_wrong_entries_of_a_yaml_file_are_named_by_their_key(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: '1'\n  run_name: 12\n  nope: {a: 1}\n")
    found = problems(f"--config={file}")
    assert "quotes" in found["trainer.run_name"] and set(found) == {"trainer.seed", "trainer.run_name", "trainer.nope"}


QUICK_START = """
data.train_data=['/home/me/data/gsm8k/train.parquet']
data.val_data=['/home/me/data/gsm8k/validation.parquet']
trainer.algorithm.advantage_estimator=grpo
trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct
trainer.strategy=fsdp2
trainer.placement.colocate_all=true
trainer.placement.policy_num_gpus_per_node=4
trainer.eval_batch_size=1024
trainer.eval_before_train=true
trainer.eval_interval=5
trainer.ckpt_interval=10
generator.backend=vllm
generator.num_inference_engines=4
generator.inference_engine_tensor_parallel_size=1
generator.weight_sync_backend=nccl
environment.env_class=gsm8k
trainer.logger=wandb
trainer.project_name=gsm8k
trainer.run_name=gsm8k_test
""".split()

MOVED = {
    "generator.backend": "generator.inference_engine.backend",
    "generator.num_inference_engines": "generator.inference_engine.num_engines",
    "generator.inference_engine_tensor_parallel_size": "generator.inference_engine.tensor_parallel_size",
    "generator.weight_sync_backend": "generator.inference_engine.weight_sync_backend",
}


def test_quick_start_command_key_by_key():
    with pytest.warns(DeprecationWarning) as caught:
        cfg = parse(*QUICK_START)
    assert len(caught) == 1
    for old, new in MOVED.items():
        assert f"{old} is now {new}" in str(caught[0].message)
    for arg in QUICK_START:
        key, _, text = arg.partition("=")
        value = get_path(cfg, MOVED.get(key, key))
        typed = value if isinstance(value, str) else {"true": True}.get(text, value)
        assert str(typed).strip("[]") == text.strip("[]") or typed is True, key


def test_older_spellings(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text("generator: {num_inference_engines: 3, engine_init_kwargs: {a: 1}, model_name: m}\n")
    with pytest.warns(DeprecationWarning, match="model_name is ignored: use trainer.policy.model.path"):
        cfg = parse(
            "--config", str(file), "generator.inference_engine.num_engines=2", "generator.engine_init_kwargs.b=2"
        )
    assert cfg.generator.inference_engine.num_engines == 2
    assert cfg.generator.inference_engine.engine_init_kwargs == {"a": 1, "b": 2}
    with pytest.warns(DeprecationWarning):
        found = problems("generator.backend=vllm", "generator.inference_engine.backend=vllm")
    assert "given twice" in found["generator.inference_engine.backend"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse("trainer.remove_microbatch_padding=false").trainer.use_sample_packing is False
    found = problems("trainer.remove_microbatch_padding=false", "trainer.use_sample_packing=true")
    assert "given twice" in found["trainer.use_sample_packing"]


@dataclass
class CustomAlgorithm(AlgorithmConfig):
    buffer_len: int = 512
    mode: Literal["hard", "soft"] = "hard"


@dataclass
class CustomGenerator(GeneratorConfig):
    tools: list[str] = field(default_factory=list)


@dataclass
class CustomTrainer(TrainerConfig):
    algorithm: AlgorithmConfig = field(default_factory=CustomAlgorithm)  # the annotation left as it was
    extra: float = 0.5

    def __post_init__(self):
        if self.extra > 1:
            raise ValueError("extra must be at most 1")


def test_subclassing_and_make_config():
    made = make_config(algorithm_cls=CustomAlgorithm, generator_cls=CustomGenerator)
    cfg = made.from_cli_overrides(["trainer.algorithm.buffer_len=8", "generator.tools=[a]", "trainer.seed=3"])
    assert isinstance(cfg, SkyRLTrainConfig) and isinstance(cfg.trainer, TrainerConfig)
    assert (cfg.trainer.algorithm.buffer_len, cfg.generator.tools, cfg.trainer.seed) == (8, ["a"], 3)
    assert cfg.trainer.algorithm.temperature == 1.0
    cfg = make_config(trainer_cls=CustomTrainer).from_cli_overrides({"trainer.algorithm.mode": "soft"})
    assert (cfg.trainer.algorithm.mode, cfg.trainer.extra) == ("soft", 0.5)
    with pytest.raises(ConfigError, match=r"trainer.*extra must be at most 1"):
        make_config(trainer_cls=CustomTrainer).from_cli_overrides(["trainer.extra=2"])
    with pytest.raises(ConfigError, match="must be one of 'hard', 'soft'"):
        make_config(trainer_cls=CustomTrainer).from_cli_overrides(["trainer.algorithm.mode=medium"])
    with pytest.raises(ConfigError, match=r"unknown key; closest: trainer\.algorithm\.buffer_len"):
        made.from_cli_overrides(["trainer.algorithm.buffer_length=1"])


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Item(AlgorithmConfig):
    weight: float = 1.0


@dataclass
class Varied(GeneratorConfig):
    colour: Colour = Colour.RED
    items: list[Item] = field(default_factory=list)
    pair: tuple[int, str] = (1, "a")


def test_other_field_types_of_subclasses():
    made = Varied.from_dict_config({"colour": "red", "items": [{"weight": 2}], "pair": [3, "b"]})
    assert made.colour is Colour.RED and made.items == [Item(weight=2.0)] and made.pair == (3, "b")
    assert get_config_as_dict(made)["colour"] == "red"
    with pytest.raises(ConfigError, match=r"items\.weight=x"):
        Varied.from_dict_config({"items": [{"weight": "x"}]})


def test_configurations_travel_between_processes():
    cloudpickle = pytest.importorskip("cloudpickle")
    cfg = make_config(algorithm_cls=CustomAlgorithm).from_cli_overrides(["trainer.algorithm.buffer_len=8"])
    copy = pickle.loads(cloudpickle.dumps(cfg))
    assert get_config_as_dict(copy) == get_config_as_dict(cfg) and copy.trainer.algorithm.is_set("buffer_len")
    assert pickle.loads(pickle.dumps(parse("trainer.seed=3"))) == parse("trainer.seed=3")
    error = ConfigError([Problem("trainer.seed", -1, "must not be negative")])
    received = pickle.loads(pickle.dumps(error))
    assert received.problems == error.problems and str(received) == str(error)


# --- YAML → object → YAML ------------------------------------------------------------------------------------------

TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["${trainer.seed}", "\\${x}", "\\\\${x}", "null", "1e5", "'", "a: b", "???", "~/x", "on", "0x1f"]),
)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT.filter(bool), inner, max_size=2),
    max_leaves=4,
)


def values_of(annotation):
    """A strategy for the values that a field type allows."""
    rules = [rule for rule in getattr(annotation, "__metadata__", ()) if isinstance(rule, OneOf | Bounds)]
    if rules and isinstance(rules[0], OneOf):
        plain = st.sampled_from(rules[0].choices)
    elif rules:
        low, high = rules[0].low or 0, min(rules[0].high or 50, 50)
        whole = int in members_of(annotation)
        plain = st.integers(int(low), int(high)) if whole else st.floats(low, high, exclude_min=True)
    else:
        inner = [arg for arg in getattr(annotation, "__args__", ()) if arg is not type(None)]
        if type(None) in members_of(annotation) and len(inner) == 1:
            return st.none() | values_of(inner[0])
        origin = getattr(annotation, "__origin__", annotation)
        if origin in (Union, UnionType):
            return st.one_of(*(st.none() if arg is type(None) else values_of(arg) for arg in annotation.__args__))
        if origin is list:
            return st.lists(values_of(annotation.__args__[0]), max_size=3)
        if origin is dict:
            _, kind = getattr(annotation, "__args__", (str, Any))
            values = PLAIN if kind is Any else values_of(kind)
            return st.dictionaries(TEXT.filter(bool), values, max_size=3)
        kinds = {bool: st.booleans(), int: st.integers(-99, 99), str: TEXT}
        kinds[float] = st.floats(-1e9, 1e9, allow_nan=False)
        plain = st.one_of(*(kinds[member] for member in members_of(annotation) if member in kinds))
    return plain | st.none() if type(None) in members_of(annotation) else plain


DEPRECATED = ("trainer.algorithm.use_tis",)
LEAVES = [(key, field_types(cls)[name]) for key, cls, name in leaves(SkyRLTrainConfig) if key not in DEPRECATED]


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_yaml_to_object_to_yaml_is_the_identity(data):
    cfg = SkyRLTrainConfig()
    cfg.generator.eval_sampling_params = dataclasses.replace(cfg.generator.sampling_params)
    for key, annotation in data.draw(st.lists(st.sampled_from(LEAVES), max_size=8, unique_by=lambda leaf: leaf[0])):
        if "mixed_precision" in key:
            continue
        section, name = owner_of(cfg, key)
        setattr(section, name, data.draw(values_of(annotation), label=key))
    resolve.derive(cfg)
    text = get_config_as_yaml_str(cfg)
    from omegaconf import OmegaConf

    again = SkyRLTrainConfig.from_dict_config(OmegaConf.create(text))
    assert again == cfg
    assert get_config_as_yaml_str(again) == text


def test_a_saved_file_reads_back(tmp_path):
    file = tmp_path / "config.yaml"
    cfg = parse("trainer.run_name=${trainer.seed}", "generator.sampling_params.stop=['\\${a}', '1e3']")
    file.write_text(get_config_as_yaml_str(cfg))
    assert parse("--config", str(file)) == cfg
