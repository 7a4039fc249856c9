"""The weight sync: all engines get the trainer's weights, prove it, and only then generate with them.

    pause all and hear from each process → connect (once, and after engines changed) → start → send ‖ receive →
    compare checksums of every worker → finish → trainer and engines score the same tokens → publish the version →
    resume

Ranks and engines are called concurrently (``sync_calls.py``). An engine that fails is restarted and the sync is made
anew for all, or it is dropped while others are left, as is one that had joined from elsewhere. Until the version is
published nothing is delivered from the new weights, and a failed sync leaves engines paused.

Where engines hold the base and get adapters, each lies beside the one that serves until all engines were verified with
all of them, and after a failed sync they serve on with the old ones. Those that have not changed stay where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from skyrl_megatron.errors import EngineError, WeightSyncError
from skyrl_megatron.inference.client import SILENT_S
from skyrl_megatron.inference.pool import EnginePool, EngineSlot, same_failure
from skyrl_megatron.inference.protocol import INITIAL_VERSION, InferenceEngine
from skyrl_megatron.plugins import TRANSPORTS
from skyrl_megatron.weight_sync import DEFAULT_BUCKET_BYTES
from skyrl_megatron.weight_sync.adapter_tensors import Pairs, check_adapters, of_adapters
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.probe import (
    EPSILON,
    LogprobDiff,
    is_due,
    limit_of,
    logprob_diff,
    probe_tokens,
)
from skyrl_megatron.weight_sync.tensors import check_metadata
from skyrl_megatron.weight_sync.transport import default_transport
from skyrl_megatron.workers.sync_calls import (
    AttemptFailed,
    EnginesDisagree,
    EnginesLost,
    RoutePlanner,
    SyncCalls,
    TrainerRank,
    WorkerRoutes,
    compare_parcels,
    connect_routes,
)

if TYPE_CHECKING:
    from skyrl_megatron.runtime.offload import Part

log = logging.getLogger(__name__)
NEARLY = 0.95
"""Bandwidth, relative to the best, that makes smaller buckets the better ones."""
RESTARTS = 2
"""Restarts of one engine within one sync."""
ENGINE_FRACTION = 0.8
"""The longest wait of a rank for engines, as a fraction of a phase. Ranks wait for one another longer, so that those
which are not to blame do not give up first."""


class NoEngineLeft(WeightSyncError):
    """Every engine is gone, so that nobody could be given the weights."""


@dataclass(slots=True)
class SyncReport:
    """Cost and outcome of a sync."""

    version: str
    nbytes: int
    engines: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall clock of each phase; of the last attempt, if engines failed."""
    logprob_diffs: dict[str, LogprobDiff] = field(default_factory=dict)
    """Per engine, if the probe was due; of named adapters ``engine 0, math``."""
    adapters: tuple[str, ...] | None = None
    """The adapters that travelled; None: weights did."""
    failures: list[str] = field(default_factory=list)
    """Failures that were recovered from on the way."""

    @property
    def total_seconds(self) -> float:
        """Seconds from the first pause to the last resume, of the last attempt."""
        return sum(self.seconds.values())

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes sent per second of transfer, in 10⁹; each engine received as many, by routes all together."""
        return self.nbytes / self.seconds["transfer"] / 1e9


class WeightSynchronizer:
    """Gives the weights of ``ranks`` to the engines of a pool; owns nothing but the order of the calls.

    ``hf_config``: of the model, for the check of completeness. ``dtype``: of the engines' weights. ``deadline_s``: for
    one sync, restarts included; ``phase_s``: for any phase of it, and the longest wait of any rank or worker.
    ``probe_interval``: syncs from one probe to the next (``weight_sync_probe_interval``). ``probe_limit``: nats; None:
    what rounding explains. ``bucket_sizes``: bytes, ascending; the first sync measures them and chooses one where
    ranks and workers send point to point over a network, else the last one counts. ``shared_gpus``: trainer and
    engines take turns on the same GPUs, and engines sleep while the trainer works. ``exchange``: ranks of a node,
    where ranks give one another what is for the workers on their GPUs (``weight_sync/point_to_point.py``); else 0.
    ``adapters``: projections of those that travel alone, by their names, to engines that hold the base; None: all
    weights travel. ``routes``: each worker gets its own bytes alone, where that can be planned (``weight_routes.py``).
    ``draft``: the ranks train the layer of multi-token prediction, which goes to engines with the rest. ``look``,
    ``end_waiting``: as for :class:`SyncCalls`.
    """

    def __init__(
        self,
        pool: EnginePool,
        ranks: Sequence[TrainerRank],
        *,
        hf_config: Mapping[str, Any],
        dtype: str,
        probe_interval: int = 1,
        probe_limit: float | None = None,
        transport: str | None = None,
        bucket_sizes: Sequence[int] = (DEFAULT_BUCKET_BYTES,),
        deadline_s: float = 1800.0,
        phase_s: float = 600.0,
        shared_gpus: bool = False,
        exchange: int = 0,
        adapters: Pairs | None = None,
        routes: bool = False,
        draft: bool = False,
        look: Callable[[], str] = lambda: "",
        end_waiting: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.pool, self.calls = pool, SyncCalls(ranks, phase_s, look, end_waiting)
        self.hf_config, self.dtype = hf_config, dtype
        self.probe_interval, self.probe_limit = probe_interval, probe_limit
        self.options: dict[str, Any] = {
            "transport": transport or default_transport(),
            "bucket_bytes": bucket_sizes[-1],
            "timeout_s": ENGINE_FRACTION * phase_s,
        }
        self.deadline_s, self.phase_s, self.shared_gpus = deadline_s, phase_s, shared_gpus
        self.adapters, self.draft, self.exchange = adapters, draft, exchange
        own = (*TRANSPORTS.built_in, *TRANSPORTS.reserved)
        self.routed = routes and self.options["transport"] in own
        self.planner = RoutePlanner(self.calls, bucket_sizes[-1])
        over_network = not exchange and self.options["transport"] in TRANSPORTS.built_in
        self._unmeasured = tuple(bucket_sizes) if over_network and len(bucket_sizes) > 1 else ()
        """Sizes of buckets that the next connection measures."""
        self.versions: dict[str, str] = {}
        """Adapter → the version that its weights changed last in, as of the sync under way."""
        self.syncs = 0
        self.training = True
        """Whether the trainer may have moved on from the weights of the last sync."""
        self._metadata: list[list[TensorMeta]] = []
        self.plan: WorkerRoutes | None = None
        """Of the last sync; None: every worker got all buckets."""
        self._connected: list[InferenceEngine] = []  # engines that the ranks' groups were made for
        self._changed: set[str] = set(adapters or ())  # adapters that not all engines have as they are
        self._whole: list[InferenceEngine] = []  # engines that have all others

    async def sync(self, version: str, changed: Collection[str] | None = None) -> SyncReport:
        """Give every engine the trainer's weights as ``version``. Requests in flight are frozen meanwhile.

        ``changed``: the adapters that were trained since the last sync; None: all.

        Raises WeightSyncError when no engine could be verified, or a trainer rank does not answer: none generates
        then, the version is not published, and the trainer's state is untouched. Errors of trainer ranks come through
        as they are.
        """
        ends = time.monotonic() + self.deadline_s
        while True:
            await self.pool.until_some_are_there(ends - time.monotonic())
            async with self.pool.changing:
                self.calls.ends = ends
                self._changed |= set(self.adapters or () if changed is None else changed)
                self.versions |= dict.fromkeys(self._changed, version)
                try:
                    report = await self._until_verified(version)
                except NoEngineLeft:
                    if self.pool.newcomers and time.monotonic() < ends:
                        continue
                    raise
                slots = self.pool.alive()
                self._changed, self._whole = set(), [slot.engine for slot in slots]
                for slot in slots:
                    slot.version = version
                self.pool.publish(version)
                with _timed(report, "resume"):
                    await self.calls.on_engines(slots, "resume", lambda engine: engine.resume())
                self.syncs += 1
                self.training = False
                return report

    async def begin_training(self) -> None:
        """Wait until no sync is under way and engines on the same GPUs sleep.

        The trainer may then use its ranks and change its weights; until the next sync :meth:`sync_engine` refuses.
        """
        async with self.pool.changing:
            self.training = True
            if self.shared_gpus:
                await self.pool.sleep(self.phase_s)

    async def replace_ranks(self, ranks: Sequence[TrainerRank]) -> None:
        """Go on with ``ranks``, some of which took the places of lost ones: the next sync connects anew."""
        async with self.pool.changing:
            self.calls.ranks, self._connected, self.training = list(ranks), [], True

    async def sync_engine(self, slot: EngineSlot) -> None:
        """Give an engine that was restarted or joined the published version, while the trainer still has just these
        weights: until :meth:`begin_training`. Called with the pool's lock taken. Raises WeightSyncError; errors of
        trainer ranks come through as they are, and the engine can be given them again."""
        if self.training:
            raise WeightSyncError(f"the trainer is past version {self.pool.published}; the next version is for it too")
        self.calls.ends = time.monotonic() + self.deadline_s
        version = self.pool.published
        try:
            await self._update([slot], version, SyncReport(version, 0, 1))
            await self.calls.on_engines([slot], "resume", lambda engine: engine.resume())
        except (EnginesLost, AttemptFailed) as error:
            causes = error.causes if isinstance(error, EnginesLost) else {}
            await self.pool.mark_dead(slot, causes.get(slot, str(error)))
            raise WeightSyncError(str(error)) from error
        except Exception:
            await self._leave_update([slot])
            raise
        self._whole.append(slot.engine)
        self.pool.serve(slot, version)

    async def _until_verified(self, version: str) -> SyncReport:
        failures: list[str] = []
        restarts: dict[EngineSlot, list[str]] = {}
        again = False
        await self._offload("gradients", "optimizer")
        while True:
            if self.pool.dead():  # an engine starts on GPUs that are as empty as they were when the run started
                await self._offload("weights")
            await self._restart_dead(restarts, failures)
            slots = self.pool.alive()
            if not slots:
                raise NoEngineLeft(self._none_left(version, failures))
            report = SyncReport(version, 0, len(slots), failures=failures)
            try:
                await self._update(slots, version, report)
                return report
            except EnginesDisagree as error:
                why, lost = str(error), error.causes
                if len(lost) == len(slots) and not all(slot.joined and not slot.verified for slot in slots):
                    await self._leave_update(slots)
                    raise WeightSyncError(
                        f"{self._unpublished(version)}: {next(iter(lost.values()))}. The bytes arrived as they were "
                        "sent: trainer and engine disagree about what they mean"
                    ) from error
            except EnginesLost as error:
                why, lost = str(error), error.causes
            except AttemptFailed as error:
                if again:
                    await self._leave_update(slots)
                    raise WeightSyncError(f"{self._unpublished(version)}: {error}") from error
                why, lost = str(error), {}
                again = True
            except BaseException:
                await self._leave_update(slots)
                raise
            log.warning("version %s: %s", version, why)
            if not any(same_failure(why, told) for told in failures):
                failures.append(why)
            for slot, cause in lost.items():
                await self.pool.mark_dead(slot, cause)
            await self._leave_update([slot for slot in slots if slot not in lost])

    # ------------------------------------------------------------------ one attempt
    async def _update(self, slots: list[EngineSlot], version: str, report: SyncReport) -> None:
        """Run all phases for these engines. Raises EnginesLost, AttemptFailed, or what a trainer rank raised."""
        with _timed(report, "pause"):
            for slot in slots:
                self.pool.pause(slot)
            await self.calls.on_engines(slots, "pause", _pause, SILENT_S)
            if self.shared_gpus:
                await self.calls.on_engines(slots, "wake weights", lambda engine: engine.wake(["weights"]))
        with _timed(report, "connect"):
            await self._connect(slots)
        report.adapters = names = self._travelling(slots)
        chosen = () if names is None or names == ("",) else (names,)
        connected = [sender for sender in self._metadata if sender]
        plan = self.plan if self.plan is None or names is None else self.plan.of(names)
        if plan is not None:  # workers know all but which of the adapters come
            connected = [] if names is None else [list(plan.tensors)]
        metadata = connected if names is None else [of_adapters(sender, names) for sender in connected]
        report.nbytes = sum(meta.nbytes for sender in metadata for meta in sender) if plan is None else plan.nbytes
        with _timed(report, "start"):
            await self.calls.on_engines(slots, "start", lambda engine: engine.start_update())
        with _timed(report, "transfer"):
            received, sent = await self.calls.together(
                slots,
                "transfer",
                lambda engine: engine.receive_weights(metadata),
                lambda _, rank: rank.send_weights(*chosen),
            )
        if plan is not None:
            compare_parcels(plan, slots, received, sent)
        else:
            _compare(slots, received, [sums for sums, sender in zip(sent, self._metadata, strict=True) if sender])
        versions = () if names is None else ({name: self.versions[name] for name in names},)
        with _timed(report, "finish"):
            await self.calls.on_engines(slots, "finish", lambda engine: engine.finish_update(version, *versions))
        with _timed(report, "probe"):
            await self._probe(slots, report)
        if names is not None:
            with _timed(report, "switch"):
                await self.calls.on_engines(slots, "switch", lambda engine: engine.set_version(version))

    def _travelling(self, slots: Sequence[EngineSlot]) -> tuple[str, ...] | None:
        """Return the adapters that these engines need: those that have changed, all where one of them is new."""
        if self.adapters is None:
            return None
        know = all(slot.engine in self._whole for slot in slots)
        return tuple(name for name in self.adapters if name in self._changed or not know)

    async def _connect(self, slots: list[EngineSlot]) -> None:
        engines = [slot.engine for slot in slots]
        if engines == self._connected:
            return
        self._connected = []
        self._metadata = await self.calls.on_ranks("metadata", lambda rank: rank.weight_metadata())
        if self.adapters is None:
            check_metadata(self._metadata, self.hf_config, draft=self.draft)
        else:
            check_adapters(self._metadata, self.adapters)
        self.plan = await self._planned(slots) if self.routed else None
        if self.plan is not None:
            rates = await connect_routes(self.calls, slots, self.plan, self._routed_options, self._unmeasured)
            if rates and self._choose(rates):
                self.plan = await self._planned(slots)
                assert self.plan is not None, "there was a plan for other buckets"
                await connect_routes(self.calls, slots, self.plan, self._routed_options)
        else:
            await self._connect_all(slots)
        self._connected = engines

    def _choose(self, rates: Mapping[int, float]) -> bool:
        """Take the smallest buckets that are nearly as fast as the fastest; return whether the plan has others."""
        self._unmeasured = ()
        fast = NEARLY * max(rates.values())
        chosen = next(size for size, rate in rates.items() if rate >= fast)
        measured = ", ".join(f"{size >> 20} MiB: {rate / 1e9:.2f} GB/s" for size, rate in rates.items())
        log.info("weights travel in buckets of %d MiB (%s)", chosen >> 20, measured)
        planned, self.planner.bucket_bytes = self.planner.bucket_bytes, chosen
        return planned != chosen

    @property
    def _routed_options(self) -> dict[str, Any]:
        return self.options | {"bucket_bytes": self.planner.bucket_bytes}

    async def _planned(self, slots: list[EngineSlot]) -> WorkerRoutes | None:
        """Return a plan of routes; None, and a line in the log, where there is none. Raises WeightSyncError where
        ranks exchange weights, which only a plan tells them how to."""
        planned = await (
            self.planner.plan(slots, self._rank_beside, self.exchange) if self.exchange else self.planner.plan(slots)
        )
        if isinstance(planned, str):
            if self.exchange:
                raise WeightSyncError(
                    f"weights cannot be planned: {planned}. An engine worker opens the memory of the rank on its own "
                    "GPU alone, and NCCL takes one process of a GPU: set trainer.placement.colocate_all=false"
                )
            log.info("every engine worker gets all weights, not its own alone: %s", planned)
            return None
        return planned

    def _rank_beside(self, slot: EngineSlot, number: int) -> int:
        """Return the rank on the GPU of an engine's worker: engine after engine has as many of the policy's GPUs as it
        has workers (``workers/placement.py``)."""
        return self.pool.slots.index(slot) * (len(self.calls.ranks) // len(self.pool.slots)) + number

    async def _connect_all(self, slots: list[EngineSlot]) -> None:
        """Let every worker join the group of every rank that sends."""
        sends = [bool(sender) for sender in self._metadata]
        workers = await self.calls.on_engines(slots, "connect", lambda engine: engine.worker_count())
        addresses = await self.calls.on_ranks("connect", lambda rank: rank.listen_for_engines())
        senders = [address for address, sending in zip(addresses, sends, strict=True) if sending]
        offsets = {id(slot.engine): 1 + sum(workers[:number]) for number, slot in enumerate(slots)}
        world = 1 + sum(workers)

        async def open_group(number: int, rank: TrainerRank) -> None:
            if sends[number]:
                await rank.connect_engines(world - 1, self.options["timeout_s"])

        await self.calls.together(
            slots,
            "connect",
            lambda engine: engine.connect_weights(senders, offsets[id(engine)], world, **self.options),
            open_group,
        )

    async def _probe(self, slots: list[EngineSlot], report: SyncReport) -> None:
        """Let trainer and engines score the same tokens, if it is due.

        Frozen requests go on for as long as that takes: their tokens are delivered once the version is published, or
        never.
        """
        tokens = probe_tokens(int(self.hf_config["vocab_size"]), report.version)
        due = is_due(self.syncs, self.probe_interval) or not all(slot.verified for slot in slots)
        names = (("",) if report.adapters is None else report.adapters) if due else ()
        expected = {name: await self._expected(tokens, name) for name in names}
        await self._offload("weights")
        if self.shared_gpus:
            await self.calls.on_engines(slots, "wake cache", lambda engine: engine.wake(["kv_cache"]))
        if not expected:
            return
        await self.calls.on_engines(slots, "probe", lambda engine: engine.resume())
        scored = {name: await self.calls.on_engines(slots, "probe", _scores(tokens, name)) for name in names}
        await self.calls.on_engines(slots, "probe", lambda engine: engine.pause("keep"))
        wrong: dict[EngineSlot, str] = {}
        for name, engines in scored.items():
            trainer, limit = expected[name]
            for slot, logprobs in zip(slots, engines, strict=True):
                found = logprob_diff(trainer, logprobs)
                report.logprob_diffs[f"{slot.name}, {name}" if name else slot.name] = found
                if not found.within(limit) and slot not in wrong:
                    wrong[slot] = (
                        f"log-probs of {len(tokens)} tokens{f' with adapter {name}' if name else ''} differ from the "
                        f"trainer's by up to {found.largest:.2e}, on average {found.mean:.2e}; the limit on average "
                        f"is {limit:.2g} in {self.dtype} (weight_sync_probe_limit sets another)"
                    )
        for slot in slots:
            slot.verified = slot.verified or slot not in wrong
        if wrong:
            raise EnginesDisagree("probe", wrong)

    async def _expected(self, tokens: list[int], adapter: str) -> tuple[list[float], float]:
        """Return the trainer's scores, and how far an engine's may be from them on average."""
        named = {"adapter": adapter} if adapter else {}

        async def score(perturbation: float) -> list[float]:
            scored = await self.calls.on_ranks(
                "probe", lambda rank: rank.score(tokens, perturbation=perturbation, **named)
            )
            return next(logprobs for logprobs in scored if logprobs is not None)

        trainer = await score(perturbation=0.0)
        perturbed = await score(perturbation=EPSILON[self.dtype])
        return trainer, self.probe_limit or limit_of(self.dtype, logprob_diff(trainer, perturbed))

    async def _offload(self, *parts: Part) -> None:
        """Let parts of the trainer leave GPUs that it shares."""
        if self.shared_gpus:
            await self.calls.on_ranks("offload", lambda rank: rank.offload(parts))

    # ------------------------------------------------------------------ failures
    async def _restart_dead(self, restarts: dict[EngineSlot, list[str]], failures: list[str]) -> None:
        """Restart engines that are dead, within the deadline; drop one that does not come up, that fails the same way
        again, or too often. ``restarts``: engine → what each restart of it in this sync was for."""
        for slot in self.pool.dead():
            causes = restarts.setdefault(slot, [])
            try:
                if any(same_failure(slot.why, cause) for cause in causes):
                    raise EngineError("a restart changes nothing")
                if len(causes) >= RESTARTS:
                    raise EngineError(f"failed again after {RESTARTS} restarts")
                causes.append(slot.why)
                async with asyncio.timeout(max(self.calls.ends - time.monotonic(), 0.0)):
                    await self.pool.restart(slot)
            except (EngineError, TimeoutError) as error:
                why = str(error) or f"not restarted within deadline_s={self.deadline_s:g}"
                await self.pool.drop(slot, why)
                failures.append(f"{slot.name} is dropped: {why}")
                log.error(failures[-1])

    def _none_left(self, version: str, failures: Sequence[str]) -> str:
        text = f"version {version} is not published, no engine is left: {'; '.join(failures)}"
        if not self.syncs:
            return f"{text}. Nothing was trained: mend the cause and start again"
        return f"{text}. The trainer's state is whole: the same command continues from its last checkpoint, if any"

    async def _leave_update(self, slots: Sequence[EngineSlot]) -> None:
        """Bring engines out of a sync that will not be finished; the next one starts with new groups. Those that still
        hold the published adapter serve on."""
        self._connected = []
        for slot in slots:
            try:
                await self.calls.within(slot.engine.abort_update())
                if self._old_serves and await self.calls.within(slot.engine.version()) == self.pool.published:
                    await self.calls.within(slot.engine.resume())
                    self.pool.serve(slot, self.pool.published)
            except (EngineError, WeightSyncError) as error:
                await self.pool.mark_dead(slot, str(error))

    @property
    def _old_serves(self) -> bool:
        """Whether engines can serve after a failed sync: none changes the base, and nobody else has their memory."""
        return self.adapters is not None and self.pool.published != INITIAL_VERSION and not self.pool.asleep

    def _unpublished(self, version: str) -> str:
        rest = f"engines serve on with version {self.pool.published}" if self._old_serves else "no engine generates"
        return f"version {version} is not published, {rest}"


async def _pause(engine: InferenceEngine) -> None:
    """Pause, and see that no process has stopped: the phases that follow have the time that weights may take."""
    await engine.pause("keep")
    await engine.health()


def _scores(tokens: list[int], adapter: str) -> Callable[[InferenceEngine], Awaitable[list[float]]]:
    return lambda engine: engine.score(tokens, adapter) if adapter else engine.score(tokens)


def _compare(slots: Sequence[EngineSlot], received: Sequence[list[list[list[int]]]], sent: list[list[int]]) -> None:
    """Raise AttemptFailed unless every worker of every engine got every bucket as it was sent."""
    wrong: list[str] = []
    nothing: list[int] = []
    for slot, workers in zip(slots, received, strict=True):
        for worker, sums in enumerate(workers):
            for sender, (got, want) in enumerate(zip_longest(sums, sent, fillvalue=nothing)):
                if got != want:
                    first = next(n for n, pair in enumerate(zip_longest(got, want)) if pair[0] != pair[1])
                    wrong.append(
                        f"{slot.name}, worker {worker}: bucket {first} of {len(want)} from sender {sender} is not "
                        "what was sent (checksums differ)"
                    )
    if wrong:
        raise AttemptFailed("; ".join(wrong[:4]))


@contextlib.contextmanager
def _timed(report: SyncReport, phase: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[phase] = time.perf_counter() - began
