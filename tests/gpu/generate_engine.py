"""An engine over a transformers model, for machines without vLLM: ``trainer.plugins=[tests.gpu.generate_engine]``.

It samples one batch of requests at a time with a key/value cache, in its own process and on its process's device. It
implements what a colocated run needs: versions, pause within a response, weight updates, sleep. Qwen3-MoE only, whose
experts transformers keep as fused tensors.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron import device
from skyrl_megatron.errors import EngineGoneError, RequestError, WeightSyncError
from skyrl_megatron.inference.protocol import INITIAL_VERSION, Generation, SampleRequest
from skyrl_megatron.plugins import register_engine
from skyrl_megatron.weight_sync.transport import default_transport

NAME = "transformers"
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
READ = {"max_tokens", "temperature", "seed", "ignore_eos", "logprobs"}
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
"""Parameters that this engine knows at these values alone."""


@dataclass(eq=False)
class Request:
    """One response in progress."""

    tokens: list[int]
    """Prompt and response."""
    prompt: int
    sampling: Mapping[str, Any]
    answer: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Of each token of the response."""
    finish: str = ""

    def generation(self) -> Generation:
        spans: list[tuple[str, int, int]] = []
        for at, version in enumerate(self.versions):
            start = spans.pop()[1] if spans and spans[-1][0] == version else at
            spans.append((version, start, at + 1))
        return Generation(self.tokens[self.prompt :], self.logprobs, self.finish, spans)


