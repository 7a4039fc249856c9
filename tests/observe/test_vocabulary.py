"""Tokens that the model has no row for, and files of a model that name different tokens: found before a run starts, by
every verb's ``--check``."""

import json

import pytest

from tests.support.whole_folder import write_sums, write_whole_folder

GPUS, TP = (
    "trainer.placement.policy_num_gpus_per_node=2",
    "trainer.policy.megatron_config.tensor_model_parallel_size=2",
)
PAIR = {
    "prompt": [{"role": "user", "content": "1+1=?"}],
    "chosen": [{"role": "assistant", "content": "2"}],
    "rejected": [{"role": "assistant", "content": "3"}],
}
ROWS = {"sft": {"messages": PAIR["prompt"] + PAIR["chosen"]}, "dpo": PAIR, "reward": PAIR}
VERBS = {"sft": "sft.SFTTrainConfig", "dpo": "preferences.DPOTrainConfig", "reward": "preferences.RewardTrainConfig"}


def write_model(folder, family="qwen3_moe", **changes):
    """A model of 512 rows and its tokenizer, which agree; ``changes`` replace entries of its config.json."""
    from tests.bridges.tiny_models import tiny_config

    sizes = dict(vocab_size=512, hidden_size=64, head_dim=32, max_position_embeddings=4096)
    if family == "deepseek_v3":
        sizes.pop("head_dim")
    write_whole_folder(folder, tiny_config(family, **sizes, bos_token_id=None))
    change(folder / "config.json", **changes)
    return folder


def add_tokens(folder, count):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra{number}>" for number in range(count)])
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def change(path, **values):
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | values))


def check(verb, folder, *keys, capsys):
    """(exit code, report, errors) of a verb's ``--check``."""
    import importlib

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.entrypoints import check

    data, cls = folder / "rows.jsonl", SkyRLTrainConfig
    if verb == "train":
        data = write_sums(folder / "rows.parquet", rows=1024)
    else:
        module, name = VERBS[verb].split(".")
        cls = getattr(importlib.import_module(f"skyrl_megatron.config.schema.{module}"), name)
        data.write_text((json.dumps(ROWS[verb]) + "\n") * 80)
    own = [f"trainer.policy.model.path={folder}/model", f"data.train_data=[{data}]", "data.val_data=[]"]
    places = [f"trainer.{name}_path={folder}/{name}" for name in ("log", "ckpt", "export")]
    return check.run([*own, *places, "trainer.logger=console", *keys], cls=cls), *capsys.readouterr()


@pytest.mark.parametrize("verb", ["train", *VERBS])
def test_added_tokens_without_rows_are_refused(tmp_path, capsys, verb):
    write_model(tmp_path / "model")
    assert add_tokens(tmp_path / "model", 3) <= 512
    code, _, err = check(verb, tmp_path, capsys=capsys)
    assert code == 0, err
    last = add_tokens(tmp_path / "model", 700) - 1
    for keys, padded in (((), ""), ((GPUS, TP), " (512 with the padding for tp=2)")):
        code, _, err = check(verb, tmp_path, *keys, capsys=capsys)
        assert code == 2 and err.count("the tokenizer has '<extra699>'") == 1, err
        assert f"with id {last} ({last - 511} such tokens, from" in err
        assert f"but the model has 512 rows of tokens{padded}, vocab_size of config.json" in err


@pytest.mark.parametrize(
    "file, values, says",
    [
        ("config.json", {"eos_token_id": [2, 512]}, "config.json names eos_token_id 512"),
        ("config.json", {"pad_token_id": 600}, "config.json names pad_token_id 600"),
        ("generation_config.json", {"eos_token_id": 5000}, "generation_config.json names eos_token_id 5000"),
        pytest.param(
            *(None, {}, "the settings name stop_token_ids 512"), marks=pytest.mark.process
        ),  # imports vLLM, which starts one
    ],
)
def test_special_tokens_without_rows_are_refused(tmp_path, capsys, file, values, says):
    folder, keys = write_model(tmp_path / "model"), ()
    if file is None:
        keys = ("generator.eval_sampling_params.additional_kwargs={stop_token_ids: [511, 512]}",)
    else:
        change(folder / file, **values)
    code, _, err = check("train", tmp_path, *keys, capsys=capsys)
    assert code == 2 and says in err and "stop_token_ids 511" not in err, err


