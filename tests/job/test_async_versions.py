"""Whole runs whose responses are sampled from several weights: each token is of the weights that it names."""

import json

import numpy as np
import pytest

from tests.job import runs
from tests.job.test_fully_async import AHEAD

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]

ROWS = """
import json
from skyrl_megatron.trainer import FullyAsyncRayPPOTrainer
class Trainer(FullyAsyncRayPPOTrainer):
    def sample_batch(self):
        output, uids = super().sample_batch()
        with open("rows.jsonl", "a") as file:
            for i, ids in enumerate(output["response_ids"]):
                row = {
                    "step": self.global_step,
                    "prompt": [int(token) for token in output["prompt_token_ids"][i]],
                    "ids": [int(token) for token in ids],
                    "log_probs": [float(value) for value in output["rollout_logprobs"][i]],
                    "spans": output["rollout_versions"][i],
                    "routes": output["rollout_expert_indices"][i].tolist(),
                }
                file.write(json.dumps(row) + chr(10))
        return output, uids

    def fwd_logprobs_values_reward(self, batch):
        batch = super().fwd_logprobs_values_reward(batch)
        padded = batch.padded()
        old = [[float(v) for v in row[mask > 0]] for row, mask in zip(padded.old_logprobs, padded.loss_mask)]
        with open("old.jsonl", "a") as file:
            file.write(json.dumps({"step": self.global_step, "old": old}) + chr(10))
        return batch

    def eval(self):
        def at_work():
            return {"running": len(self.rollouts.stream._running), "finished": len(self.rollouts.stream._finished)}
        before = self.loop.call(at_work)
        metrics = super().eval()
        with open("evals.jsonl", "a") as file:
            file.write(json.dumps({"before": before, "after": self.loop.call(at_work)}) + chr(10))
        return metrics
"""
LONG = {
    # some seconds each: the next weights arrive amid responses
    "generator__sampling_params__max_generate_length": 400,
    "generator__inference_engine__engine_init_kwargs": "{max_model_len: 512, kv_cache_memory_bytes: 134217728}",
    "generator__inference_engine__enable_return_routed_experts": "true",
    "trainer__hf_save_interval": 1,
    "trainer__eval_interval": 1,
    "trainer__max_tokens_per_microbatch": 8192,
    "trainer__fully_async__clear_kv_cache_on_weight_sync": "true",
    # weights that move so far in a step that one version's numbers are never another's
    "trainer__policy__optimizer_config__lr": 2e-2,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return runs.prepare(tmp_path)


def read(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_each_token_is_of_the_weights_that_it_names(folder):
    """Log-probs and chosen experts of responses that a sync divided equal those of transformers with the exported
    weights of each span's version; with those of the other version they do not. Keys and values are computed anew.

    The old log-probs of a batch are those of one policy, that before the step, whatever sampled it; and an evaluation
    does not stop the stream: groups finish beside it."""
    done = runs.run(folder, ROWS, **AHEAD | LONG).check()
    rows = read(folder, "rows")
    divided = [row for row in rows if len({version for version, _, _ in row["spans"]}) > 1]
    models = Versions(folder)
    compared = 0
    for row in divided:
        for version, begin, end in row["spans"]:
            own = models.of(version, row)
            assert np.abs(own.log_probs[begin:end] - row["log_probs"][begin:end]).max() <= 1e-4
            taken = np.array(row["routes"])
            start = len(row["prompt"]) - 1  # a token is sampled where the one before it goes in
            places = slice(start + begin, start + end)
            assert (np.sort(taken[places], -1) == np.sort(own.experts[places], -1)).mean() > 0.999
            other = models.of(next(v for v, _, _ in row["spans"] if v != version), row)
            assert np.abs(other.log_probs[begin:end] - row["log_probs"][begin:end]).max() > 1e-2
            compared += 1
    assert compared >= 4, f"{len(divided)} of {len(rows)} responses were divided by a sync"

    for note in read(folder, "old"):
        own = [models.of(str(note["step"]), row) for row in rows if row["step"] == note["step"]]
        expected = [each.log_probs for each in own]
        for one, two in zip(note["old"], expected, strict=True):
            assert np.abs(np.array(one) - two).max() <= 1e-4
    assert all("eval/all/avg_score" in line for line in done.lines)
    beside = [note for note in read(folder, "evals") if note["after"]["finished"] > note["before"]["finished"]]
    assert beside and all(note["before"]["running"] for note in beside), "groups finish beside an evaluation"


class Scored:
    """What a model says of a row: [n] log-probs of its response, [m, L, K] experts of all its tokens."""

    def __init__(self, log_probs, experts):
        self.log_probs, self.experts = log_probs, experts


class Versions:
    """Transformers' models of the exported weights, by version; 0 is the model that the run began with."""

    def __init__(self, folder):
        self.folder, self.loaded = folder, {}

    def of(self, version, row):
        import torch
        from transformers import Qwen3MoeForCausalLM

        if version not in self.loaded:
            path = self.folder / (f"exports/global_step_{version}/policy" if version != "0" else "model")
            self.loaded[version] = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        model, start = self.loaded[version], len(row["prompt"])
        ids = torch.tensor([row["prompt"] + row["ids"]])
        with torch.no_grad():
            out = model(ids, output_router_logits=True)
        log_probs = out.logits[0].log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        experts = torch.stack([layer.topk(2, -1).indices for layer in out.router_logits], 1)
        return Scored(log_probs.numpy(), experts.numpy())