@register_engine(NAME)
class GenerateEngine:
    """One thread samples. ``_awake`` is held by whoever uses the weights: the thread, a score, an update."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._model: Any = None
        self._version = INITIAL_VERSION
        self._requests: dict[str, Request] = {}
        self._changed = threading.Condition()
        self._awake = threading.Lock()
        self._paused = self._ended = False
        self._receiver: Any = None
        self._away: dict[str, Any] = {}
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------ start and end
    async def start(self) -> None:
        await asyncio.to_thread(self._load)
        threading.Thread(target=self._work, name="generate", daemon=True).start()

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        device.set_local_device(0)
        dtype = self.settings.dtype
        model = AutoModelForCausalLM.from_pretrained(self.settings.folder, dtype=dtype if dtype != "auto" else "auto")
        self._model = model.to(device.device()).eval().requires_grad_(False)
        for _, tensor in self._tensors():
            if not tensor.untyped_storage().resizable():  # mapped from the file
                tensor.data = tensor.data.clone()
        self._eos = set(torch.as_tensor(model.generation_config.eos_token_id or []).view(-1).tolist())
        self._generator = torch.Generator(device.device()).manual_seed(self.settings.seed)

    async def shutdown(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)

    kill = shutdown

    async def health(self) -> None:
        if self._failure is not None or self._ended:
            raise EngineGoneError(f"the engine has ended: {self._failure}")

    def process_ids(self) -> list[int]:
        return []

    # ------------------------------------------------------------------ sampling
    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any], adapter: str = ""
    ) -> Generation:
        return (await self.generate_batch([SampleRequest(request_id, prompt_token_ids, sampling, adapter)]))[0]

    async def generate_batch(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        await self.health()
        loop, made = asyncio.get_running_loop(), []
        for each in requests:
            for key, value in each.sampling.items():
                if key not in READ and value is not None and (key not in NEUTRAL or NEUTRAL[key] != value):
                    raise RequestError(f"request {each.request_id}: {key}={value} is unknown to this engine")
            prompt = list(each.prompt_token_ids)
            made.append(Request(prompt, len(prompt), each.sampling, loop.create_future(), loop))
        with self._changed:
            self._requests |= {each.request_id: one for each, one in zip(requests, made, strict=True)}
            self._changed.notify_all()
        return list(await asyncio.gather(*(one.answer for one in made)))

    def _work(self) -> None:
        try:
            device.set_local_device(0)
            while self._wait():
                with self._awake:
                    self._sample()
        except BaseException as error:
            self._failure = error
            gone = EngineGoneError(f"the engine failed: {error!r}")
            for request in self._requests.values():
                request.loop.call_soon_threadsafe(_set, request.answer, gone)
            raise

    def _wait(self) -> bool:
        """Wait for a request that may be sampled; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (self._requests and not self._paused))
            return not self._ended

    def _sample(self) -> None:
        """Sample the oldest requests until all of them have ended or the engine is paused."""
        import torch
        from transformers import DynamicCache

        with self._changed:
            batch = dict(list(self._requests.items())[: self.settings.max_num_seqs])
        rows, on = list(batch.values()), device.device()
        longest = max(len(row.tokens) for row in rows)
        lengths = torch.tensor([len(row.tokens) for row in rows], device=on)
        padded = torch.tensor([[0] * (longest - len(row.tokens)) + row.tokens for row in rows], device=on)
        mask = (torch.arange(longest, device=on) >= longest - lengths[:, None]).long()
        places = (mask.cumsum(1) - 1).clamp(min=0)
        heat = torch.tensor([float(row.sampling.get("temperature", 1.0)) for row in rows], device=on)[:, None]
        cache = DynamicCache(config=self._model.config)
        with torch.no_grad():
            while not (self._paused or self._ended) and any(not row.finish for row in rows):
                logits = self._model(
                    input_ids=padded, attention_mask=mask, position_ids=places, past_key_values=cache, logits_to_keep=1
                ).logits[:, -1]
                chances = (logits.float() / heat.clamp(min=1e-6)).log_softmax(-1)
                chosen = torch.multinomial(chances.exp(), 1, generator=self._generator)
                chosen = torch.where(heat > 0, chosen, logits.argmax(-1, keepdim=True))
                self._take(rows, chosen[:, 0].tolist(), chances.gather(1, chosen)[:, 0].tolist())
                padded, places = chosen, places[:, -1:] + 1
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        self._answer()

    def _answer(self) -> None:
        """Answer the requests that have ended."""
        with self._changed:
            for name, row in [*self._requests.items()]:
                if row.finish:
                    del self._requests[name]
                    row.loop.call_soon_threadsafe(_set, row.answer, row.generation())

    def _take(self, rows: list[Request], chosen: list[int], logprobs: list[float]) -> None:
        for row, token, logprob in zip(rows, chosen, logprobs, strict=True):
            if row.finish:
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self._version)
            ends = token in self._eos and not row.sampling.get("ignore_eos")
            full = len(row.logprobs) == row.sampling["max_tokens"] or len(row.tokens) == self.settings.max_model_len
            row.finish = "stop" if ends else "length" if full else ""

    async def abort(self, request_id: str) -> None:
        with self._changed:
            if (request := self._requests.get(request_id)) is not None and not request.finish:
                request.finish = "abort"

    async def pause(self, mode: str = "keep") -> None:
        """Stop after the current token; frozen requests compute their keys and values anew."""
        if mode == "wait":
            await asyncio.gather(*(request.answer for request in self._requests.values()))
        with self._changed:
            self._paused = True
            if mode == "abort":
                for request in self._requests.values():
                    request.finish = request.finish or "abort"
        await asyncio.to_thread(self._use, self._answer)

    async def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> list[float]:
        def scores() -> list[float]:
            import torch

            tokens = torch.tensor([list(token_ids)], device=device.device())
            with torch.no_grad():
                logprobs = self._model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
            return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()

        return await asyncio.to_thread(self._use, scores)

    def _use(self, work: Any) -> Any:
        with self._awake:
            return work()

    async def reset_prefix_cache(self) -> None:
        """There is none."""

    # ------------------------------------------------------------------ memory
    async def sleep(self, level: int = 1) -> None:
        await asyncio.to_thread(self._use, lambda: self._empty(keep=level == 1))

    def _empty(self, keep: bool) -> None:
        if self._away:
            return
        buffers = {name for name, _ in self._model.named_buffers()}
        for name, tensor in self._tensors():
            self._away[name] = tensor.detach().cpu().clone() if keep or name in buffers else None
            tensor.untyped_storage().resize_(0)
        device.empty_cache()

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            await asyncio.to_thread(self._use, self._fill)

    def _fill(self) -> None:
        for name, tensor in self._tensors() if self._away else ():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            if (kept := self._away[name]) is not None:
                tensor.detach().copy_(kept)
        self._away = {}

    def _tensors(self) -> list[tuple[str, Any]]:
        """Parameters and buffers by name, those that share memory once."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return list({tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in reversed(named)}.values())

    # ------------------------------------------------------------------ weights
    async def worker_count(self) -> int:
        return 1

    async def version(self) -> str:
        return self._version

    async def set_version(self, version: str) -> None:
        self._version = version

    async def connect_weights(
        self, senders: Sequence[tuple[str, int]], rank_offset: int, world_size: int, **options: Any
    ) -> None:
        from skyrl_megatron.weight_sync.buckets import WeightReceiver
        from skyrl_megatron.weight_sync.transport import open_transport

        def connect() -> WeightReceiver:
            if self._receiver is not None:
                self._receiver.close()
            name, timeout_s = options.get("transport") or default_transport(), options["timeout_s"]
            ends = [open_transport(name, host, port, rank_offset, world_size, timeout_s) for host, port in senders]
            return WeightReceiver(ends, options["bucket_bytes"], device.device())

        self._receiver = await asyncio.to_thread(connect)

    async def weight_targets(self, metadata: Sequence[Any]) -> list[Any] | str:
        return "an engine over transformers takes whole tensors"

    async def start_update(self) -> None:
        """Nothing: tensors are copied into place."""

    async def receive_weights(self, metadata: Any) -> list[list[list[int]]]:
        from skyrl_megatron.weight_sync.tensors import as_on_disk, metadata_of, plain_metadata

        def receive() -> list[list[list[int]]]:
            device.set_local_device(0)
            self._receiver.set_metadata([[metadata_of(*item) for item in one] for one in plain_metadata(metadata)])
            targets, loaded = dict(self._model.named_parameters()), 0
            for name, tensor in as_on_disk(self._receiver.tensors(), self._receiver.senders):
                target = place_of(name, targets)
                if target.shape != tensor.shape:
                    raise WeightSyncError(f"receive: {name} {list(tensor.shape)} for {list(target.shape)}")
                target.detach().copy_(tensor)
                loaded += target.numel()
            self._receiver.finish()
            if loaded != (wanted := sum(target.numel() for target in targets.values())):
                raise WeightSyncError(f"receive: {loaded} of {wanted} numbers were sent")
            return [self._receiver.checksums]

        return await asyncio.to_thread(self._use, receive)

    async def finish_update(self, version: str, adapters: Mapping[str, str] | None = None) -> None:
        self._version = version

    async def abort_update(self) -> None:
        """Nothing: the next update copies all tensors."""


def place_of(name: str, targets: Mapping[str, Any]) -> Any:
    """Return the memory of a tensor on disk in transformers' module. Raises WeightSyncError."""
    if (found := EXPERT.match(name)) is not None:
        layer, expert, kind = found[1], int(found[2]), found[3]
        if kind == "down":
            return targets[f"{layer}.down_proj"][expert]
        gate_up = targets[f"{layer}.gate_up_proj"][expert]
        half = gate_up.shape[0] // 2
        return gate_up[:half] if kind == "gate" else gate_up[half:]
    if name not in targets:
        raise WeightSyncError(f"receive: the model has no {name}")
    return targets[name]


def _set(future: asyncio.Future[Generation], outcome: Generation | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
