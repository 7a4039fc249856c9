"""The identity of a run: everything that its weights depend on is in it, and nothing else."""

import dataclasses
import json
import shutil

import pytest

MODEL = "a model"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with a model and two data files."""
    from skyrl_megatron.tiny_model import write_embedded_model

    folder = tmp_path_factory.mktemp("start")
    write_embedded_model(folder / MODEL)
    for name in ("rows", "others"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": name}]}) + "\n")
    return folder


def configured(folder, cls="SFTTrainConfig", **keys):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.schema.preferences import DPOTrainConfig
    from skyrl_megatron.config.schema.sft import SFTTrainConfig

    classes = {each.__name__: each for each in (SkyRLTrainConfig, DPOTrainConfig, SFTTrainConfig)}
    given = {"trainer.policy.model.path": folder / MODEL, "data.train_data": f"[{folder / 'rows.jsonl'}]"} | keys
    return classes[cls].from_cli_overrides([f"{key}={value}" for key, value in given.items()])


def changed_parts(before, after):
    from skyrl_megatron.identity import other_parts, run_identity

    return other_parts(run_identity(before), run_identity(after))


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def other_weight(model):
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_template(model):
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


CHANGES = {
    "model": other_weight,
    "tokenizer": lambda model: rewrite(model / "tokenizer_config.json", lambda it: it.update(add_bos_token=True)),
    "template": other_template,
}


@pytest.mark.parametrize("part", [*CHANGES, "model config"])
def test_a_change_of_the_model_folder_is_its_part(start, tmp_path, part):
    copied = tmp_path / "copied"
    shutil.copytree(start / MODEL, copied)
    here, moved = configured(start), configured(start, **{"trainer.policy.model.path": copied})
    (copied / "video_preprocessor_config.json").write_text("{}")
    assert changed_parts(here, moved) == [], "a copy is the same model, also with files for images"
    if part == "model config":
        rewrite(copied / "config.json", lambda it: it.update(rms_norm_eps=0.5))
    else:
        CHANGES[part](copied)
    assert changed_parts(here, moved) == [part.split()[0]]


SAME = {
    "layout": {
        "trainer.placement.policy_num_gpus_per_node": 4,
        "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
    },
    "learning rate, steps and batches": {
        "trainer.policy.optimizer_config.lr": 1e-3,
        "trainer.max_training_steps": 3,
        "trainer.policy_mini_batch_size": 8,
    },
    "folders and names": {"trainer.ckpt_path": "/a", "trainer.run_name": "b"},
}
OTHER = {
    "data": {"data.train_data": "[others.jsonl]"},
    "template": {"generator.chat_template_kwargs.enable_thinking": "false"},
    "reference": {"trainer.ref.model.path": "changed", "trainer.algorithm.use_kl_loss": "true"},
}


@pytest.mark.parametrize("name", SAME)
def test_a_run_may_continue_with(start, name):
    assert changed_parts(configured(start), configured(start, **SAME[name])) == []


@pytest.mark.parametrize("part", OTHER)
def test_another_run(start, tmp_path, part, monkeypatch):
    monkeypatch.chdir(start)
    before = configured(start, **{"trainer.algorithm.use_kl_loss": "true"})
    if part == "reference":
        shutil.copytree(start / MODEL, tmp_path / "changed")
        other_weight(tmp_path / "changed")
    given = {key: tmp_path / value if value == "changed" else value for key, value in OTHER[part].items()}
    assert changed_parts(before, configured(start, **{"trainer.algorithm.use_kl_loss": "true"} | given)) == [part]


LORA = {"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.alpha": 8}
ADAPTERS = {
    "rank": ({"trainer.policy.model.lora.rank": 8}, "of rank 8, alpha 8"),
    "scale": ({"trainer.policy.model.lora.alpha": 16}, "of rank 4, alpha 16"),
    "rsLoRA": ({"trainer.policy.model.lora.use_rslora": "true"}, "of rank 4, alpha 8, use_rslora true"),
    "layers": ({"trainer.policy.model.lora.train_mlp": "false"}, "of rank 4, alpha 8, train_mlp false"),
    "type": ({"trainer.policy.megatron_config.lora_config.lora_type": "canonical_lora"},
             "of rank 4, alpha 8, lora_type canonical_lora"),
    "several": ({"trainer.policy.model.lora.adapters": "{math: {rank: 2, lr: 0.1}}"},
                'of rank 4, alpha 8, adapters {"math": {"rank": 2}}'),
    "none": ({"trainer.policy.model.lora.rank": 0}, "none"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_other_adapters_are_another_run(start, name):
    """Loading would fail late for some of them, with the name of a tensor, and change the policy for others."""
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.identity import refuse_other, run_identity

    keys, shown = ADAPTERS[name]
    before, after = configured(start, **LORA), configured(start, **LORA | keys)
    assert changed_parts(before, after) == ["adapters"]
    for key in ("dropout=0.1", "init_method=xavier", "sync_mode=merged"):
        given, value = key.split("=")
        assert changed_parts(before, configured(start, **LORA | {f"trainer.policy.model.lora.{given}": value})) == []
    with pytest.raises(ConfigError) as refused:
        refuse_other("trainer.ckpt_path", "/a", run_identity(before), after, run_identity(after))
    (problem,) = refused.value.problems
    assert f"its adapters are of rank 4, alpha 8, this run's are {shown}. Set another folder" in problem.fix
    assert "trainer.resume_other=[adapters]" in problem.fix
    after.trainer.resume_other = ["adapters"]
    refuse_other("trainer.ckpt_path", "/a", run_identity(before), after, run_identity(after))


def test_the_spelling_of_adapters_does_not_count(start):
    several, modules = "trainer.policy.model.lora.adapters", "trainer.policy.model.lora.target_modules"
    for one, other in (
        ({several: "{a: {}, b: {}}"}, {several: "{b: {}, a: {alpha: 8}}"}),
        ({modules: "linear_qkv,linear_proj"}, {modules: "linear_proj,linear_qkv"}),
    ):
        assert changed_parts(configured(start, **LORA | one), configured(start, **LORA | other)) == []


def test_a_critic_that_comes_or_goes_has_no_other_optimizer(start):
    critic = {"trainer.critic.model.path": start / MODEL, "trainer.algorithm.advantage_estimator": "gae"}
    assert "optimizer" not in changed_parts(configured(start), configured(start, **critic))
    other = critic | {"trainer.critic.optimizer_config.optimizer": "muon"}
    assert changed_parts(configured(start, **critic), configured(start, **other)) == ["critic_optimizer"]


def test_another_optimizer_is_another_run(start):
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.identity import refuse_other, run_identity

    before, after = (
        configured(start, **{"trainer.policy.optimizer_config.optimizer": name}) for name in ("adam", "muon")
    )
    with pytest.raises(ConfigError, match=r"its optimizer is adam, this run's is muon\. "):
        refuse_other("trainer.ckpt_path", "/a", run_identity(before), after, run_identity(after))


def test_every_part_can_be_allowed(start):
    from skyrl_megatron.identity import run_identity

    cfg = configured(start, "SkyRLTrainConfig")
    parts = [*run_identity(cfg)]
    allowing = configured(start, "SkyRLTrainConfig", **{"trainer.resume_other": f"[{','.join(parts)}]"})
    assert allowing.trainer.resume_other == parts and len(parts) > 5


def test_verbs_and_environments_differ(start):
    sft, train = configured(start), configured(start, "SkyRLTrainConfig", **{"trainer.algorithm.use_kl_loss": "false"})
    assert changed_parts(sft, train) == ["verb"]
    env = {"trainer.algorithm.use_kl_loss": "false", "environment.env_class": "aime"}
    assert changed_parts(train, configured(start, "SkyRLTrainConfig", **env)) == ["environment"]


def test_the_content_of_data_counts_and_not_its_name(start, tmp_path):
    copied = tmp_path / "copied.jsonl"
    shutil.copy(start / "rows.jsonl", copied)
    moved = configured(start, **{"data.train_data": f"[{copied}]"})
    assert changed_parts(configured(start), moved) == []
    copied.write_text(copied.read_text() * 2)
    assert changed_parts(configured(start), moved) == ["data"], "further rows are other data"


# ---------------------------------------------------------------------------------------------- settings
def test_each_setting_is_in_the_identity_or_excluded_with_a_reason(start):
    """Also one that is added later, and no exclusion is of a setting that does not exist."""
    from skyrl_megatron import identity
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.fields import leaves
    from skyrl_megatron.config.schema.preferences import DPOTrainConfig
    from skyrl_megatron.config.schema.sft import SFTTrainConfig

    entries = identity.NO_NUMBERS | identity.ONLY_ROUNDING | identity.NOT_REFERENCE
    assert not identity.NOT_SAMPLED.keys() - {key for key, _, _ in leaves(SkyRLTrainConfig)}
    keys = {key for cls in (SkyRLTrainConfig, DPOTrainConfig, SFTTrainConfig) for key, _, _ in leaves(cls)}
    sections = {".".join(key.split(".")[:depth]) + "." for key in keys for depth in range(1, key.count(".") + 1)}
    kwargs = {f"{key.rpartition('.')[0]}." for key in entries if "_kwargs." in key}
    unknown = [name for name in entries if name not in keys | sections and not name.startswith(tuple(kwargs))]
    assert not unknown and all(entries.values())

    def excluded(key):
        return any(f"{key}.".startswith(f"{name.removesuffix('.')}.") for name in entries)

    kept = json.loads(identity.reference_identity(configured(start, "DPOTrainConfig"))["configuration"])
    expected = {
        key.replace("trainer.ref.", "model.")
        for key, _, _ in leaves(DPOTrainConfig)
        if not excluded(key) and not key.startswith("trainer.policy.")
    }
    none = {f"{key}." for key, value in kept.items() if value is None}  # a section that is not set
    shown = {key for key in expected if any(f"{name}.".startswith(f"{key}.") for name in kept)}
    assert {key for key in expected - shown if not key.startswith(tuple(none))} == set()

    @dataclasses.dataclass
    class LaterTrainer(type(DPOTrainConfig().trainer)):
        later: int = 1

    cfg = configured(start, "DPOTrainConfig")
    before = identity.settings_of(cfg)
    cfg.trainer.__class__ = LaterTrainer
    cfg.trainer.later = 2
    assert identity.settings_of(cfg).keys() - before.keys() == {"trainer.later"}
    assert '"trainer.later": 2' in identity.reference_identity(cfg)["configuration"]


def test_a_setting_of_engines_is_in_the_identity_of_evaluated_rows(start):
    """Also one that is added later; those that are not have a reason."""
    from skyrl_megatron import identity
    from skyrl_megatron.config import SkyRLTrainConfig

    prefix = "generator.inference_engine."

    def of(**keys):
        return identity.evaluation_identity(configured(start, "SkyRLTrainConfig", **keys))

    plain = of()
    changes = ("model_dtype=float32", "engine_init_kwargs.quantization=fp8", "enforce_eager=true",
               "enable_chunked_prefill=false", "tool_call_parser=hermes", "run_engines_locally=false")  # fmt: skip
    for key, value in (change.split("=") for change in changes):
        assert identity.other_parts(plain, of(**{prefix + key: value})) == ["settings"], key
    for key, value in (
        ("num_engines", 4),
        ("http_endpoint_port", 9),
        ("registry_drain_s", 3.0),
        ("max_num_seqs", 8),
    ):
        assert identity.other_parts(plain, of(**{prefix + key: value})) == [], key

    @dataclasses.dataclass
    class LaterEngine(type(SkyRLTrainConfig().generator.inference_engine)):
        later: int = 1

    cfg = configured(start, "SkyRLTrainConfig")
    cfg.generator.inference_engine.__class__ = LaterEngine
    cfg.generator.inference_engine.later = 2
    assert identity.other_parts(plain, identity.evaluation_identity(cfg)) == ["settings"]


CHANGES_REFERENCE = (
    "trainer.bf16=false",
    "trainer.flash_attn=false",
    "trainer.rope_theta=500000.0",
    "trainer.exact_rollouts=true",
    "trainer.policy.megatron_config.transformer_config_kwargs.attention_dropout=0.0",
    "trainer.ref.model_config_kwargs={rms_norm_eps: 0.1}",
    "trainer.ref.megatron_config.model_config_kwargs={rms_norm_eps: 0.1}",
    "trainer.policy.megatron_config.model_config_kwargs={rms_norm_eps: 0.1}",
    "trainer.ref.megatron_config.moe_router_score_function=sigmoid",
    "trainer.ref.megatron_config.moe_router_dtype=fp64",
)
SAME_REFERENCE = (
    "trainer.policy.model_config_kwargs={rms_norm_eps: 0.1}",  # the policy's alone
    "trainer.policy.optimizer_config.lr=1e-3",
    "trainer.placement.ref_num_gpus_per_node=2",
    "trainer.ref.megatron_config.tensor_model_parallel_size=2",
    "trainer.ref.megatron_config.transformer_config_kwargs.recompute_granularity=full",
    "trainer.epochs=3",
    "dpo.beta=0.3",
)


def test_what_changes_the_log_probs_of_the_reference_changes_its_identity(start):
    from skyrl_megatron.identity import reference_identity

    def of(setting="trainer.seed=1"):
        key, _, value = setting.partition("=")
        return reference_identity(configured(start, "DPOTrainConfig", **{key: value}))

    plain = of()
    assert [setting for setting in CHANGES_REFERENCE if of(setting) == plain] == []
    assert [setting for setting in SAME_REFERENCE if of(setting) != plain] == []


def test_changed_settings_are_named_once(start):
    from skyrl_megatron.identity import changed_settings, settings_of

    keys = {"trainer.algorithm.use_kl_loss": "true"}
    option = "trainer.policy.megatron_config.model_config_kwargs"
    epsilon = f"{option}.rms_norm_eps"
    saved = json.loads(json.dumps(settings_of(configured(start, **keys | {epsilon: 0.5}))))
    here = settings_of(
        configured(start, **keys | {epsilon: 0.1, "trainer.policy_mini_batch_size": 8, "trainer.run_name": "b"})
    )
    changed = f'{option}={{"rms_norm_eps": 0.1}} (was {{"rms_norm_eps": 0.5}})'
    assert changed_settings(saved, here) == ["trainer.policy_mini_batch_size=8 (was 64)", changed]
    assert changed_settings(here, here) == changed_settings({}, here) == []


# ---------------------------------------------------------------------------------------------- folders
def test_exports_of_another_run_are_moved_aside(start, tmp_path):
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.identity import run_identity
    from skyrl_megatron.trainer.checkpoints import prepare_export

    first, second = run_identity(configured(start)), run_identity(configured(start, "DPOTrainConfig"))
    for _ in range(2):  # the second replaces the first, which is of the same run
        folder = prepare_export(tmp_path, 3, identity=first)
        folder.mkdir()
        (folder / "weights").write_text("first")
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_3"]
    with pytest.warns(SkyRLMegatronWarning, match=r"held the export of another run, .* global_step_3\.of_"):
        assert not prepare_export(tmp_path, 3, identity=second).exists()
    (aside,) = tmp_path.glob("global_step_3.of_*")
    assert (aside / "policy/weights").read_text() == "first"


def test_exports_of_what_is_allowed_are_not_missing(start, tmp_path):
    from skyrl_megatron.identity import run_identity, write_identity
    from skyrl_megatron.trainer.stopping import _missing_exports

    keys = {"trainer.export_path": tmp_path, "trainer.hf_save_interval": 1}
    (tmp_path / "global_step_3/policy").mkdir(parents=True)
    write_identity(tmp_path / "global_step_3", run_identity(configured(start)))
    assert _missing_exports(configured(start, **keys), 3) == []
    assert _missing_exports(configured(start, "SkyRLTrainConfig", **keys), 3) == ["policy"]
    keys["trainer.resume_other"] = "[verb]"
    assert _missing_exports(configured(start, "SkyRLTrainConfig", **keys), 3) == []


def test_rows_of_another_evaluation_are_not_overwritten(start, tmp_path):
    from skyrl_megatron.identity import evaluation_identity, other_parts, write_identity
    from skyrl_megatron.trainer.evaluate import rows_folder

    keys = {"data.val_data": f"[{start / 'rows.jsonl'}]", "trainer.export_path": tmp_path}
    cfg = configured(start, "SkyRLTrainConfig", **keys)
    hot = configured(start, "SkyRLTrainConfig", **keys, **{"generator.eval_sampling_params.temperature": 1.0})
    first = rows_folder(cfg, 0, evaluation_identity(cfg))
    assert first == tmp_path / "dumped_evals/global_step_0"
    first.mkdir(parents=True)
    write_identity(first, evaluation_identity(cfg))
    assert rows_folder(cfg, 0, evaluation_identity(cfg)) == first
    second = rows_folder(hot, 0, evaluation_identity(hot))
    assert second.parent == first.parent and second.name.startswith("global_step_0_")
    second.mkdir()
    write_identity(second, evaluation_identity(hot))
    assert rows_folder(hot, 0, evaluation_identity(hot)) == second
    templated = configured(
        start, "SkyRLTrainConfig", **keys, **{"generator.chat_template.name_or_path": "qwen3_with_thinking"}
    )
    changed = other_parts(evaluation_identity(cfg), evaluation_identity(templated))
    assert "template" in changed and rows_folder(templated, 0, evaluation_identity(templated)) not in (first, second)
    templated.trainer.resume_other = ["template"]
    assert rows_folder(templated, 0, evaluation_identity(templated)) != first, "what is allowed replaces nothing"


@pytest.mark.around
def test_a_dumped_batch_of_another_model_is_not_used(start, tmp_path):
    import torch

    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.identity import sampled_identity
    from skyrl_megatron.types import PaddedBatch
    from skyrl_megatron_observe.dump import dump_batch, dump_path, read_dump, refuse_other_dump
    from skyrl_megatron_tools.logprob_mismatch.recorded import read_step
    from skyrl_megatron_tools.replay_trainer import plan_replay

    keys = {"trainer.export_path": tmp_path, "trainer.ckpt_path": tmp_path / "ckpt"}
    cfg = configured(start, "SkyRLTrainConfig", **keys)
    ones = torch.ones(2, 3)
    padded = PaddedBatch(ones.long(), ones.bool(), ones, ones.clone(), ["a", "b"], rollout_logprobs=-ones)
    batch = padded.flat()
    dump_batch(batch, dump_path(cfg, 1), identity=sampled_identity(cfg))
    refuse_other_dump(cfg, 1)
    assert read_dump(dump_path(cfg, 1))[0].uids == ["a", "b"]
    shutil.copytree(start / MODEL, tmp_path / "changed")
    other_weight(tmp_path / "changed")
    keys["trainer.policy.model.path"] = tmp_path / "changed"
    other = configured(start, "SkyRLTrainConfig", **keys)
    for use in (lambda cfg: plan_replay(cfg, 1, 1, same=False), lambda cfg: read_step(cfg, 1)):
        use(cfg)
        with pytest.raises(ConfigError) as refused:
            use(other)
        (problem,) = refused.value.problems
        assert problem.key == "--step" and "trainer.resume_other=[model]" in problem.fix
        assert f"its model is {start / MODEL} (" in problem.fix and f"{tmp_path / 'changed'} (" in problem.fix
    other.trainer.resume_other = ["model"]
    refuse_other_dump(other, 1)
    dump_batch(batch, dump_path(other, 1))
    other.trainer.resume_other = []
    refuse_other_dump(other, 1)  # a dump of an older version does not say


def test_a_recording_of_another_model_is_not_replayed(start, tmp_path):
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.identity import run_identity
    from skyrl_megatron.sources.replayed import ReplayedRollouts
    from skyrl_megatron.sources.store import DurableGroups

    def of(name, **keys):
        return configured(start, "SkyRLTrainConfig", **{"trainer.ckpt_path": tmp_path / name} | keys)

    recording = of("recorded")
    DurableGroups(recording, lambda number: 0, fresh=True, identity=run_identity(recording)).store.close()
    replayed = {"trainer.fully_async.replay_from": tmp_path / "recorded/rollouts"}
    other = replayed | {"generator.chat_template.name_or_path": "qwen3_with_thinking"}
    for keys, said in (
        (replayed, "ends with step 0"),
        (
            other,
            r"its template is .*, this run's is qwen3_with_thinking .*or trainer.resume_other=\[template\] to train",
        ),
        (other | {"trainer.resume_other": "[template]"}, "ends with step 0"),
    ):
        stream = ReplayedRollouts(of("again", **keys), lambda number, uid: {})
        with pytest.raises(ConfigError, match=rf"trainer.fully_async.replay_from=.*{said}"):
            stream.check(0)
        stream.store.close()


def test_evaluations_of_models_and_data_that_are_not_downloaded_yet_differ(start):
    """The identity is made before the evaluation downloads anything: names and commits of the hub tell them apart."""
    from skyrl_megatron.identity import evaluation_identity, other_parts

    def identity(model="of/ours", data="of/sums", commit="1" * 40):
        keys = {"trainer.policy.model.path": model, "data.val_data": f"[{data}]"}
        cfg = configured(start, "SkyRLTrainConfig", **keys)
        cfg.trainer.hub_commits = {f"{model}@main": commit, f"datasets/{data}@main": "2" * 40}
        return evaluation_identity(cfg)

    assert other_parts(identity(), identity()) == []
    assert "model" in other_parts(identity(), identity(model="of/others"))
    assert "model" in other_parts(identity(), identity(commit="3" * 40))
    assert "data" in other_parts(identity(), identity(data="of/products"))


def test_a_run_that_resumes_nothing_says_why(start, tmp_path):
    from skyrl_megatron.trainer.checkpoints import resume_lines

    keys = {"trainer.ckpt_path": tmp_path}
    assert list(resume_lines(configured(start, **keys))) == [
        f"starts at step 0: no checkpoint to resume from in {tmp_path}"
    ]
    keys["trainer.resume_mode"] = "none"
    assert list(resume_lines(configured(start, **keys))) == ["starts at step 0: trainer.resume_mode=none"]


def test_rollouts_of_another_run_are_not_trained_on(start, tmp_path):
    """Also before the first checkpoint; `resume_mode=none` removes them, and `resume_other` keeps them."""
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.identity import FILE, run_identity
    from skyrl_megatron.sources.store import DurableGroups

    def opened(fresh=False, **keys):
        cfg = configured(start, "SkyRLTrainConfig", **{"trainer.ckpt_path": tmp_path} | keys)
        DurableGroups(cfg, lambda number: 0, fresh=fresh, identity=run_identity(cfg)).store.close()

    other = {"data.train_data": f"[{start / 'others.jsonl'}]"}
    opened()
    opened()
    with pytest.raises(ConfigError) as refused:
        opened(**other)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("trainer.ckpt_path", str(tmp_path / "rollouts"))
    assert "its data is rows.jsonl (" in problem.fix and "this run's is others.jsonl (" in problem.fix
    assert "trainer.resume_other=[data]" in problem.fix
    opened(fresh=True, **other)
    with pytest.raises(ConfigError):
        opened()
    opened(**{"trainer.resume_other": "[data]"})
    opened()
    assert json.loads((tmp_path / "rollouts" / FILE).read_text())["data"]["shown"].startswith("rows.jsonl")


@pytest.mark.parametrize(
    "option",
    [
        "generator.inference_engine.engine_init_kwargs",
        "generator.sampling_params.additional_kwargs",
        "trainer.policy.megatron_config.optimizer_config_kwargs",
    ],
)
def test_an_entry_of_a_dictionary_is_a_changed_setting(option):
    """Also where the other run has none of its entries."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.identity import changed_settings, settings_of

    before, after = (SkyRLTrainConfig.from_cli_overrides(keys) for keys in ([], [f"{option}.probe=3"]))
    for one, other in ((before, after), (after, before)):
        (line,) = changed_settings(settings_of(one), settings_of(other))
        assert line.startswith(f"{option}=") and "probe" in line
