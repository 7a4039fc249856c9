"""What is kept of a step's samples, against the batch itself."""

import base64
import json
import random

import numpy as np
import pytest


def kept(tmp_path, step=1, **overrides):
    """A step's file, its batch, and the trainer's log-probs of all rows."""
    from skyrl_megatron_observe.samples import SampleLog
    from tests.observe.made_run import batch_of, byte_tokenizer, config

    tokenizer = byte_tokenizer()
    batch, masks, trainer = batch_of(tokenizer, 60, random.Random(3))
    log = SampleLog(config(tmp_path, **overrides), tokenizer, 10)
    log.note({"stop_reasons": ["stop"] * len(batch), "loss_masks": masks, "rollout_versions": None})
    rows = log.chosen(batch)
    path = log.write(step, batch, rows, batch.responses.select(trainer, np.asarray(rows)).numpy())
    return json.loads(path.read_text()), batch, trainer, rows, tokenizer


def numbers(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


def test_a_row_is_what_the_batch_holds(tmp_path):
    record, batch, trainer, rows, tokenizer = kept(tmp_path)
    assert len(rows) == 8 and record["rows"] == len(batch) == 24
    responses = batch.responses
    for sample, row in zip(record["samples"], rows, strict=True):
        tokens = np.concatenate([numbers(sample[part], "<i4") for part in ("prompt", "tokens")])
        np.testing.assert_array_equal(tokens, batch.tokens[batch.rows.of(row)].numpy())
        known = {"engine": batch.rollout_logprobs, "trainer": trainer, "advantages": batch.advantages}
        for name, values in known.items():
            np.testing.assert_array_equal(numbers(sample[name], "<f4"), values[responses.of(row)].numpy())
        np.testing.assert_array_equal(numbers(sample["mask"], "u1"), batch.loss_mask[responses.of(row)].numpy())
        assert sample["reward"] == batch.rewards[responses.of(row)].sum() and sample["uid"] == batch.uids[row]
    text = "".join(record["pieces"][str(token)] for token in numbers(record["samples"][0]["tokens"], "<i4"))
    assert "SELECT count(*) FROM orders" in text


def test_groups_that_teach_are_kept_with_their_best_and_worst_rows(tmp_path):
    """Those with equal rewards fill up, in the order of the batch."""
    import torch

    from skyrl_megatron.types import PaddedBatch
    from skyrl_megatron_observe.samples import SampleLog
    from tests.observe.made_run import byte_tokenizer, config

    rewards = [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0.5, 1, 0.2], [3, 3, 3, 3]]
    ones = torch.ones(16, 2)
    uids = [f"{group}" for group in range(4) for _ in range(4)]
    column = torch.tensor(rewards).reshape(16, 1)
    padded = PaddedBatch(ones.long(), ones, ones[:, :1], ones[:, :1], rewards=column, uids=uids)
    batch = padded.flat()

    def chosen(count):
        return SampleLog(config(tmp_path, **{"trainer.samples_per_step": count}), byte_tokenizer(), 10).chosen(batch)

    assert chosen(4) == [10, 8, 0, 1]
    assert chosen(8) == [10, 8, 9, 11, 0, 1, 2, 3]


def test_of_a_group_the_most_clipped_row_and_one_that_was_cut_off_are_kept(tmp_path):
    """After the best and the worst; by the trained tokens beyond the limits around what the engine sampled from."""
    import torch

    from skyrl_megatron.types import PaddedBatch
    from skyrl_megatron_observe.samples import SampleLog
    from tests.observe.made_run import byte_tokenizer, config

    ones, ratios = torch.ones(6, 4), torch.ones(6, 4)
    ratios[1, :2], ratios[2, 0], ratios[3] = 1.3, 0.7, 1.1  # 1: two tokens, 2: one, 3: none, as all are within 0.2
    mask, engine = ones.clone(), torch.full((6, 4), -1.0)
    mask[1, 1:] = mask[2, 2:] = 0.0  # of row 1 one of one trained token counts, of row 2 one of two
    rewards = torch.zeros(6, 4)
    rewards[:, -1] = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5, 0.0])
    padded = PaddedBatch(
        torch.ones(6, 5).long(), torch.ones(6, 5), ones, mask, rewards=rewards, uids=["a"] * 6, rollout_logprobs=engine
    )
    padded.old_logprobs, padded.truncated = engine + ratios.log(), torch.tensor([0, 0, 0, 0, 1, 0]).bool()

    def chosen(batch):
        return SampleLog(config(tmp_path), byte_tokenizer(), 10).chosen(batch)

    assert chosen(padded.flat()) == [0, 5, 1, 4]
    padded.old_logprobs = None
    assert chosen(padded.flat())[:3] == [0, 5, 4], "nobody knows a ratio"


def test_a_step_whose_first_row_is_too_long_has_no_samples(tmp_path, monkeypatch):
    from skyrl_megatron_observe import samples

    monkeypatch.setattr(samples, "MOST_TOKENS", 3)
    record, *_ = kept(tmp_path)
    assert record["samples"] == [] and record["pieces"] == {}


def test_groups_are_measured_as_one_by_one(tmp_path):
    record, batch, *_ = kept(tmp_path)
    totals = batch.padded().rewards.sum(dim=1).numpy()
    for uid, mean, deviation, count in record["groups"]:
        own = totals[[row for row, each in enumerate(batch.uids) if each == uid]]
        assert (mean, deviation, count) == (pytest.approx(own.mean()), pytest.approx(own.std()), len(own))
    assert record["flat_groups"] == sum(deviation == 0 for _, _, deviation, _ in record["groups"])


@pytest.mark.parametrize(
    ("steps", "per_step", "per_run", "every"), [(10, 8, 2000, 1), (10_000, 8, 2000, 40), (10, 0, 5, 0), (10, 8, 1, 10)]
)
def test_a_run_keeps_so_many_samples(tmp_path, steps, per_step, per_run, every):
    from skyrl_megatron.trainer.recorders import sample_interval
    from tests.observe.made_run import config

    cfg = config(tmp_path, trainer__samples_per_step=per_step, trainer__samples_per_run=per_run)
    assert sample_interval(cfg, steps) == every


def test_a_resumed_run_forgets_the_steps_that_came_to_nothing(tmp_path):
    from skyrl_megatron.trainer.recorders import RecordedRun
    from skyrl_megatron_observe.report_recorder import ReportRecorder
    from tests.observe.made_run import config, write_run

    run = write_run(tmp_path, 20)
    recorder = ReportRecorder(RecordedRun(config(tmp_path), None, 20, None, None, dict))
    recorder.on_load(9)
    steps = [json.loads(line)["step"] for line in (run / "spans.jsonl").read_text().splitlines()]
    assert steps == [1, 3, 5, 7, 9]
    assert sorted(int(path.stem[5:]) for path in run.glob("samples/*.json")) == [1, 3, 5, 7, 9]
    recorder.on_load(None)
    assert (run / "spans.jsonl").read_text() == "" and not list(run.glob("samples/*.json"))
