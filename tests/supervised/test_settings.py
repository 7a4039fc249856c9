"""``skyrl-megatron sft --check``: the report, and mistakes that only supervised training has."""

import json

import pytest

from tests.support.whole_folder import write_whole_folder


def talk(question, answer="2"):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and two data sets: of 80 short rows, and of long ones."""
    from tests.bridges.tiny_models import tiny_config

    folder = tmp_path_factory.mktemp("sft")
    write_whole_folder(folder / "model", tiny_config("qwen3_moe", max_position_embeddings=4096))
    for name, question, count in (("short", "1+1=?", 80), ("long", "1+1=?" * 40, 2)):
        (folder / f"{name}.jsonl").write_text((json.dumps(talk(question)) + "\n") * count)
    return folder


@pytest.fixture
def check(folder, capsys):
    """Return (exit code, report, errors) of the command with some keys."""
    from skyrl_megatron.config.schema.sft import SFTTrainConfig
    from skyrl_megatron.entrypoints import check

    def run(*keys, data="short", machine=None):
        files = ",".join(f"{folder}/{name}.jsonl" for name in data.split())
        own = [f"trainer.policy.model.path={folder}/model", f"data.train_data=[{files}]", "trainer.logger=console"]
        places = [f"trainer.{name}_path={folder}/{name}" for name in ("log", "ckpt", "export")]
        code = check.run([*own, *places, *keys], machine, cls=SFTTrainConfig)
        return code, *capsys.readouterr()

    return run


def test_the_report_names_nothing_that_samples(check):
    from skyrl_megatron.config.hardware import Hardware

    machine = Hardware(2, 1, 80 << 30, 1 << 40, gpu="H100")
    keys = ("sft.max_length=512", "trainer.placement.policy_num_gpus_per_node=2")
    code, out, err = check(*keys, machine=machine)
    assert code == 0, err
    assert "64 rows of at most 512 tokens" in out and "if every sequence has 512 tokens" in out
    assert "policy training, rank 0" in out and "each on 64 sequences = dp 2 · 32" in out
    said = out.partition("# policy")[2]
    assert [word for word in ("engine", "KV cache", "sync", "prompt", "response", "sampl") if word in said] == []


def test_a_check_says_how_many_rows_it_tokenized(check):
    code, out, err = check("sft.max_length=512", "trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2")
    assert code == 0, err
    assert "tokens of data.train_data: the form of all 80 rows was read, 2 were tokenized" in out


BAD = {
    "a weight must be above 0, 0.0 is not": ("data.sampler_options.weights=[1,0]", "short long"),
    "data.train_data has 2 data sets, so give as many weights": ("data.sampler_options.weights=[1]", "short short"),
    "a weight must be above 0, -1.0 is not": ("data.sampler_options.weights=[1,-1]", "short short"),
    "long.jsonl, row 0: longer than sft.max_length=64": ("data.sampler_options.weights=[1,1]", "short long"),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_mixture(check, problem):
    """Its weights are checked, also when one data set is named twice."""
    weights, data = BAD[problem]
    keys = ("sft.max_length=64", "trainer.train_batch_size=82", "data.sampler=mixture")
    code, _, err = check(*keys, weights, data=data)
    assert code == 2 and problem in err and "max_prompt_length" not in err, err


def test_a_data_set_of_which_no_row_is_left(folder):
    """The message names the setting that left them out."""
    from skyrl_megatron.config.schema.supervised import SFTConfig
    from skyrl_megatron.data.samplers import make_sampler
    from skyrl_megatron.data.tokenizer import load_tokenizer
    from skyrl_megatron.errors import DataError
    from skyrl_megatron.rollout.templates import ChatFormat
    from skyrl_megatron_supervised.chat_rows import ChatRows

    chat = ChatFormat(load_tokenizer(str(folder / "model")))
    names = [f"{folder}/short.jsonl", f"{folder}/long.jsonl"]
    rows = ChatRows(names, chat, SFTConfig(max_length=64, invalid_rows="skip"))
    with pytest.raises(DataError, match=r"long\.jsonl: sft\.invalid_rows=skip leaves no row"):
        make_sampler("mixture", {"weights": [1, 1]}, rows.sampled_rows, 4, 0)


def test_settings_of_rollouts_do_not_change_the_loss(folder):
    """A sampling temperature is no temperature of the log-probs; it is reported as without effect."""
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.sft import SFTTrainConfig
    from skyrl_megatron.config.validate import find_problems
    from skyrl_megatron.errors import SkyRLMegatronWarning

    keys = ["generator.sampling_params.temperature=0.7", "trainer.algorithm.advantage_estimator=gae"]
    model = [f"trainer.policy.model.path={folder}/model", "trainer.logger=console"]
    cfg = SFTTrainConfig.from_cli_overrides([*keys, *model])
    with pytest.warns(SkyRLMegatronWarning) as warned:
        assert find_problems(cfg, Hardware(0, 1)) == []
    assert cfg.trainer.algorithm.temperature == 1.0
    text = str(warned[0].message)
    assert [key for key in keys if f"{key}: supervised training samples nothing" not in text] == []


REFUSED = {
    "row 1: message 1: weight is 0.5, which cannot be obeyed": {"weight": 0.5},
    "row 1: message 1: the chat template does not write reasoning in this place": {"reasoning": "one and one"},
    "row 1: nothing reads the key 'note' of messages (sft.strict_rows)": {"note": "?"},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_a_row_that_says_more_than_is_obeyed(folder, tmp_path, capsys, problem):
    """One line from the command, before anything starts."""
    from skyrl_megatron_supervised.sft import main

    rows = [talk("1+1=?"), talk("2+2=?", "4")] * 40
    rows[1] = {"messages": [rows[1]["messages"][0], rows[1]["messages"][1] | REFUSED[problem]]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"trainer.policy.model.path={folder}/model", f"data.train_data=[{tmp_path}/rows.jsonl]"]
    code = main(["--check", "--strict-rows", "sft.max_length=64", "trainer.logger=console", *keys])
    out, err = capsys.readouterr()
    assert code == 2 and "Traceback" not in out + err
    assert [line for line in err.splitlines() if problem in line], err