def test_tokens_of_a_language_model_in_a_model_of_text_and_images(tmp_path, capsys):
    from skyrl_megatron.data.vocabulary import named_tokens
    from tests.support.tiny_models import write_tiny_model

    folder = write_tiny_model("qwen3_5_moe", tmp_path / "model", max_position_embeddings=4096)
    assert named_tokens(folder, "pad_token_id") == {0}
    assert check("train", tmp_path, capsys=capsys)[::2] == (0, "")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change(folder / "config.json", text_config=text | {"pad_token_id": 600})
    code, _, err = check("train", tmp_path, capsys=capsys)
    assert code == 2 and "config.json names pad_token_id 600" in err, err


def test_files_that_name_other_tokens_are_named(tmp_path):
    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.data.vocabulary import require_vocabulary
    from skyrl_megatron.errors import SkyRLMegatronWarning

    folder = write_model(tmp_path / "model", eos_token_id=7, pad_token_id=-1)
    change(folder / "generation_config.json", eos_token_id=[8, 9], pad_token_id=5)
    with pytest.warns(SkyRLMegatronWarning) as caught:
        require_vocabulary(load_tokenizer(folder), folder)
    end, padding = (str(each.message) for each in caught)
    assert "end token is '<|im_end|>' (id 2), config.json has [7], generation_config.json has [8, 9]" in end
    assert "padding token is '<|endoftext|>' (id 0), generation_config.json has [5] (pad_token_id)" in padding


def test_templates_that_do_not_fit_the_tokenizer(tmp_path, capsys):
    """One that writes the beginning twice, and one with markers of another family."""
    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.data.vocabulary import warn_of_split_markers
    from skyrl_megatron.errors import SkyRLMegatronWarning

    folder = write_model(tmp_path / "model", bos_token_id=1)
    change(folder / "tokenizer_config.json", bos_token="<|im_start|>")
    (tmp_path / "template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] + m['content'] }}<|im_end|>{% endfor %}"
    )
    keys = ("generator.chat_template.source=file", f"generator.chat_template.name_or_path={tmp_path}/template.jinja")
    code, _, err = check("train", tmp_path, *keys, capsys=capsys)
    assert code == 2 and "prompts begin with '<|im_start|>' (id 1) twice" in err, err
    with pytest.warns(SkyRLMegatronWarning, match=r"writes <\|assistant\|>, which the tokenizer splits"):
        warn_of_split_markers(load_tokenizer(folder), "<|im_start|>a<|assistant|>{{ '<|assistant|>' }}")


def test_padding_is_no_token_that_ends_an_answer(tmp_path):
    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.data.vocabulary import named_tokens, padding_token

    folder = write_model(tmp_path / "model", eos_token_id=[2, 0])
    tokenizer = load_tokenizer(folder)
    assert named_tokens(folder, "eos_token_id") == {0, 2}
    assert padding_token(tokenizer, {2}) == tokenizer.pad_token_id == 0
    assert padding_token(tokenizer, {0, 2}) == 1  # another special token
    assert padding_token(tokenizer, {0, 1, 2}) == 3  # none is left


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_reward_model_that_nothing_could_load_is_refused(tmp_path, capsys, family):
    write_model(tmp_path / "model", family)
    code, _, err = check("reward", tmp_path, capsys=capsys)
    refused = "transformers has no sequence classification for glm4_moe" in err
    assert refused == (family == "glm4_moe") and code == 2 * refused, err
    code, _, err = check("dpo", tmp_path, capsys=capsys)
    assert code == 0, err


@pytest.mark.parametrize("listed", [False, True])
def test_a_token_that_ends_answers_and_stops_no_engine_is_named(tmp_path, capsys, listed):
    """As with ChatML and a base model, whose files name only the end of a text."""
    write_model(tmp_path / "model")
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}<|end_of_turn|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end_of_turn|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    token = tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    change(tmp_path / "model/config.json", vocab_size=max(512, len(tokenizer)))
    ends = [tokenizer.eos_token_id, *([token] if listed else [])]
    change(tmp_path / "model/generation_config.json", eos_token_id=ends)
    code, _, said = check("sft", tmp_path, capsys=capsys)
    warning = f"ends answers with '<|end_of_turn|>' (id {token}), but engines stop at {ends} only"
    assert code == 0 and (warning in said) == (not listed)
