"""``gsm8k_llm_judge`` asks our own endpoint, behind which a real engine serves a model made to answer "1"."""

import pytest

from tests.support.engines import tiny_settings
from tests.support.tiny_models import tiny_model, write_tokenizer

pytestmark = pytest.mark.vllm


def write_judge(folder):
    """Layers add nothing, so that the next token follows from the last one alone: "1", and then the end."""
    import torch
    from transformers import AutoTokenizer

    write_tokenizer(folder)
    one = AutoTokenizer.from_pretrained(folder).encode("1", add_special_tokens=False)
    model = tiny_model("qwen3")
    width = model.config.hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight", "embed_tokens.weight")):
                weight.zero_()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding[:, : width // 2] = 1.0
        embedding[one] = torch.arange(width).ge(width // 2).float()
        head[one, : width // 2] = 1.0
        head[model.config.eos_token_id, width // 2 :] = 1.0
    model.save_pretrained(folder)
    return folder


def test_a_judge_behind_our_own_endpoint(engines, tmp_path, monkeypatch):
    from skyrl_megatron import envs
    from skyrl_megatron.config import GSM8kLLMJudgeEnvConfig
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron_agents.http_endpoint import HttpServer, build_app, endpoint_token

    settings = tiny_settings(write_judge(tmp_path), served_model_name="judge", max_model_len=1024)
    token = endpoint_token(tmp_path / "token")
    loop = engines.loop
    with engines.pool(settings, wait_s=120) as pool:
        server = HttpServer(build_app(InferenceClient(pool), "judge", token, max_body_bytes=20_000), "127.0.0.1", 0)
        loop(server.start())
        config = GSM8kLLMJudgeEnvConfig(model="judge", base_url=f"{server.url}/v1")
        env = envs.make("gsm8k_llm_judge", config, {"reward_spec": {"ground_truth": "7 + 8 = 15\n#### 15"}})
        monkeypatch.setenv("OPENAI_API_KEY", token)
        step = env.step("7 and 8 are 15.\n#### 15")
        assert (step["reward"], step["done"], step["metadata"]) == (1.0, True, {"judge": "1"})
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        with pytest.raises(RuntimeError, match="401"):
            env.step("15")
        loop(server.stop())
