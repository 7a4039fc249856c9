"""Run as a program: log-probs of Model Runner V2's sampler, its Triton kernels interpreted on CPU; prints JSON.

Needs ``TRITON_INTERPRET=1``, which Triton reads when its functions are defined, and so a process of its own.
"""

import json
import sys
from types import SimpleNamespace

REQUESTS = [
    dict(temperature=0.5, top_p=0.4, seed=1),
    dict(temperature=2.0, top_k=3, seed=2),
    dict(temperature=1.0, min_p=0.5, seed=3),
    dict(temperature=0.0),
    dict(temperature=0.7, repetition_penalty=1.9, presence_penalty=1.0, seed=4),
    dict(temperature=1.7, seed=5),
]
VOCABULARY = 512


def as_in_a_cuda_build():
    """Let vLLM use Triton here, and its own forms of the two things that cannot be had: pinned memory, and a kernel
    that cannot be interpreted."""
    import vllm.platforms

    assert vllm.platforms.current_platform.is_cpu()
    matches = vllm.platforms.vllm_version_matches_substr
    vllm.platforms.vllm_version_matches_substr = lambda text: text != "cpu" and matches(text)
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import sampler

    buffer_utils.UvaBuffer, buffer_utils.is_uva_available = buffer_utils.NonUvaBuffer, lambda: False
    sampler.apply_top_k_top_p = topk_topp_sampler.apply_top_k_top_p_pytorch


def errors(config, *, as_engines):
    """How far each request's log-prob is from log_softmax(logits / temperature), in nats."""
    import torch
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from skyrl_megatron.inference.vllm.compat import WorkerExtension

    cpu = torch.device("cpu")
    states = RequestState(8, 64, 64, 0, VOCABULARY, cpu)
    sampler = Sampler(config, 8, VOCABULARY, cpu, states, logprobs_mode=config.model_config.logprobs_mode)
    if as_engines:
        worker = SimpleNamespace(use_v2_model_runner=True, model_runner=SimpleNamespace(sampler=sampler))
        WorkerExtension.skyrl_logprobs_at_temperature(worker)
    for number, sampling in enumerate(REQUESTS):
        states.add_request(f"request {number}", 3, [5, 6, 7], 0, 32)
        sampler.add_request(number, SamplingParams(logprobs=0, **sampling))
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(REQUESTS), VOCABULARY).to(torch.bfloat16)
    logits[:, 5:8] += 4.0
    before = logits.clone()
    output = sampler(logits, InputBatch.make_dummy(len(REQUESTS), len(REQUESTS), InputBuffers(8, 64, cpu)))
    assert torch.equal(logits, before), "the engine's logits were changed"
    temperatures = torch.tensor([each["temperature"] or 1.0 for each in REQUESTS], dtype=torch.float64)
    expected = (logits.double() / temperatures[:, None]).log_softmax(-1).gather(1, output.sampled_token_ids)
    return (output.logprobs_tensors.logprobs[:, :1] - expected).abs().flatten().tolist()


def supports(config):
    """What each request that leaves tokens out is sampled from: by the sampler's mask, and by its log-probs."""
    import torch
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from skyrl_megatron.inference.vllm.compat import support_lists

    cpu, requests = torch.device("cpu"), [each for each in REQUESTS if {"top_p", "top_k", "min_p"} & set(each)]
    states = RequestState(8, 64, 64, 0, VOCABULARY, cpu)
    mode = config.model_config.logprobs_mode
    sampler = Sampler(config, 8, VOCABULARY, cpu, states, logprobs_mode=mode, return_sampling_mask=True)
    processed, plain = [], sampler.sample

    def sample(*arguments, **options):
        sampled, logits = plain(*arguments, **options)
        processed.append(logits.clone())
        return sampled, logits

    sampler.sample = sample
    for number, sampling in enumerate(requests):
        states.add_request(f"request {number}", 3, [5, 6, 7], 0, 32)
        sampler.add_request(number, SamplingParams(logprobs=0, **sampling))
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(requests), VOCABULARY)
    output = sampler(logits, InputBatch.make_dummy(len(requests), len(requests), InputBuffers(8, 64, cpu)))
    ours = support_lists(processed[0].log_softmax(-1))
    rows = range(len(requests))
    return {
        "theirs": [s.tolist() for s in (output.sampling_mask_tensors.tolists().slice_request(i, 1)[0] for i in rows)],
        "ours": [ours.slice_request(i, 1).token_ids.tolist() for i in rows],
    }


def main(model, what="errors"):
    as_in_a_cuda_build()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from skyrl_megatron.inference.vllm.settings import EngineSettings

    way = {"return_support": True} if what == "support" else {"logprobs_at_temperature": True}
    settings = EngineSettings(model, dtype="float32", max_model_len=64, **way)
    config = AsyncEngineArgs(**settings.arguments()).create_engine_config()
    if what == "support":
        print(json.dumps(supports(config)))
        return
    found = {
        "by default": config.use_v2_model_runner,
        "the runner's": model_runner.Sampler is Sampler,
        "plain": errors(config, as_engines=False),
        "errors": errors(config, as_engines=True),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
