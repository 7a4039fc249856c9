"""Publishing a policy version: all engines get the trainer's weights, prove it, and only then generate with them.

    hold and pause all → connect (once, and after engines changed) → start → send ‖ receive → compare checksums of
    every worker → finish → trainer and engines score the same tokens → publish → resume

An engine that fails is restarted and the update is made anew for all, or it is dropped while others are left. Until
the version is published nothing is delivered from the new weights, and a failed update leaves engines held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from skyrl_megatron.errors import EngineError, EngineGoneError, WeightSyncError
from skyrl_megatron.weight_sync import DEFAULT_BUCKET_BYTES
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.metadata import check_metadata
from skyrl_megatron.weight_sync.probe import HALF_EPSILON, Limit, gap, is_due, limit_of, probe_tokens
from skyrl_megatron.weight_sync.transport import default_transport
from skyrl_megatron.workers.sync_calls import Pool, SyncReport, TrainerRank

log = logging.getLogger(__name__)
RESTARTS = 2
"""Of one engine within one publication."""
ENGINE_SHARE = 0.8
"""Of a phase: the longest wait of a rank for engines. Ranks wait for one another longer, so that those which are not
to blame do not give up first."""
ANSWER_S = 30.0
"""How long an engine may take to show that it is alive after a failure."""


class _EnginesLost(Exception):
    """Engines that do not answer, or whose weights are wrong: only a restart helps."""

    def __init__(self, phase: str, causes: Mapping[Any, str]) -> None:
        super().__init__("; ".join(f"{slot.name}, phase {phase}: {why}" for slot, why in causes.items()))
        self.slots = list(causes)


class _AttemptFailed(Exception):
    """The update went wrong although every engine answers, as when bytes arrived that were not sent."""


class WeightSynchronizer:
    """Publishes versions to the engines of a pool; owns nothing but the order of things.

    ``hf_config``: of the model, for the check of completeness. ``dtype``: of the engines' weights. ``deadline_s``: for
    one publication, restarts included; ``phase_s``: for any phase of it, and the longest wait of any rank or worker.
    ``probe_interval``: syncs from one probe to the next (``weight_sync_probe_interval``). ``shared_gpus``: trainer and
    engines take turns on the same GPUs, and engines sleep while the trainer works.
    """

    def __init__(
        self,
        pool: Pool,
        ranks: Sequence[TrainerRank],
        *,
        hf_config: Mapping[str, Any],
        dtype: str,
        probe_interval: int = 1,
        transport: str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = 1800.0,
        phase_s: float = 600.0,
        shared_gpus: bool = False,
    ) -> None:
        self.pool, self.ranks = pool, list(ranks)
        self.hf_config, self.dtype, self.probe_interval = hf_config, dtype, probe_interval
        self.options = {
            "transport": transport or default_transport(),
            "bucket_bytes": bucket_bytes,
            "timeout_s": ENGINE_SHARE * phase_s,
        }
        self.deadline_s, self.phase_s, self.shared_gpus = deadline_s, phase_s, shared_gpus
        self.syncs = 0
        self.withdrawn = True
        self._metadata: list[list[TensorMeta]] = []
        self._connected: list[Any] = []  # engines that the ranks' groups were made for
        self._ends = 0.0

    async def publish(self, version: str) -> SyncReport:
        """Give every engine the trainer's weights as ``version``. Requests in flight are frozen meanwhile.

        Raises WeightSyncError when no engine could be verified: none generates then, the version is not published, and
        the trainer's state is untouched. Errors of trainer ranks come through as they are.
        """
        async with self.pool.changing:
            self._ends = time.monotonic() + self.deadline_s
            report = await self._until_verified(version)
            slots = self.pool.alive()
            for slot in slots:
                slot.version = version
            self.pool.publish(version)
            with _timed(report, "resume"):
                await self._each(slots, "resume", lambda engine: engine.resume())
            self.syncs += 1
            self.withdrawn = False
            return report

    async def withdraw(self) -> None:
        """The trainer is about to use its ranks or change its weights: returns once no update is under way and engines
        on the same GPUs sleep; until the next publication :meth:`bring_up_to_date` refuses."""
        async with self.pool.changing:
            self.withdrawn = True
            if self.shared_gpus:
                await self.pool.sleep(self.phase_s)

    async def bring_up_to_date(self, slot: Any) -> None:
        """Give a restarted engine the published version, while the trainer still holds just these weights: from a
        publication to :meth:`withdraw`. Called with the pool's lock held. Raises WeightSyncError."""
        if self.withdrawn:
            raise WeightSyncError(f"the trainer is past version {self.pool.published}; the next version is for it too")
        self._ends = time.monotonic() + self.deadline_s
        version = self.pool.published
        try:
            await self._update([slot], version, SyncReport(version, 0, 1))
            await self._each([slot], "resume", lambda engine: engine.resume())
        except (_EnginesLost, _AttemptFailed) as error:
            await self.pool.mark_dead(slot, str(error))
            raise WeightSyncError(str(error)) from error
        self.pool.serve(slot, version)

    async def _until_verified(self, version: str) -> SyncReport:
        failures: list[str] = []
        restarts: Counter[Any] = Counter()
        again = False
        if self.shared_gpus:
            await self._all_ranks("make room", lambda rank: rank.offload())
        while True:
            await self._mend(restarts, failures)
            slots = self.pool.alive()
            if not slots:
                raise WeightSyncError(
                    f"version {version} is not published, no engine is left: {'; '.join(failures)}. The trainer's "
                    "state is whole: resume the run from its last checkpoint"
                )
            report = SyncReport(version, 0, len(slots), failures=failures)
            try:
                await self._update(slots, version, report)
                return report
            except _EnginesLost as error:
                failures.append(str(error))
                lost = error.slots
            except _AttemptFailed as error:
                if again:
                    await self._leave_update(slots)
                    raise WeightSyncError(
                        f"version {version} is not published, no engine generates: {error}"
                    ) from error
                failures.append(str(error))
                again, lost = True, []
            except BaseException:
                await self._leave_update(slots)
                raise
            log.warning("version %s: %s", version, failures[-1])
            for slot in lost:
                await self.pool.mark_dead(slot, failures[-1])
            await self._leave_update([slot for slot in slots if slot not in lost])

    # ------------------------------------------------------------------ one attempt
    async def _update(self, slots: list[Any], version: str, report: SyncReport) -> None:
        """All phases for these engines. Raises _EnginesLost, _AttemptFailed, or what a trainer rank raised."""
        with _timed(report, "pause"):
            for slot in slots:
                self.pool.hold(slot)
            await self._each(slots, "pause", lambda engine: engine.pause("keep"))
            if self.shared_gpus:
                await self._each(slots, "wake weights", lambda engine: engine.wake(["weights"]))
        with _timed(report, "connect"):
            await self._connect(slots)
        report.nbytes = sum(meta.nbytes for announced in self._metadata for meta in announced)
        with _timed(report, "start"):
            await self._each(slots, "start", lambda engine: engine.start_update())
        with _timed(report, "transfer"):
            announced = [sender for sender in self._metadata if sender]
            received, sent = await self._together(
                slots,
                "transfer",
                lambda engine: engine.receive_weights(announced),
                lambda _, rank: rank.send_weights(),
            )
        _compare(slots, received, [sums for sums, sender in zip(sent, self._metadata, strict=True) if sender])
        with _timed(report, "finish"):
            await self._each(slots, "finish", lambda engine: engine.finish_update(version))
        with _timed(report, "probe"):
            await self._probe(slots, report)

    async def _connect(self, slots: list[Any]) -> None:
        engines = [slot.engine for slot in slots]
        if engines == self._connected:
            return
        self._connected = []
        announced = await self._all_ranks("announce", lambda rank: rank.weight_metadata())
        self._metadata = [[m if isinstance(m, TensorMeta) else TensorMeta(*m) for m in one] for one in announced]
        check_metadata(self._metadata, self.hf_config)
        sends = [bool(sender) for sender in self._metadata]
        workers = await self._each(slots, "connect", lambda engine: engine.worker_count())
        addresses = await self._all_ranks("connect", lambda rank: rank.listen_for_engines())
        senders = [address for address, sending in zip(addresses, sends, strict=True) if sending]
        offsets = {id(slot.engine): 1 + sum(workers[:number]) for number, slot in enumerate(slots)}
        world = 1 + sum(workers)

        async def open_group(number: int, rank: TrainerRank) -> None:
            if sends[number]:
                await rank.connect_engines(world - 1, self.options["timeout_s"])

        await self._together(
            slots,
            "connect",
            lambda engine: engine.connect_weights(senders, offsets[id(engine)], world, **self.options),
            open_group,
        )
        self._connected = engines

    async def _probe(self, slots: list[Any], report: SyncReport) -> None:
        """Frozen requests go on for as long as the probe takes: their tokens are delivered once the version is
        published, or never."""
        due = is_due(self.syncs, self.probe_interval)
        tokens = probe_tokens(int(self.hf_config["vocab_size"]), self.syncs)
        expected = await self._expected(tokens) if due else None
        if self.shared_gpus:
            await self._each(slots, "wake cache", lambda engine: engine.wake(["kv_cache"]))
        if expected is None:
            return
        trainer, limit = expected
        await self._each(slots, "probe", lambda engine: engine.resume())
        engines = await self._each(slots, "probe", lambda engine: engine.score(tokens))
        await self._each(slots, "probe", lambda engine: engine.pause("keep"))
        wrong = {}
        for slot, logprobs in zip(slots, engines, strict=True):
            report.gaps[slot.name] = found = gap(trainer, logprobs)
            if not found.within(limit):
                wrong[slot] = (
                    f"log-probs of {len(tokens)} tokens differ from the trainer's by up to {found.largest:.2e}, on "
                    f"average {found.mean:.2e}; the limit {'on average' if limit.of_mean else 'for each'} is "
                    f"{limit.nats:.2g} in {self.dtype}"
                )
        if len(wrong) == len(slots):
            raise WeightSyncError(
                f"version {report.version} is not published, no engine generates: {wrong[slots[0]]}. The bytes "
                "arrived as they were sent: trainer and engine disagree about what they mean"
            )
        if wrong:
            raise _EnginesLost("probe", wrong)

    async def _expected(self, tokens: list[int]) -> tuple[list[float], Limit]:
        """The trainer's scores, and how far an engine's may be from them."""

        async def score(nudge: float) -> list[float]:
            scored = await self._all_ranks("probe", lambda rank: rank.score(tokens, nudge=nudge))
            return next(logprobs for logprobs in scored if logprobs is not None)

        trainer, epsilon = await score(nudge=0.0), HALF_EPSILON.get(self.dtype)
        rounding = gap(trainer, await score(nudge=epsilon)) if epsilon else None
        return trainer, limit_of(self.dtype, rounding)

    # ------------------------------------------------------------------ failures
    async def _mend(self, restarts: Counter[Any], failures: list[str]) -> None:
        """Restart engines that are gone, within the deadline; drop one that does not come up, or fails again."""
        for slot in self.pool.lost():
            restarts[slot] += 1
            try:
                if restarts[slot] > RESTARTS:
                    raise EngineError(f"failed again after {RESTARTS} restarts")
                async with asyncio.timeout(max(self._ends - time.monotonic(), 0.0)):
                    await self.pool.restart(slot)
            except (EngineError, TimeoutError) as error:
                why = str(error) or f"not restarted within deadline_s={self.deadline_s:g}"
                await self.pool.drop(slot, why)
                failures.append(f"{slot.name} is dropped: {why}")
                log.error(failures[-1])

    async def _leave_update(self, slots: Sequence[Any]) -> None:
        """Bring engines out of an update that will not be finished; the next one starts with new groups."""
        self._connected = []
        for slot in slots:
            try:
                await self._within("abort", slot.engine.abort_update())
            except (EngineError, WeightSyncError) as error:
                await self.pool.mark_dead(slot, str(error))

    # ------------------------------------------------------------------ calls
    async def _each(self, slots: list[Any], phase: str, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """Results of all engines."""
        return (await self._together(slots, phase, call, None))[0]

    async def _all_ranks(self, phase: str, call: Callable[[TrainerRank], Awaitable[Any]]) -> list[Any]:
        """Results of all ranks."""
        return (await self._together([], phase, None, lambda _, rank: call(rank)))[1]

    async def _together(
        self,
        slots: list[Any],
        phase: str,
        of_engine: Callable[[Any], Awaitable[Any]] | None,
        of_rank: Callable[[int, TrainerRank], Awaitable[Any]] | None,
    ) -> tuple[list[Any], list[Any]]:
        """Results of engines and ranks, called at the same time.

        One that fails makes those that wait for it fail too. A rank's own error explains everything; else an engine
        that does not answer afterwards does; else nobody is to blame and the attempt failed.
        """
        work = [self._within(phase, of_engine(slot.engine)) for slot in slots] if of_engine else []
        if of_rank:
            work += [self._within(phase, of_rank(number, rank)) for number, rank in enumerate(self.ranks)]
        results = await asyncio.gather(*work, return_exceptions=True)
        of_engines, of_ranks = results[: len(slots)], results[len(slots) :]
        failed = {slot: str(e) for slot, e in zip(slots, of_engines, strict=True) if isinstance(e, BaseException)}
        waited = []
        for number, error in enumerate(of_ranks):
            if isinstance(error, EngineError):
                waited.append(f"trainer rank {number}, phase {phase}: {error}")
            elif isinstance(error, BaseException):
                raise error
        if not failed and not waited:
            return list(of_engines), list(of_ranks)
        silent = {slot: why for slot, why in failed.items() if not await self._answers(slot)}
        if silent:
            raise _EnginesLost(phase, silent)
        told = [f"{slot.name}, phase {phase}: {why}" for slot, why in failed.items()]
        raise _AttemptFailed("; ".join(told + waited))

    async def _answers(self, slot: Any) -> bool:
        try:
            await slot.probe(min(self.phase_s, ANSWER_S))
        except EngineGoneError as error:
            log.info("%s does not answer: %s", slot.name, error)
            return False
        return True

    async def _within(self, phase: str, work: Awaitable[Any]) -> Any:
        """Await with the deadlines of the phase and of the publication; a little more than the callee's own, whose
        error says more."""
        left = max(min(self.phase_s, self._ends - time.monotonic()), 0.0) + 5.0
        try:
            async with asyncio.timeout(left):
                return await work
        except TimeoutError:
            raise EngineError(f"no answer within {left:.0f} s") from None


def _compare(slots: Sequence[Any], received: Sequence[Any], sent: list[list[int]]) -> None:
    """Raise _AttemptFailed unless every worker of every engine got every bucket as it was sent."""
    wrong = []
    for slot, workers in zip(slots, received, strict=True):
        for worker, sums in enumerate(workers):
            for sender, (got, want) in enumerate(zip_longest(sums, sent, fillvalue=[])):
                if got != want:
                    first = next(n for n, pair in enumerate(zip_longest(got, want)) if pair[0] != pair[1])
                    wrong.append(
                        f"{slot.name}, worker {worker}: bucket {first} of {len(want)} from sender {sender} is not "
                        "what was sent (checksums differ)"
                    )
    if wrong:
        raise _AttemptFailed("; ".join(wrong[:4]))


@contextlib.contextmanager
def _timed(report: SyncReport, phase: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[phase] = time.perf_counter() - began
