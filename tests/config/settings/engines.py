"""Engines, devices, processes, files and trackers of a run."""

import asyncio
import os


def arguments(cfg):
    """vLLM's arguments."""
    from skyrl_megatron.inference.vllm.settings import engine_settings

    return engine_settings(cfg).arguments()


def settings(cfg):
    """What an engine is told besides vLLM's arguments."""
    from skyrl_megatron.inference.vllm.settings import engine_settings

    return engine_settings(cfg)


def arguments_on_gpus(cfg):
    """The same where the device says that there is a GPU."""
    from unittest.mock import patch

    from skyrl_megatron import device

    with patch.object(device, "has_cuda", lambda: True):
        return arguments(cfg)


def sampling(cfg):
    """What a request of training carries."""
    from skyrl_megatron.inference.sampling_params import engine_sampling

    return engine_sampling(cfg.generator.sampling_params)


def kind(cfg):
    """The class of engines."""
    from skyrl_megatron.plugins import ENGINES

    if ENGINES.find("tests_engine") is None:
        ENGINES.register("tests_engine")(type("OfTheTests", (), {}))
    return ENGINES.find(cfg.generator.inference_engine.backend)


def elsewhere(cfg):
    """The engines that are not started here."""
    from skyrl_megatron.workers.engines import _elsewhere

    return [(each.args, each.keywords) for each in _elsewhere(cfg)]


def transport(cfg):
    """What carries weights."""
    from skyrl_megatron.config.roles import weight_transport

    return weight_transport(cfg)


def endpoint(cfg):
    """Address, token file and model name of the HTTP endpoint of a client without engines; None without one."""
    import httpx

    from skyrl_megatron.workers.engines import InferenceEngineClient

    cfg.generator.inference_engine.remote_urls = []

    async def serve():
        client = InferenceEngineClient(cfg, None)
        await client.start()
        if client.endpoint_url is None:
            return None
        path = cfg.generator.inference_engine.http_token_path or f"{cfg.trainer.log_path}/skyrl/test_run/http_token"
        with open(path) as file:
            headers = {"Authorization": f"Bearer {file.read().strip()}"}
        async with httpx.AsyncClient() as http:
            models = (await http.get(f"{client.endpoint_url}/v1/models", headers=headers)).json()
        await client.services["enable_http_endpoint"].server.stop()
        return client.endpoint_url, path, [each["id"] for each in models["data"]]

    return asyncio.run(serve())


def registry(cfg):
    """The registry of a client without engines, and what it does with those that join; None without one."""
    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron.workers.engines import InferenceEngineClient

    cfg.generator.inference_engine.remote_urls = []
    cfg.trainer.phase_timeout_s = 0.1  # nobody joins

    async def serve():
        client, said = InferenceEngineClient(cfg, None), []
        client.say = said.append
        try:
            await client.start()
        except LaunchError as error:
            said.append(str(error))
        if (registry := client.services.get("enable_registry")) is None:
            return None
        await registry.server.stop()
        return said, registry.fleet.silence_s, registry.fleet.drain_s

    return asyncio.run(serve())


def layout(cfg):
    """Ranks of each role and how they are laid out."""
    from skyrl_megatron.config.roles import active_roles, role_layout

    return {role: role_layout(cfg, role) for role in active_roles(cfg)}


def devices(cfg):
    """Devices of each role and of the engines."""
    from skyrl_megatron.config.rules.placement_rules import gpus_requested

    return gpus_requested(cfg)


def folder(cfg):
    """Where logs go."""
    from skyrl_megatron.config.resolve import run_folder

    return str(run_folder(cfg))


def tracker(cfg):
    """The trackers beside files and console, or why there are none."""
    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron_observe.trackers import named_trackers

    try:
        return [each.name for each in named_trackers(cfg)]
    except LaunchError as error:
        return str(error)


def plugins(cfg):
    """The modules that every process of the run imports."""
    from skyrl_megatron.plugins import VARIABLE, load_plugins

    os.environ[VARIABLE] = ""
    load_plugins(cfg.trainer.plugins)
    return os.environ[VARIABLE]


def repositories(cfg):
    """What is asked of the hub."""
    from skyrl_megatron.config.hf_model import model_repo

    return [model_repo(cfg, role) for role in ("policy", "ref")]
